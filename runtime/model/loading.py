"""Load a model with its adapters: each weight's shards are placed straight from a checkpoint."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ..errors import UserError
from ..settings import ModelSettings
from ..weights.checkpoint import HFCheckpoint
from . import sharding
from .adapters import EMBEDDING, TOKEN_ROWS, Adapter, LoraSettings, Matrices, build_adapters
from .decoder import Decoder
from .families import Architecture, Family
from .families.decoder_family import described
from .families.family import Parameter, Source, Spec
from .forward import Forward
from .initial import initial_pair
from .layers import Config
from .lora import AdapterProvider, ProductProvider, attach, intercepted, magnitudes
from .partition_rules import Rule, resolved
from .quantize import (
    Layout,
    attach_quantized,
    layouts,
    product_of,
    quantize,
    rounded_product,
)
from .selection import train_only
from .trained import attach_whole, first_rows, freeze

# Variables carry their shardings as metadata; each array is placed by `build`.
flax.config.update("flax_always_shard_variable", False)

MAPPED_BYTES = 128 * 2**20
"""Bytes of a checkpoint's file that are mapped at a time while a tensor is read."""


@dataclass(frozen=True)
class Built:
    """A model and what it was built from.

    Attributes:
        model: the decoder. Its LoRAParams are trained, or, without LoRA, every nnx.Param.
        parameters: the base weights with their final shardings.
        adapters: in layer order, () without LoRA.
        whole: the parameters that are trained with the adapters, and the trained rows of the embedding.
        lora: the settings of the adapters, None without LoRA.
        provider: computes the adapters' deltas, None without LoRA.
        quantized: the layouts of weights that are stored quantized, by path; {} for none.
        forward: how the model is computed.
        teacher: the model that a distillation learns from, None without one.
    """

    model: nnx.Module
    parameters: tuple[Parameter, ...]
    adapters: tuple[Adapter, ...]
    provider: AdapterProvider | None
    forward: Forward
    quantized: Mapping[str, Layout] = field(default_factory=dict)
    whole: tuple[Parameter, ...] = ()
    lora: LoraSettings | None = None
    teacher: Built | None = None


def unrounded(built: Built) -> Built:
    """Return a model that is computed without the rounding of quantization-aware training."""
    forward = built.forward
    return replace(built, forward=replace(forward, settings=replace(forward.settings, qat=None)))


def abstract_model(
    family: Family,
    architecture: Architecture,
    settings: ModelSettings,
    lora: LoraSettings | None,
    axes: Mapping[str, int],
    rules: Sequence[Rule] = (),
) -> Built:
    """Build the model with shapes instead of values: nothing is allocated, no device is needed.

    Each variable carries its final sharding as metadata, which the optimizer's state and restored
    checkpoints follow.

    Args:
        axes: size of each mesh axis.
        rules: the recipe's sharding rules.

    Raises:
        UserError: when the decoder's arrays differ from the family's, or a rule does not fit.
    """
    if settings.attention == "splash" and not family.flash_attention:
        raise UserError(f"{family.name} has no splash attention here", "set model.attention to dot")
    if settings.attention == "splash" and architecture.vision is not None and architecture.vision.both_ways:
        raise UserError("splash attention has no mask of pictures", "set model.attention to dot")
    parameters = resolved(family.parameters(architecture), rules, axes)
    if settings.trainable_modules:
        parameters = train_only(parameters, settings.trainable_modules)
    config = Config(described(architecture), jnp.dtype(settings.dtype), settings.remat)
    model = nnx.eval_shape(lambda: Decoder(config))
    specs = {parameter.path: parameter.spec for parameter in parameters}
    adapters: tuple[Adapter, ...] = ()
    provider = None
    if lora is not None:
        try:
            adapters = tuple(build_adapters(family, architecture, lora, specs))
        except ValueError as error:
            raise UserError(
                str(error), "the targets were checked when the recipe was built: build it again"
            ) from None
        product = product_of(settings)
        if settings.qat is not None:
            product = rounded_product(a.target for a in adapters if not a.target.of_tower)
        model, provider = attach(model, adapters, lora, product)
    elif settings.qat is not None:
        product = rounded_product(family.lora_targets(architecture))
        model = intercepted(model, ProductProvider(product))
    _check_leaves(model, parameters, adapters)
    for path, variable in variables_of(model).items():
        if path in specs:
            variable.set_metadata(out_sharding=specs[path])
    whole: tuple[Parameter, ...] = ()
    if lora is None:
        freeze(model, parameters)
    elif lora.trains_whole:
        whole = attach_whole(model, parameters, lora, settings.dtype)
    quantized: Mapping[str, Layout] = {}
    if settings.quantization is not None:
        quantized = layouts(family, architecture, parameters, settings.quantization, axes, settings.began)
        attach_quantized(model, quantized, settings.dtype)
    forward = Forward(family, architecture, settings)
    return Built(model, parameters, adapters, provider, forward, quantized, whole, lora)


def build(
    base: HFCheckpoint,
    settings: ModelSettings,
    lora: LoraSettings | None,
    mesh: Mesh,
    rules: Sequence[Rule] = (),
    start: int | Mapping[str, Matrices] = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Built:
    """Build the model of a checkpoint on a mesh, with its adapters initialized.

    Args:
        start: the adapters' seed, or their values by projection (A, B and with DoRA the magnitudes). They
            do not depend on the mesh.
        progress: called with the number of parameters placed so far, and the number of all.

    Raises:
        UserError: when the checkpoint is of another family, or lacks a tensor.
    """
    if base.family.name != settings.family:
        raise UserError(
            f"{base.name}: its config.json is of family {base.family.name!r}, "
            f"the recipe was compiled for {settings.family!r}",
            "give the checkpoint of the recipe's model.id with --model",
        )
    base.verify()
    built = abstract_model(base.family, base.architecture, settings, lora, dict(mesh.shape), rules)
    dtype = np.dtype(jnp.dtype(settings.dtype))
    variables = variables_of(built.model)
    arrays: dict[str, Any] = {}
    for done, parameter in enumerate(built.parameters, 1):
        kind = np.dtype(np.float32) if parameter.wide else dtype
        if lora is not None and parameter in built.whole:
            kind = np.dtype(jnp.dtype(lora.dtype))
        array = _place(base, parameter, mesh, kind)
        how = built.quantized.get(parameter.path)
        if how is not None:
            array = quantize(array, how, mesh)
        arrays[parameter.path] = array
        if progress is not None:
            progress(done, len(built.parameters))
    unread = base.unused()
    if unread:
        print(
            f"note: {len(unread)} text tensors of the checkpoint have no place in the model "
            f"and are not read: {', '.join(unread[:5])}{', ...' if len(unread) > 5 else ''}",
            file=sys.stderr,
        )
    for adapter in built.adapters:
        assert lora is not None
        lora_dtype = np.dtype(jnp.dtype(lora.dtype))
        values: Matrices
        if isinstance(start, int):
            values = initial_pair(adapter, lora, start)
        else:
            values = adapter.from_peft(start[adapter.name])
        for (path, _, spec), value in zip(adapter.arrays, values, strict=False):
            arrays[path] = put(value.astype(lora_dtype), spec, mesh)
        if adapter.dora and isinstance(start, int):
            path, _, spec = adapter.arrays[-1]
            lengths = functools.partial(magnitudes, adapter, dtype=dtype)
            compute = jax.jit(lengths, out_shardings=sharding.named(mesh, spec))
            arrays[path] = compute(arrays[adapter.target.weight]).astype(lora_dtype)
    if lora is not None and lora.trainable_tokens:
        rows = next(parameter for parameter in built.whole if parameter.path == TOKEN_ROWS)
        embedding = next(parameter for parameter in built.parameters if parameter.path == EMBEDDING)
        for path, value in first_rows(base, embedding, lora).items():
            arrays[path] = put(value, rows.spec if path == TOKEN_ROWS else (None,), mesh)
    for path, variable in variables.items():
        variable.set_raw_value(arrays.pop(path))
    assert not arrays, sorted(arrays)
    return built


def replace_adapters(built: Built, arrays: Mapping[str, np.ndarray], mesh: Mesh) -> None:
    """Replace the trained values of a model with adapters.

    Args:
        arrays: by path, of lora.dtype.
    """
    specs = {path: spec for adapter in built.adapters for path, _, spec in adapter.arrays}
    specs |= {parameter.path: parameter.spec for parameter in built.whole}
    variables = variables_of(built.model)
    for path, array in arrays.items():
        variables[path].set_raw_value(put(array, specs[path], mesh))


def variables_of(model: nnx.Module) -> dict[str, nnx.Variable]:
    """Return the model's variables by dotted path."""
    return {
        ".".join(map(str, path)): node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Variable)
    }


def _check_leaves(model: nnx.Module, parameters: Sequence[Parameter], adapters: Sequence[Adapter]) -> None:
    expected: dict[str, tuple[str, tuple[int, ...]]] = {p.path: ("Param", p.shape) for p in parameters}
    for adapter in adapters:
        expected |= {path: ("LoRAParam", shape) for path, shape, _ in adapter.arrays}
    built = {
        path: (type(variable).__name__, tuple(variable.get_raw_value().shape))
        for path, variable in variables_of(model).items()
    }
    if built == expected:
        return
    wrong = sorted(path for path in built.keys() | expected.keys() if built.get(path) != expected.get(path))
    path = wrong[0]
    raise UserError(
        f"the decoder differs from its family's description in {len(wrong)} arrays: {path} is "
        f"{built.get(path, 'absent')}, expected {expected.get(path, 'none')}",
        "this version of flax or Qwix does not fit the runtime; install the artifact's requirements",
    )


def rematerialize(model: nnx.Module, policy: str) -> None:
    """Change what the backward pass of a model recomputes."""
    for _, module in nnx.iter_modules(model):
        if isinstance(getattr(module, "config", None), Config):
            module.config = replace(module.config, remat=policy)


def _place(base: HFCheckpoint, parameter: Parameter, mesh: Mesh, dtype: np.dtype) -> jax.Array:
    """Place one parameter: each shard is read from the checkpoint's file, cast and placed on its own.

    Host memory holds one shard at a time, and the part of the file that it is copied from. For a tensor that
    is stored quantized, it holds the whole tensor in the type that it is dequantized to.
    """
    placed = sharding.named(mesh, parameter.spec)
    indices = placed.addressable_devices_indices_map(parameter.shape)
    bounds = {
        device: tuple(s.indices(n)[:2] for s, n in zip(index, parameter.shape, strict=True))
        for device, index in indices.items()
    }
    shards: dict[Any, jax.Array] = {}
    for wanted, shard in read_shards(base, parameter, list(dict.fromkeys(bounds.values())), dtype):
        for device in (device for device, part in bounds.items() if part == wanted):
            shards[device] = jax.device_put(shard, device)
        jax.block_until_ready(list(shards.values()))
    return jax.make_array_from_single_device_arrays(parameter.shape, placed, [shards[d] for d in indices])


Bounds = tuple[tuple[int, ...], ...]
"""First and last element (exclusive) along each axis of a parameter."""


def read_shards(
    base: HFCheckpoint, parameter: Parameter, wanted: Sequence[Bounds], dtype: np.dtype
) -> Iterator[tuple[Bounds, np.ndarray]]:
    """Yield parts of a parameter, one after the other. The rows that they need of a tensor are read once.

    Args:
        wanted: the shards of this process's devices.
    """
    views: dict[int, tuple[np.ndarray, int]] = {}
    for number, source in enumerate(parameter.sources):
        shards = [bounds for bounds in wanted if _holds(parameter, number, bounds)]
        if shards:
            axis = _file_axis(parameter, source)
            rows = min(bounds[axis][0] for bounds in shards), max(bounds[axis][1] for bounds in shards)
            views[number] = base.read_rows(source, *rows).transpose(source.transpose), rows[0]
    for bounds in wanted:
        yield bounds, _read(base, parameter, views, bounds, dtype)


def _holds(parameter: Parameter, number: int, bounds: Bounds) -> bool:
    """Return whether a part of a parameter overlaps with one of its sources."""
    place = parameter.place(number)
    return all(bounds[axis][0] <= cast(int, place[axis]) < bounds[axis][1] for axis in parameter.stacked)


def _file_axis(parameter: Parameter, source: Source) -> int:
    """Return the parameter's axis along which the bytes of a source's tensor run."""
    unstacked = [axis for axis in range(len(parameter.shape)) if axis not in parameter.stacked]
    return unstacked[source.transpose.index(0)]


def _read(
    base: HFCheckpoint,
    parameter: Parameter,
    views: Mapping[int, tuple[np.ndarray, int]],
    bounds: Bounds,
    dtype: np.dtype,
) -> np.ndarray:
    """Assemble a part of a parameter.

    Args:
        views: its sources' tensors in the layout of the parameter, with their first row.
    """
    out = np.zeros([stop - start for start, stop in bounds], dtype)
    for number, (view, first) in views.items():
        if not _holds(parameter, number, bounds):
            continue
        source, place = parameter.sources[number], list(parameter.place(number))
        for axis in parameter.stacked:
            place[axis] = cast(int, place[axis]) - bounds[axis][0]
        along = _file_axis(parameter, source)
        part = view[
            tuple(
                slice(start - first, stop - first) if axis == along else slice(start, stop)
                for axis, (start, stop) in enumerate(bounds)
                if axis not in parameter.stacked
            )
        ]
        target = out[tuple(place)]
        # Copy along the axis that the file's bytes run along; pages are unmapped as they are copied.
        axis = source.transpose.index(0)
        step = max(1, MAPPED_BYTES * view.shape[axis] // max(1, view.nbytes))
        for start in range(0, part.shape[axis], step):
            block = (slice(None),) * axis + (slice(start, start + step),)
            target[block] = part[block]
            base.release(source.full_name(base.prefix))
    return out


def put(value: np.ndarray, spec: Spec, mesh: Mesh) -> jax.Array:
    """Place an array on a mesh."""
    return jax.make_array_from_callback(value.shape, sharding.named(mesh, spec), lambda index: value[index])
