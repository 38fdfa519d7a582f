"""A Tunix model with LoRA, its weights placed shard by shard straight from a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from runtime import sharding
from runtime.adapters import Adapter, LoraSettings, build_adapters
from runtime.checkpoint import BaseCheckpoint
from runtime.errors import UserError
from runtime.families import Architecture, Family
from runtime.families.base import Parameter, Spec
from runtime.forward import Forward
from runtime.lora import AdapterProvider, attach, initial_a
from runtime.settings import ModelSettings
from runtime.specs import Rule, resolve_specs

SPLASH_BLOCKS = (512, 256, 128)
"""Blocks of splash attention, of which the largest that divides a row is taken. Tunix's own 1024 does
not compile for v5p at a head size of 512: it takes 17.9 of 16 MiB of VMEM (found by compiling ahead of
time)."""


@dataclass(frozen=True)
class Built:
    """A model and what it was made from.

    Attributes:
        model: Tunix's, with LoRA when the recipe has it.
        parameters: the base weights with their final shardings.
        adapters: in layer order, () without LoRA.
        provider: computes the adapters' deltas, None without LoRA.
        forward: how the model is computed.
    """

    model: nnx.Module
    parameters: tuple[Parameter, ...]
    adapters: tuple[Adapter, ...]
    provider: AdapterProvider | None
    forward: Forward


def abstract_model(
    family: Family,
    architecture: Architecture,
    settings: ModelSettings,
    lora: LoraSettings | None,
    axes: Mapping[str, int],
    rules: Sequence[Rule] = (),
    length: int | None = None,
) -> Built:
    """The model with shapes for values: nothing is allocated, no device is asked for.

    Every variable carries its final sharding as metadata, which the optimizer's state and restored
    checkpoints follow.

    Args:
        axes: size of each mesh axis.
        rules: the recipe's sharding rules.
        length: tokens of a row, which splash attention needs to know.

    Raises:
        UserError: when Tunix's parameters are not the family's, or a rule does not fit.
    """
    try:
        resolved = resolve_specs(family.parameters(architecture), rules, axes, "replicate")
    except ValueError as error:
        raise UserError(f"sharding rules: {error}") from None
    parameters = tuple(
        replace(parameter, spec=sharding.divisible(parameter.shape, parameter.spec, axes))
        for parameter in resolved
    )
    model_class, config = family.tunix_model(architecture, dtype=jnp.dtype(settings.dtype))
    model = nnx.eval_shape(lambda: model_class(config, rngs=_ConstantKeys()))
    specs = {parameter.path: parameter.spec for parameter in parameters}
    adapters: tuple[Adapter, ...] = ()
    provider = None
    if lora is not None:
        adapters = tuple(build_adapters(family, architecture, lora, specs))
        model, provider = attach(model, adapters, lora)
    _check_leaves(model, parameters, adapters)
    for path, variable in _variables(model).items():
        if path in specs:
            variable.set_metadata(out_sharding=specs[path])
    _rematerialise(model, settings.remat)
    if settings.attention == "splash":
        _splash(model, family, length)
    return Built(model, parameters, adapters, provider, Forward(family, architecture, settings))


def build(
    base: BaseCheckpoint,
    settings: ModelSettings,
    lora: LoraSettings | None,
    mesh: Mesh,
    rules: Sequence[Rule] = (),
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    length: int | None = None,
) -> Built:
    """The model of a checkpoint on a mesh, its adapters initialised.

    Args:
        seed: of the adapters. Their values do not depend on the mesh.
        progress: called with the parameters placed so far and their number.
        length: tokens of a row.

    Raises:
        UserError: when the checkpoint is of another family, or lacks a tensor, or Tunix cannot train
            its architecture right.
    """
    if base.family.name != settings.family:
        raise UserError(
            f"{base.directory}: its config.json is of family {base.family.name!r}, "
            f"the recipe was compiled for {settings.family!r}",
            "give the checkpoint of the recipe's model.id with --model",
        )
    reason = base.family.untrainable(base.architecture)
    if reason:
        raise UserError(f"{base.directory}: this Tunix cannot train the model: {reason}")
    base.verify()
    built = abstract_model(base.family, base.architecture, settings, lora, dict(mesh.shape), rules, length)
    dtype = np.dtype(jnp.dtype(settings.dtype))
    variables = _variables(built.model)
    arrays: dict[str, jax.Array] = {}
    for done, parameter in enumerate(built.parameters, 1):
        arrays[parameter.path] = _place(base, parameter, mesh, dtype)
        if progress is not None:
            progress(done, len(built.parameters))
    unread = base.unused()
    if unread:
        print(
            f"note: {len(unread)} text tensors of the checkpoint have no place in Tunix's model "
            f"and are not read: {', '.join(unread[:5])}{', ...' if len(unread) > 5 else ''}",
            file=sys.stderr,
        )
    for adapter in built.adapters:
        assert lora is not None
        lora_dtype = np.dtype(jnp.dtype(lora.dtype))
        a = initial_a(adapter, lora, seed).astype(lora_dtype)
        arrays[adapter.a_path] = _put(a, adapter.a_spec, mesh)
        arrays[adapter.b_path] = _put(np.zeros(adapter.b_shape, lora_dtype), adapter.b_spec, mesh)
    for path, variable in variables.items():
        variable.set_raw_value(arrays.pop(path))
    assert not arrays, sorted(arrays)
    return built


class _ConstantKeys:
    """Random keys for a model that is built only for its shapes.

    nnx.Rngs counts its draws; under a trace each count makes jax describe every equation so far,
    which takes minutes at 60 layers.
    """

    def params(self) -> jax.Array:
        return jax.random.key(0)


def _variables(model: nnx.Module) -> dict[str, nnx.Variable]:
    """The model's variables by dotted path."""
    return {
        ".".join(map(str, path)): node
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Variable)
    }


def _check_leaves(model: nnx.Module, parameters: Sequence[Parameter], adapters: Sequence[Adapter]) -> None:
    expected: dict[str, tuple[str, tuple[int, ...]]] = {p.path: ("Param", p.shape) for p in parameters}
    for adapter in adapters:
        expected[adapter.a_path] = ("LoRAParam", adapter.a_shape)
        expected[adapter.b_path] = ("LoRAParam", adapter.b_shape)
    found = {
        path: (type(variable).__name__, tuple(variable.get_raw_value().shape))
        for path, variable in _variables(model).items()
    }
    if found == expected:
        return
    wrong = sorted(path for path in found.keys() | expected.keys() if found.get(path) != expected.get(path))
    path = wrong[0]
    raise UserError(
        f"Tunix's model differs from what is expected of it in {len(wrong)} parameters: {path} is "
        f"{found.get(path, 'absent')}, expected {expected.get(path, 'none')}",
        "this version of Tunix does not fit the runtime; install the artifact's requirements",
    )


def _rematerialise(model: nnx.Module, policy: str) -> None:
    """Switches recomputation on. Gemma 3's attention holds a setting of its own beside the config."""
    for _, module in nnx.iter_modules(model):
        holders: tuple[Any, ...] = (getattr(module, "config", None), module)
        for holder in holders:
            current = getattr(holder, "remat_config", None)
            if current is not None:
                holder.remat_config = type(current)[policy.upper()]


def _splash(model: Any, family: Family, length: int | None) -> None:
    """Switches splash attention on, which its blocks allow once LoRA is attached."""
    if not family.flash_attention:
        raise UserError(f"Tunix's {family.name} has no splash attention", "set model.attention to dot")
    block = next((b for b in SPLASH_BLOCKS if length is None or length % b == 0), None)
    if block is None:
        raise UserError(
            f"splash attention needs rows of a multiple of {SPLASH_BLOCKS[-1]} tokens, not {length}",
            "change data.max_length, or set model.attention to dot",
        )
    model.config.flash_attention_block_size = block
    model.config.use_flash_attention = True


def _place(base: BaseCheckpoint, parameter: Parameter, mesh: Mesh, dtype: np.dtype) -> jax.Array:
    """One parameter, each shard of it read from the checkpoint's file and cast by itself."""
    views = [
        base.read_source(source).reshape(source.reshape).transpose(source.transpose)
        for source in parameter.sources
    ]
    stacked = len(views) > 1
    shards: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def read(index: tuple[slice, ...]) -> np.ndarray:
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index, parameter.shape, strict=True))
        if bounds not in shards:
            if not views:
                shards[bounds] = np.zeros([stop - start for start, stop in bounds], dtype)
            elif stacked:
                shards[bounds] = np.stack([view[index[1:]] for view in views[index[0]]]).astype(dtype)
            else:
                shards[bounds] = np.ascontiguousarray(views[0][index].astype(dtype))
        return shards[bounds]

    array = jax.make_array_from_callback(parameter.shape, sharding.named(mesh, parameter.spec), read)
    array.block_until_ready()
    for source in parameter.sources:
        base.release(base.prefix + source.name)
    return array


def _put(value: np.ndarray, spec: Spec, mesh: Mesh) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding.named(mesh, spec), lambda index: value[index])
