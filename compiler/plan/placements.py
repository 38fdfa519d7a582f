"""List a model's arrays by name, shape and sharding."""

from __future__ import annotations

import math
from collections.abc import Iterator

from recipec.compiler.emitters.backends import Backend
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.sizes import BYTES
from recipec.compiler.plan.results import Placement
from recipec.compiler.wording import split_layer
from recipec.runtime.model.families.base import Spec
from recipec.runtime.model.partition_rules import divisible, shards

Array = tuple[str, tuple[int, ...], Spec, int]
"""Path, shape, sharding, and bytes of each number."""


def placements(program: Program, backend: Backend = Backend.TUNIX) -> tuple[Placement, ...]:
    """Return the model's arrays as a backend shards them, the largest first.

    Base weights are in the model's dtype and adapters in their own. Quantized weights are counted in the
    dtype before quantization.
    """
    arrays = _torchax(program) if backend is Backend.TORCHAX else _tunix(program)
    axes = program.recipe.mesh.axes
    groups: dict[tuple[str, tuple[int, ...], Spec], list[float]] = {}
    for path, shape, spec, size in arrays:
        parts = math.prod(shards(axis, axes) for axis in spec)
        groups.setdefault((split_layer(path)[0], shape, spec), []).append(math.prod(shape) * size / parts)
    found = [Placement(*key, count=len(each), bytes=sum(each)) for key, each in groups.items()]
    return tuple(sorted(found, key=lambda placement: -placement.bytes))


def _tunix(program: Program) -> Iterator[Array]:
    whole = {p.path for p in program.whole}
    for p in program.parameters:
        dtype = program.lora.dtype if program.lora and p.path in whole else program.recipe.model.dtype
        yield p.path, p.shape, p.spec, BYTES[dtype]
    if program.lora is not None:
        yield from ((p.path, p.shape, p.spec, BYTES[program.lora.dtype]) for p in program.token_rows)
        for x in program.adapters:
            yield from ((*array, BYTES[program.lora.dtype]) for array in x.arrays)


def _torchax(program: Program) -> Iterator[Array]:
    """Yield transformers' tensors, and PEFT's adapters on them."""
    from recipec.runtime.backends.torchax.placement import adapter_specs, tensor_specs

    axes = program.recipe.mesh.axes
    specs = tensor_specs(program.family, program.architecture, program.rules, axes)
    for source in (source for parameter in program.parameters for source in parameter.sources):
        yield source.name, source.shape, specs[source.name], BYTES[program.recipe.model.dtype]
    if program.lora is None:
        return
    for adapter in program.adapters:
        for part in adapter.projections:
            pair = adapter_specs(specs[f"{part.name}.weight"])
            for letter, shape, spec in zip("AB", adapter.shapes(part), pair, strict=True):
                found = divisible(shape, spec, axes)
                yield f"{part.name}.lora_{letter}", shape, found, BYTES[program.lora.dtype]
