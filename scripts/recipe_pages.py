"""Texts made from the estimates in recipes/estimates.json: the heads of recipes, and docs/recipes.md."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from recipec.compiler import card, catalog
from recipec.compiler.card import Result
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.results import Memory
from recipec.compiler.wording import listing

WIDTH = 110
MARK = "# Estimates: "
"""The start of the generated paragraph in a recipe's head."""

METHODS = ("lora", "qlora", "full")
"""The methods in the table of what fits where, in the order of a cell's values."""
MACHINES = ("v5e-8", "v5p-8", "v6e-8", "tpu7x-8")

INTRODUCTION = """\
# Recipes

The recipes are in `recipes/`, and their artifacts in `generated/`. Copy the one that is closest to your task,
change the data, and compare:

```sh
cp recipes/qwen3-14b-qlora-v5e8.yaml mine.yaml
recipe diff recipes/qwen3-14b-qlora-v5e8.yaml mine.yaml
```

All recipes pass `recipe check`, and `make nightly` runs `recipe rehearse` on each. `recipe plan` compiled
those for TPUs. None was measured on a TPU. After a change to a recipe, `python -m scripts.recipes plan`
compiles it again, and `python -m scripts.recipes write` writes its head and this page.
"""

ABOUT_FIGURES = """\
`recipe build recipes/NAME.yaml` builds the recipe NAME. Most names say the model and the machine.
HBM is the memory that the compiler allocates on one JAX device, and the memory of the device. Two figures in
a cell are the ends of an interval around the estimate, from the errors of estimates for published runs
([planning](planning.md)). All rows count as full; packed rows nearly are. US$ are list prices; tpu7x has
none. A recipe's `cost.train_usd_per_hour` sets your price. The recipe's first lines name the seconds of a
step, and `recipes/estimates.json` has the versions, dates and all parts of the memory.
"""

ABOUT_FITS = """\
A cell is a lower bound in GiB on each JAX device: weights, trained state, and the minimum for the backward
pass. It is computed from shapes, without compiling, for rows of 2,048 tokens, one on each device,
`remat: {policy: decoder}`, splash attention, all devices on fsdp, AdamW, LoRA of rank 32 on all seven
projections, and QLoRA in nf4. The compiler allocates more, often by some GiB. A dash means that the bound is
more than the device has.
"""


@dataclass(frozen=True)
class Parts:
    """The share of a micro-batch that experts take, on one device.

    Attributes:
        experts: seconds of their products.
        dispatched, dispatch: bytes of rows that arrive from other devices, and seconds.
        gathered, gathers: bytes of weights (experts' and others) gathered from other devices, and seconds.
    """

    experts: float
    dispatched: float
    dispatch: float
    gathered: float
    gathers: float


@dataclass(frozen=True)
class First:
    """The first estimate of a plan, from schedules of few layers.

    Attributes:
        layers: of the schedules.
        used: bytes of one device's memory.
        seconds: for a micro-batch; 0 if one of the schedules did not fit.
    """

    layers: Sequence[int]
    used: float
    seconds: float


@dataclass(frozen=True)
class Planned:
    """The results of `recipe plan` for a recipe.

    Attributes:
        key: digest of everything in the resolved recipe that the figures depend on.
        date: of the compilation, as YYYY-MM-DD.
        versions: of the packages that the estimate depends on.
        compiled_layers: number of layers that were compiled; the figures cover all layers.
        memory: bytes of one device.
        seconds: estimate for a micro-batch; None if its schedule has not been read yet.
        interval: low and high factor of the estimate, as in compiler.plan.results.Interval.
        micro_batches: per optimizer step.
        tokens: per optimizer step over all devices, with full rows.
        mfu: model FLOPs relative to the devices' peak in `seconds`.
        usd_per_hour: list price of the machine; None if there is none.
        parts: for a model with experts.
        first: the first estimate; None if there was none.
        generation: the fewest and the most seconds of an optimizer step in which completions are generated,
            which are not in `seconds`; None if it has none.
    """

    key: str
    date: str
    versions: Mapping[str, str]
    compiled_layers: Sequence[int]
    memory: Memory
    seconds: float | None
    interval: tuple[float, float]
    micro_batches: int
    tokens: int
    mfu: float | None
    usd_per_hour: float | None
    parts: Parts | None = None
    first: First | None = None
    generation: tuple[float, float] | None = None

    @property
    def step(self) -> tuple[float, float]:
        """Return the lowest and highest seconds of an optimizer step, if there is an estimate."""
        assert self.seconds is not None
        low, high = (factor * self.seconds * self.micro_batches for factor in self.interval)
        least, most = self.generation or (0.0, 0.0)
        return low + least, high + most

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """Return the lowest and the highest tokens/s."""
        low, high = self.step
        return self.tokens / high, self.tokens / low

    @property
    def usd_per_million(self) -> tuple[float, float] | None:
        """Return the lowest and the highest US$ per million tokens."""
        if self.usd_per_hour is None:
            return None
        low, high = (self.usd_per_hour / 3600 * seconds / self.tokens * 1e6 for seconds in self.step)
        return low, high


@dataclass(frozen=True)
class Record:
    """The contents of recipes/estimates.json.

    Attributes:
        recipes: by the recipe's name.
        fits: lower bound of a device's memory in GiB, by model, machine and method; None if it does not fit.
    """

    recipes: dict[str, Planned]
    fits: dict[str, dict[str, dict[str, float | None]]]


def about_first(planned: Iterable[Planned]) -> list[str]:
    """Return a sentence that compares the first estimates with the plans, if any were recorded."""
    memory, seconds = [], []
    for plan in planned:
        if plan.first is not None and plan.seconds:
            memory.append(plan.first.used / plan.memory.used - 1)
            seconds.append(plan.first.seconds / plan.seconds - 1)
    if not memory:
        return []
    return [
        "`recipe plan` shows a first estimate, from schedules of a few layers. It was recorded for "
        f"{len(memory)} of these recipes: its memory is {_span(memory)} from the plan's, its time "
        f"{_span(seconds)}.\n"
    ]


def _span(differences: Sequence[float]) -> str:
    """Write the smallest and the largest difference: "-0.3 to +0.1 %"."""
    return f"{100 * min(differences):+.1f} to {100 * max(differences):+.1f} %"


def head(planned: Planned) -> list[str]:
    """Return the comment lines at the end of a recipe's head."""
    memory = planned.memory
    text = f"{memory.used / 2**30:.1f} of {memory.available / 2**30:.2f} GiB on each device"
    if planned.seconds is not None:
        slow, fast = planned.tokens_per_second
        text += (
            f"; {span(*planned.step, 2)} s an optimizer step of {planned.tokens:,} tokens, "
            + (
                f"at most {planned.generation[1]:.2f} s of it to generate them, "
                if planned.generation
                else ""
            )
            + f"{thousands(slow)} to {thousands(fast)} tokens/s"
        )
        if (usd := planned.usd_per_million) is not None:
            text += f", US$ {span(*usd, 2)} a million tokens"
    versions = planned.versions
    text += (
        f". By libtpu {versions['libtpu']} and jax {versions['jax']} on {planned.date}, not measured: "
        "docs/recipes.md says what the two figures are."
    )
    return wrap(MARK + text, WIDTH - 1, subsequent_indent="# ", break_on_hyphens=False)


def with_head(text: str, lines: Sequence[str]) -> str:
    """Replace the paragraph of estimates at the end of a recipe's head.

    Args:
        text: the recipe; its head is the comment lines at its start.
        lines: the new paragraph; an empty one removes it.
    """
    given = text.splitlines(keepends=True)
    end = next((i for i, line in enumerate(given) if not line.startswith("#")), len(given))
    start = next((i for i, line in enumerate(given[:end]) if line.startswith(MARK)), end)
    kept = given[:start]
    while kept and kept[-1].rstrip() == "#":
        kept.pop()
    added = ["#\n", *(f"{line}\n" for line in lines)] if lines else []
    return "".join([*kept, *added, *given[end:]])


COMPILERS, LIBRARIES = ("libtpu", "jax"), ("jax", "google-tunix", "qwix")
"""The packages whose versions a card names: those that compiled for a TPU, and those that ran on a CPU."""


def verified(
    programs: Mapping[str, Program],
    plans: Mapping[str, Planned],
    rehearsals: Mapping[str, Mapping[str, Any]],
    proofs: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Result]]:
    """Return what cards say, by kind and by a step's key or a family's name.

    Args:
        plans: of recipes/estimates.json.
        rehearsals: recipes/rehearsed.json; rehearsals of recipes that changed since are ignored.
        proofs: of docs/models.json, by family and its variants.
    """
    compiled = {
        card.key(programs[name]): Result(_compiled(plan), _named(plan.versions, COMPILERS), plan.date)
        for name, plan in plans.items()
    }
    rehearsed = {
        rehearsal["key"]: Result(
            _rehearsed(rehearsal["figures"]), _named(rehearsal["versions"], LIBRARIES), rehearsal["date"]
        )
        for name, rehearsal in rehearsals.items()
        if name in programs and rehearsal["key"] == card.key(programs[name])
    }
    families = sorted({case.partition("-")[0] for case in proofs})
    return {
        "compiled": compiled,
        "rehearsed": rehearsed,
        "numerics": {
            name: _proved([proof for case, proof in proofs.items() if case.partition("-")[0] == name])
            for name in families
        },
    }


def _named(versions: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: versions[name] for name in names if versions.get(name)}


def _compiled(planned: Planned) -> str:
    memory = planned.memory
    return f"{memory.used / 2**30:.1f} of {memory.available / 2**30:.2f} GiB on each device" + (
        f", {span(*planned.step, 2)} s a step" if planned.seconds is not None else ""
    )


def _rehearsed(figures: Mapping[str, str]) -> str:
    """Describe a rehearsal: trained, killed, resumed, merged and verified."""
    loss = re.search(r"loss [\d.]+ to [\d.]+", figures["train"])
    apart = re.search(r"difference ([\d.e+-]+)", figures["verify"])
    assert loss and apart and figures["compare"].endswith("bit-identical")
    return f"{loss[0]}; killed and resumed, bit-identical; merged, logits within {apart[1]}"


PROVED = {"logits": "logits", "losses": "losses of twenty steps", "merged": "the merged model's logits"}
"""What the proofs of a family compare, in words."""


def _proved(cases: Sequence[Mapping[str, Any]]) -> Result:
    """Return the largest differences of a family's proofs; add versions and date if all proofs share them."""
    worst = {what: [float(case[what]) for case in cases if what in case] for what in PROVED}
    sentences = [f"{PROVED[what]} within {max(apart):.0e}" for what, apart in worst.items() if apart]
    dates = {case.get("date") for case in cases}
    versions = [case.get("versions") for case in cases]
    same = versions[0] or {} if all(version == versions[0] for version in versions) else {}
    return Result(", ".join(sentences), _named(same, LIBRARIES), dates.pop() if len(dates) == 1 else None)


def cards(programs: Mapping[str, Program], known: Mapping[str, Mapping[str, Result]]) -> str:
    """Return what the cards of all recipes say: for each kind, how many have a record, and which do not."""
    lines = []
    for kind, how in card.KINDS.items():
        records = known.get(kind, {})
        keys = {
            name: program.family.name if how.of_family else card.key(program)
            for name, program in sorted(programs.items())
            if not how.tpu or program.accelerator.platform == "tpu"
        }
        missing = [f"`{name}`" for name, key in keys.items() if key not in records]
        line = f"- **{how.title}**: {len(keys) - len(missing)} of {len(keys)}"
        lines.append(f"{line}; not {listing(missing)}" if 0 < len(missing) < len(keys) else line)
    return "\n".join(lines) + "\n"


ABOUT_CARDS = """\
The number of recipes with a record. `recipe card RECIPE` and the README.md of its artifact have the results,
the dates and the versions. A test may cover a recipe without a record: `make nightly` rehearses each of them.
"""


def page(programs: Mapping[str, Program], record: Record, known: Mapping[str, Mapping[str, Result]]) -> str:
    """Return docs/recipes.md.

    Args:
        programs: all recipes by name.
        known: what cards say, from `verified`.
    """
    of_tpus = [program for program in programs.values() if program.accelerator.platform == "tpu"]
    here = sorted(program.name for program in programs.values() if program not in of_tpus)
    rows = [_row(program, record.recipes.get(program.name)) for program in sorted(of_tpus, key=_place)]
    parts = [
        INTRODUCTION,
        "## By model\n",
        ABOUT_FIGURES,
        *about_first(record.recipes.values()),
        table(_HEAD, rows),
        *(
            ["A row without tokens/s has no plan from its schedule yet.\n"]
            if any(not row[-2] for row in rows)
            else []
        ),
        f"On a CPU: {listing(f'`{_file(name)}`' for name in here)}.\n",
        "## What was verified\n",
        ABOUT_CARDS,
        cards(programs, known),
        "## Where a model fits\n",
        ABOUT_FITS,
        _fits(record),
    ]
    return "\n".join(parts)


_HEAD = ("Recipe", "HBM, GiB", "US$ a million tokens", "Tokens/s", "Method")
"""What decides comes first: a phone shows the first columns."""


def _row(program: Program, planned: Planned | None) -> tuple[str, ...]:
    name, how = f"`{program.name}`", method(program)
    if planned is None:
        return (name, "", "", "", how)
    memory = planned.memory
    used = f"{memory.used / 2**30:.1f} of {memory.available / 2**30:.2f}"
    if planned.seconds is None:
        return (name, used, "", "", how)
    usd, (slow, fast) = planned.usd_per_million, planned.tokens_per_second
    return (
        name,
        used,
        "" if usd is None else span(*usd, 2),
        f"{thousands(slow)} to {thousands(fast)}",
        how,
    )


def method(program: Program) -> str:
    """Return the method: "QLoRA (nf4), DPO", "QLoRA (int8, products too), rank 64", "LoRA, rank 32" ..."""
    lora, model = program.lora, program.recipe.model
    if lora is None:
        how = "all weights"
    elif model.quantization:
        products = ", products too" if model.quantized_matmul else ""
        how = f"QLoRA ({model.quantization}{products}), rank {lora.rank}"
    else:
        how = f"LoRA, rank {lora.rank}"
    objective = program.recipe.train.objective
    return how if objective == "sft" else f"{how}, {objective.upper()}"


def _place(program: Program) -> tuple[str, int, str]:
    """Return a recipe's sort key in the table: family and size."""
    size = sum(math.prod(parameter.shape) for parameter in program.parameters)
    return program.family.name, size, program.name


def _fits(record: Record) -> str:
    rows = [
        (catalog.title(model), *(" / ".join(map(_cell, fits[machine].values())) for machine in MACHINES))
        for model, fits in record.fits.items()
    ]
    return table(("LoRA / QLoRA / all weights", *MACHINES), rows)


def _cell(gib: float | None) -> str:
    return "-" if gib is None else f"{gib:.1f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"|{'|'.join(line)}|\n" for line in lines)


def _file(name: str) -> str:
    return f"recipes/{name}.yaml"


def span(low: float, high: float | None, digits: int) -> str:
    return f"{low:.{digits}f} to {high:.{digits}f}"


def thousands(number: float) -> str:
    """Round a number to three digits: "21,500"."""
    digits = len(str(int(number)))
    return f"{round(number, 3 - digits) if digits > 3 else number:,.0f}"
