"""Choose a new recipe's devices, batch, recomputation and length, by estimates of memory.

`recipe plan` reports the compiler's figure for the memory, but takes minutes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from recipec.compiler.arrangements import arrangements, splittable
from recipec.compiler.lowering.hardware import Accelerator
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.run_length import ENOUGH_STEPS, FEW_SAMPLES_EPOCHS, MOST_EPOCHS, Length
from recipec.compiler.roofline.remat_policy import POLICIES, RematChoice, choose
from recipec.compiler.roofline.step_estimate import Need, fits, need
from recipec.compiler.wording import divisors
from recipec.runtime.model.families.family import Parameter, arrays
from recipec.runtime.model.partition_rules import data_parallel, resolved
from recipec.spec.language import Lora

LENGTHS = (4096, 2048, 1024, 512)
"""Lengths of a row in tokens, the longest first."""
SHORTEST = LENGTHS[-1]

ROOMY = 2048
"""Below this length, a quantized base model or more tp is preferred to shorter rows."""

SHORT_ROWS_BELOW_GIB = 16
"""Devices with less memory than this start at rows of half the length."""

MOST_TOKENS = 16_384
"""Most tokens of a device's micro-batch. More do not use the device any better."""

ROWS = {"lora": 8, "qlora": 8, "full": 16, "dpo": 32, "kto": 32}
"""Least rows of an optimizer step, by method; pairs for preferences."""

JUDGED = {"preference": "dpo", "unpaired_preference": "kto"}
"""Training methods for formats with judged answers."""

FEWEST = {"kto": 2}
"""Least rows of a device's micro-batch, for methods that need more than one."""

RANK = Lora().rank
"""The language's default."""


@dataclass(frozen=True)
class Draft:
    """The settings that `drafts` chooses for a new recipe.

    Attributes:
        probe: the model.
        method: lora, qlora, dpo, kto or full.
        quantize: whether the base's weights are held in 4 bits.
        axes: devices along each mesh axis.
        policy: value of `remat.policy`.
        micro, rows: rows of a device's micro-batch and of an optimizer step.
        length: tokens of a row.
    """

    probe: Probe = field(repr=False)
    accelerator: Accelerator
    method: str
    quantize: bool
    axes: Mapping[str, int]
    policy: str
    micro: int
    rows: int
    length: int

    @property
    def accumulation(self) -> int:
        return self.rows // (self.parallel * self.micro)

    @property
    def parallel(self) -> int:
        """Devices, or groups of tp devices, that compute different rows."""
        return data_parallel(self.axes)

    @property
    def attention(self) -> str:
        flash = self.probe.program.family.flash_attention
        return "splash" if self.accelerator.platform == "tpu" and flash else "dot"

    @property
    def sure(self) -> bool:
        """Whether the draft fits even if the step takes the most memory that the estimate allows for."""
        return fits(self.accelerator, self.need.most)

    @cached_property
    def need(self) -> Need:
        """The memory that a step takes on one device, as an estimate."""
        return need(self.program)

    @cached_property
    def choice(self) -> RematChoice:
        """What a recipe of this draft gets with `remat.policy: auto`."""
        return choose(self.program)

    @property
    def program(self) -> Program:
        """The probe's program in this configuration."""
        probed = self.probe.program
        recipe = probed.recipe
        model = {
            "attention": self.attention,
            "dtype": dtype(self.accelerator),
            "quantization": "nf4" if self.quantize else None,
        }
        train = {"micro_batch_size": self.micro, "global_batch_size": self.rows}
        updates = {
            "model": recipe.model.model_copy(update=model),
            "mesh": recipe.mesh.model_copy(update={"axes": dict(self.axes)}),
            "remat": recipe.remat.model_copy(update={"policy": self.policy}),
            "data": recipe.data.model_copy(update={"max_length": self.length}),
            "train": recipe.train.model_copy(update=train),
        }
        return replace(
            probed,
            recipe=recipe.model_copy(update=updates),
            parameters=self.probe.parameters(self.axes),
            accelerator=self.accelerator,
            data_parallel=self.parallel,
            accumulation_steps=self.accumulation,
        )


def drafts(
    probe: Probe, accelerator: Accelerator, method: str | None, longest: int | None = None
) -> Iterator[Draft]:
    """Yield the configurations that fit, the best first.

    Configurations with more tp come last. They are for models that fsdp alone cannot split or cannot make
    fit. If none fits by the upper bound of its memory, yield those that save the most memory and fit by the
    lower bound. Only a plan can tell whether they fit.

    Args:
        probe: with adapters, or without them for `full`.
        method: None for LoRA, or QLoRA if LoRA does not fit.
        longest: estimated length of the data's longest row, in tokens.
    """
    any_fits = False
    for draft in _sure(probe, accelerator, method, longest):
        any_fits = True
        yield draft
    if not any_fits:
        yield from _unsure(probe, accelerator, method, longest)


def _sure(probe: Probe, accelerator: Accelerator, method: str | None, longest: int | None) -> Iterator[Draft]:
    """Yield the configurations that fit by the upper bound of their memory, the best first."""
    methods, lengths = _methods(method), _within(probe, _lengths(accelerator, longest))
    batch = _rows(methods[0][0], accelerator.devices)
    ways = list(arrangements(accelerator.devices, batch, 1, probe.experts))
    roomy = [length for length in lengths if length >= min(ROOMY, lengths[0])]
    without_tp = [way for way in ways if way.tp == 1]
    tried = [(way, method, roomy) for method in methods for way in without_tp]
    tried += [(way, method, roomy) for way in ways if way.tp > 1 for method in methods]
    # Rows shorter than ROOMY come last.
    tried += [(way, methods[-1], lengths[len(roomy) :]) for way in ways]
    for way, (name, quantize), some in tried:
        batch = _rows(name, accelerator.devices)
        start = Draft(probe, accelerator, name, quantize, way.axes, POLICIES[0], 1, batch, SHORTEST)
        fitting = _first(start, some)
        if fitting is not None:
            yield fitting


def _unsure(
    probe: Probe, accelerator: Accelerator, method: str | None, longest: int | None
) -> Iterator[Draft]:
    """Yield the configurations that save the most memory, and fit by the lower bound of their memory."""
    name, quantize = _methods(method)[-1]
    batch, micro = _rows(name, accelerator.devices), FEWEST.get(name, 1)
    # Shorter rows than the data needs would leave samples out.
    wanted = [SHORTEST] if longest is None else _lengths(accelerator, longest)
    for length in _within(probe, wanted):
        for way in arrangements(accelerator.devices, batch, 1, probe.experts):
            least = Draft(probe, accelerator, name, quantize, way.axes, POLICIES[-1], micro, batch, length)
            whole = batch % (way.parallel * micro) == 0
            if whole and fits(accelerator, least.need.least):
                yield least


def _within(probe: Probe, lengths: Sequence[int]) -> list[int]:
    """Return the lengths of rows for which the model has positions, at least one."""
    limits = (probe.positions, getattr(probe.program.architecture, "longest", None))
    most = min((limit for limit in limits if limit is not None), default=lengths[0])
    return sorted({min(length, most) for length in lengths}, reverse=True)


def smallest_need(probe: Probe, accelerator: Accelerator, method: str | None) -> float:
    """Return the lower bound of the bytes per device of the configuration that needs the least memory."""
    name, quantize = _methods(method)[-1]
    devices = accelerator.devices
    rows = _rows(name, devices)
    axes = {"fsdp": devices, "tp": 1}
    least = Draft(probe, accelerator, name, quantize, axes, POLICIES[-1], 1, rows, SHORTEST)
    return least.need.least


def resized(draft: Draft, rows: int, length: int) -> Draft:
    """Return the draft with another number of rows per step, or another row length."""
    fewest = FEWEST.get(draft.method, 1)
    rows = max(rows, fewest * draft.parallel)
    micro = max(size for size in divisors(rows // draft.parallel) if size <= max(fewest, draft.micro))
    return replace(draft, micro=micro, rows=rows, length=length)


def shortest(draft: Draft, longest: int | None) -> int:
    """Return the least row length of a draft that still holds samples of about `longest` tokens."""
    return draft.length if longest is None else min(draft.length, _round(longest))


def _methods(method: str | None) -> Sequence[tuple[str, bool]]:
    """Return the methods in the order to try them, each with whether the base model is quantized."""
    if method is None:
        return (("lora", False), ("qlora", True))
    if method in JUDGED.values():
        return ((method, False), (method, True))
    return ((method, method == "qlora"),)


def _rows(method: str, devices: int) -> int:
    least = ROWS[method]
    return least if least % devices == 0 else devices * math.ceil(least / devices)


def _first(start: Draft, lengths: Sequence[int]) -> Draft | None:
    """Return the fitting draft with the longest rows, then least recomputation, then largest micro-batch."""
    for length in lengths:
        for policy in POLICIES[:1] if start.accelerator.platform == "cpu" else POLICIES:
            if policy == "save_attention" and start.attention != "splash":
                continue
            best = None
            for micro in divisors(start.rows // start.parallel):
                if micro < FEWEST.get(start.method, 1):
                    continue
                candidate = replace(start, policy=policy, micro=micro, length=length)
                enough = best is not None and micro * length > MOST_TOKENS
                if enough or not candidate.sure:
                    break
                best = candidate
            if best is not None:
                return best
    return None


def _lengths(accelerator: Accelerator, longest: int | None) -> list[int]:
    if accelerator.platform == "cpu":
        return [min(512, _round(longest or 512))]
    small = accelerator.hbm_bytes_per_device < SHORT_ROWS_BELOW_GIB * 2**30
    usual = LENGTHS[1] if small else LENGTHS[0]
    first = usual if longest is None else min(max(_round(longest), 1024), 2 * usual)
    return [first, *(length for length in LENGTHS if length < first)]


def _round(tokens: int) -> int:
    """Round up to a multiple of 512, with a margin for the chat template and for the estimate's error."""
    return max(512, math.ceil(tokens * 1.25 / 512) * 512)


def dtype(accelerator: Accelerator) -> str:
    """Return the type of the weights: CPUs are slow at bfloat16."""
    return "bfloat16" if accelerator.platform == "tpu" else "float32"


@dataclass
class Probe:
    """A model as a program on one device, with what is the same in every configuration.

    Attributes:
        positions: the most tokens of a sequence that the model has positions for; None if not known.
    """

    program: Program
    positions: int | None = None

    @cached_property
    def experts(self) -> int:
        """Experts of a layer that the mesh axis ep can split; 1 for none."""
        return splittable(self.program.family, self.program.architecture)

    @cached_property
    def _defaults(self) -> list[Parameter]:
        """The model's arrays with the family's shardings."""
        default = {p.path: p.spec for p in arrays(self.program.family, self.program.architecture)}
        return [replace(p, spec=default[p.path]) for p in self.program.parameters]

    def parameters(self, axes: Mapping[str, int]) -> tuple[Parameter, ...]:
        """Return the model's arrays with their shardings on a mesh."""
        return resolved(self._defaults, (), axes)


USUAL_EPOCHS = 3
"""Passes over the data: the most with the usual batch. Little data takes up to MOST_EPOCHS."""

EVERY = 100
"""Steps between evaluations, and between checkpoints, of a run that is long enough."""

PARTS = 5
"""Number of parts of a shorter run; an evaluation and a checkpoint end each part."""


class RunShape(NamedTuple):
    """The values that set the number of steps: passes over the data, rows per step, tokens per row."""

    epochs: int
    rows: int
    length: int


@dataclass(frozen=True)
class Pace:
    """The length of a run.

    Attributes:
        every: steps between evaluations, and between checkpoints.
        words: the length in words; "" if the data does not determine it.
    """

    epochs: int = 1
    every: int = EVERY
    words: str = ""


def paced(draft: Draft, longest: int | None, length: Callable[[RunShape], Length]) -> tuple[Draft, Pace]:
    """Return the draft with the largest batch, and its fewest epochs, that give enough steps.

    Args:
        longest: estimated length of the data's longest sample, in tokens; None if not known.
        length: computes the length of a run.
    """
    usual = RunShape(1, draft.rows, draft.length)
    chosen, pace = usual, length(usual)
    if pace.least is None or pace.steps is None:
        return draft, Pace()
    for chosen in _choices(draft, shortest(draft, longest)):
        pace = length(chosen)
        if (pace.least or 0) >= ENOUGH_STEPS:
            break
    else:
        chosen = chosen._replace(epochs=FEW_SAMPLES_EPOCHS)
        pace = length(chosen)
    words = pace.words()
    if (pace.steps or 0) < ENOUGH_STEPS:
        words += f", since the samples are few: learning takes {ENOUGH_STEPS} or more"
    if (chosen.rows, chosen.length) != (draft.rows, draft.length):
        draft = resized(draft, chosen.rows, chosen.length)
    return draft, Pace(chosen.epochs, min(EVERY, max(1, (pace.least or 1) // PARTS)), words)


def _choices(draft: Draft, short: int) -> Iterator[RunShape]:
    """Yield shapes from the shortest run to the longest."""
    fewest = FEWEST.get(draft.method, 1)
    sizes = [size for size in reversed(divisors(draft.rows // draft.parallel)) if size >= fewest]
    batches = [draft.parallel * size for size in sizes]
    for batch in batches:
        for epochs in range(1, USUAL_EPOCHS + 1):
            yield RunShape(epochs, batch, draft.length)
    for epochs in range(USUAL_EPOCHS, MOST_EPOCHS + 1):
        yield RunShape(epochs, batches[-1], short)
