"""What a search tries: mesh x micro batch x rematerialisation x attention, within what the recipe allows.

The optimisation stays the recipe's: rows per optimizer step, model, adapters and data are never touched.
With `free_batch` the rows may be raised as far as it takes for every device to have some.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import get_args

from compiler.hardware import arranged
from compiler.program import Program
from compiler.wording import divisors, flow
from runtime.partition_rules import data_parallel
from spec.language.mesh import Remat

MOST_RAISED = 4
"""The most that `free_batch` multiplies the rows of an optimizer step by, a device's one row aside."""
SAVED_ON_HOST = ("offload_dots",)
"""Policies that need a memory beside the device's: on a CPU there is none."""


@dataclass(frozen=True)
class Variant:
    """One configuration.

    Attributes:
        axes: size of each mesh axis.
        micro_batch, global_batch: rows of one data-parallel device, and of an optimizer step.
        remat, attention: as the recipe language names them.
        sets: what it changes in the recipe, as --set takes it; () for the recipe as it stands.
    """

    axes: tuple[tuple[str, int], ...]
    micro_batch: int
    global_batch: int
    remat: str
    attention: str
    sets: tuple[str, ...] = field(compare=False)


def variants(program: Program, free_batch: bool = False) -> list[Variant]:
    """Every configuration to be looked at, the recipe as it stands first.

    Where no number of rows fits a mesh, one that the checks refuse stands for it, so that its reason is told.
    """
    train, recipe = program.recipe.train, program.recipe
    found = [_variant(program, dict(recipe.mesh.axes), train.micro_batch_size, train.global_batch_size)]
    for axes in _meshes(program):
        for micro, rows in _batches(train.global_batch_size, data_parallel(axes), free_batch):
            for attention in _attentions(program):
                for policy in _policies(program):
                    found.append(_variant(program, axes, micro, rows, policy, attention))
    return list(dict.fromkeys(found))


def _variant(
    program: Program,
    axes: dict[str, int],
    micro: int,
    rows: int,
    policy: str | None = None,
    attention: str | None = None,
) -> Variant:
    recipe = program.recipe
    policy, attention = policy or recipe.remat.policy, attention or recipe.model.attention
    wanted = {
        "mesh.axes": (axes, dict(recipe.mesh.axes)),
        "train.global_batch_size": (rows, recipe.train.global_batch_size),
        "train.micro_batch_size": (micro, recipe.train.micro_batch_size),
        "remat.policy": (policy, recipe.remat.policy),
        "model.attention": (attention, recipe.model.attention),
    }
    sets = tuple(f"{path}={flow(value)}" for path, (value, present) in wanted.items() if value != present)
    return Variant(tuple(axes.items()), micro, rows, policy, attention, sets)


def _meshes(program: Program) -> Iterator[dict[str, int]]:
    """The recipe's mesh, and each way to arrange the devices in which tp divides the heads of every layer;
    a single key/value head is kept whole."""
    own = dict(program.recipe.mesh.axes)
    yield own
    a, slices = program.architecture, program.accelerator.slices
    devices = program.accelerator.devices // slices
    layers = range(a.num_layers)
    counts = {a.heads(i) for i in layers} | {a.kv_heads(i) for i in layers} - {1}
    for tp in divisors(devices):
        axes = arranged(slices, devices // tp, tp)
        if axes != own and all(count % tp == 0 for count in counts):
            yield axes


def _batches(rows: int, shards: int, free: bool) -> Iterator[tuple[int, int]]:
    """(rows of a device, rows of an optimizer step) over `shards` data-parallel devices."""
    if not free:
        # Of a mesh that these rows cannot be split over, one for the checks to refuse.
        for micro in divisors(rows // shards) if rows % shards == 0 else [1]:
            yield micro, rows
        return
    micro = 1
    while micro == 1 or micro * shards <= MOST_RAISED * rows:
        yield micro, -(-rows // (micro * shards)) * micro * shards
        micro *= 2
    if rows % shards == 0:
        for micro in divisors(rows // shards):
            yield micro, rows


def _policies(program: Program) -> list[str]:
    every: tuple[str, ...] = get_args(Remat.model_fields["policy"].annotation)
    return [name for name in every if program.accelerator.platform == "tpu" or name not in SAVED_ON_HOST]


def _attentions(program: Program) -> list[str]:
    kernel = program.family.flash_attention and program.accelerator.platform == "tpu"
    return ["dot", "splash"] if kernel else ["dot"]
