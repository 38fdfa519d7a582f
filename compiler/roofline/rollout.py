"""Estimate the memory of rollouts on one device, and choose their layout, without a compile.

While it generates, a device holds

- the state of training, which stays: weights, adapters and the optimizer's state;
- the weights in the layout of the rollout, if that differs from the training mesh's. With adapters the frozen
  weights stay there during the update too;
- the cache: keys and values of every layer with attention, for each slot of a row. A row has slots for the
  longest prompt and the longest completion;
- the logits of a token of each row, twice in float32, for sampling;
- the values of one layer for the prompts of all rows, which fill the cache in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from recipec.compiler.lowering.divided import resolve_specs
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.sizes import BYTES, tp_sizes
from recipec.compiler.pages.numbers import gib_number
from recipec.compiler.roofline.training_step import STORED, state_bytes
from recipec.compiler.wording import mesh_axes
from recipec.runtime.model.families.family import arrays, matrices
from recipec.runtime.model.partition_rules import DATA, shards
from recipec.runtime.model.slots_read import mean_read
from recipec.spec.language import Rollout

MARGIN = 0.1
"""The share of a device's memory that the chosen layout leaves free: this is an estimate."""

LAYER_VALUES = 4
"""Arrays of the hidden size, and of the feed-forward block's, that a layer holds for the prompts at once."""


@dataclass(frozen=True)
class RolloutNeed:
    """Bytes of one device while completions are generated.

    Attributes:
        state: of training.
        weights: in the layout of the rollout; 0 if it is the training mesh's.
        cache: keys and values of all rows that are generated at once.
        work: logits, and a layer's values of the prompts.
    """

    state: float
    weights: float
    cache: float
    work: float

    @property
    def total(self) -> float:
        return self.state + self.weights + self.cache + self.work


def rollout_need(program: Program, axes: Mapping[str, int] | None = None) -> RolloutNeed:
    """Estimate the memory of a program's rollouts.

    Args:
        axes: their layout; None for the recipe's.
    """
    axes = axes or axes_of(program)
    weights = weights_bytes(program, axes) if differs(program, axes) else 0.0
    return RolloutNeed(state_bytes(program), weights, cache_bytes(program, axes), _work(program, axes))


def axes_of(program: Program) -> Mapping[str, int]:
    """Return the mesh axes of a program's rollouts."""
    recipe = program.recipe
    return recipe.rollout.axes or recipe.mesh.axes


def differs(program: Program, axes: Mapping[str, int]) -> bool:
    """Return whether a layout needs weights of its own."""
    return _several(axes) != _several(program.recipe.mesh.axes)


def kept_bytes(program: Program) -> float:
    """Return the bytes of frozen weights that stay in the rollout's layout during the update."""
    if program.recipe.rollout.engine == "vllm":
        return 0.0
    axes = axes_of(program)
    kept = program.generated is not None and program.lora is not None and differs(program, axes)
    return weights_bytes(program, axes) if kept else 0.0


def weights_bytes(program: Program, axes: Mapping[str, int]) -> float:
    """Return the bytes of the model's weights on one device of a layout."""
    recipe, family, architecture = program.recipe, program.family, program.architecture
    parameters = resolve_specs(arrays(family, architecture), program.rules, axes, "replicate")
    quantized, size = STORED[recipe.model.quantization], BYTES[recipe.model.dtype]
    linear = matrices(family, architecture, parameters)
    total = 0.0
    for parameter in parameters:
        stored = quantized if quantized is not None and parameter.path in linear else size
        parts = math.prod(shards(axis, axes) for axis in parameter.spec)
        total += math.prod(parameter.shape) / parts * stored
    return total


def cache_bytes(program: Program, axes: Mapping[str, int]) -> float:
    """Return the bytes of keys and values on one device. Heads that tp does not divide are on each device."""
    return sum(_kept(program, axes).values()) * program.recipe.data.max_length


def cache_read_bytes(program: Program, axes: Mapping[str, int]) -> float:
    """Return the bytes of keys and values that a device reads in a pass of one token, on average."""
    return sum(size * slots_read(program, layer) for layer, size in _kept(program, axes).items())


def slots_read(program: Program, layer: int) -> float:
    """Return the slots of a row that a layer's attention reads in a pass of one token, on average."""
    about, window = program.generated, getattr(program.architecture, "window", None)
    assert about is not None
    reach = window(layer) if window else None
    return mean_read(about.prompt, program.recipe.data.max_length, reach)


def _kept(program: Program, axes: Mapping[str, int]) -> dict[int, float]:
    """Return the bytes of keys and values of one slot of all rows on a device, by layer with attention."""
    a, tp = program.architecture, axes.get("tp", 1)
    latent, out = getattr(a, "latent", None), {}
    for layer in filter(a.scores, range(a.num_layers)):
        if latent is not None:
            heads, size = a.heads(layer), latent.plain + latent.turned + latent.values
        else:
            head_dim_of = getattr(a, "layer_head_dim", None)
            heads, size = a.kv_heads(layer), 2 * (head_dim_of(layer) if head_dim_of else a.head_dim)
        numbers = heads * size / (1 if heads % tp else tp)
        out[layer] = _rows(program, axes) * numbers * BYTES[program.recipe.model.dtype]
    return out


def _rows(program: Program, axes: Mapping[str, int]) -> float:
    """Return the completions that one device generates at once."""
    rows = program.recipe.rollout.rows or program.recipe.train.global_batch_size
    return rows / math.prod(axes.get(axis, 1) for axis in DATA)


def _work(program: Program, axes: Mapping[str, int]) -> float:
    about, a, tp = program.generated, program.architecture, axes.get("tp", 1)
    assert about is not None
    rows = _rows(program, axes)
    logits = 2 * 4 * rows * a.vocab_size / tp
    wide = getattr(a, "intermediate_size", None) or 4 * a.hidden_size
    values = LAYER_VALUES * (a.hidden_size + wide / tp) * BYTES[program.recipe.model.dtype]
    return logits + rows * about.prompt * values


def with_layout(program: Program) -> Program:
    """Resolve `rollout.axes: null`: tp as large as heads and memory allow, if fsdp splits the weights."""
    recipe = program.recipe
    axes = recipe.mesh.axes
    split = axes.get("fsdp", 1) * axes.get("cp", 1)
    if not any("fsdp" in parameter.spec for parameter in program.parameters):
        split = 1  # by the recipe's rules, each device has all weights
    fixed = program.generated is None or recipe.rollout.axes is not None or recipe.rollout.engine == "vllm"
    if fixed or program.accelerator.platform != "tpu" or split == 1:
        return program
    shared = {axis: size for axis, size in axes.items() if axis in ("dcn", "ep")}
    rest = split * axes.get("tp", 1)
    available = (1 - MARGIN) * program.accelerator.hbm_bytes_per_device
    rows = recipe.rollout.rows or recipe.train.global_batch_size
    for tp in sorted(tp_sizes(program.architecture, rest), reverse=True):
        layout = {**shared, "fsdp": rest // tp, "tp": tp}
        layout = {axis: layout[axis] for axis in ("dcn", "fsdp", "ep", "tp") if axis in layout}
        needed = rollout_need(program, layout).total
        if rows % math.prod(layout.get(axis, 1) for axis in DATA) or (needed > available and tp > 1):
            continue
        if _several(layout) == _several(axes):
            return program
        section: Rollout = recipe.rollout.model_copy(update={"axes": layout})
        section.model_fields_set.discard("axes")
        gathered = "fewer weights than the training mesh" if layout["fsdp"] > 1 else "no weights"
        reason = (
            f"{mesh_axes(layout)} gathers {gathered} for a token, and needs {gib_number(needed, 1)} GiB of a "
            "device by calculation"
        )
        changed = recipe.model_copy(update={"rollout": section})
        return replace(program, recipe=changed, automatic={**program.automatic, "rollout.axes": reason})
    return program


def _several(axes: Mapping[str, int]) -> dict[str, int]:
    return {axis: size for axis, size in axes.items() if size > 1}
