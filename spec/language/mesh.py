"""The `mesh`, `sharding`, `remat` and `xla` sections: the devices, how the model is distributed over them,
and how it is compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, WithJsonSchema

from recipec.spec import words
from recipec.spec.language.section import E0101, E0106, E0107, E0110, Problem, Section, fault, field

AXES = ("dcn", "fsdp", "cp", "ep", "tp")
"""The mesh axes: dcn between slices, fsdp and tp as annotated in Tunix's models, cp for tokens and ep for
experts."""
ASKED_FOR = ("dcn", "cp", "ep")
"""Axes that are present only if they have more than one device."""


def _with_all_axes(axes: dict[str, int]) -> dict[str, int]:
    """Return the axes in the order of AXES. Add missing axes; omit those of ASKED_FOR with one device."""
    return {name: axes.get(name, 1) for name in AXES if name not in ASKED_FOR or axes.get(name, 1) > 1}


_AXES = {
    "dcn": "Splits the batch, and nothing else, over slices that the data center network connects.",
    "fsdp": "Splits the batch and the weights.",
    "cp": "Splits the tokens of each row and, together with fsdp, the weights: for rows that are too long "
    "for one device.",
    "ep": "Splits the batch and the experts of models that have them.",
    "tp": "Splits heads and features.",
}

Size = Annotated[int, field("Size of the axis.", unit="devices", ge=1, le=65536)]
Axes = Annotated[
    dict[str, Size],
    AfterValidator(_with_all_axes),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                name: {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": 65536,
                    "description": f"{_AXES[name]} Unit: devices. Default: 1.",
                    "default": 1,
                    "examples": [2 if name in ASKED_FOR else 4],
                }
                for name in AXES
            },
            "additionalProperties": False,
            "minProperties": 1,
        }
    ),
]


class Mesh(Section):
    """The devices, and their arrangement along the mesh axes."""

    accelerator: str | None = field(
        "Name of the machine: v4-8, v5e-8, v5p-8, v6e-8, tpu7x-8, or cpu-N for N virtual CPU devices. Give "
        "either this or topology.",
        None,
        min_length=1,
        example="v5p-8",
    )
    topology: str | None = field(
        "The machine as generation and chip grid, instead of accelerator.",
        None,
        min_length=1,
        example="v5p:2x2x1",
    )
    hosts: int | None = field(
        "Machines that train together, with one process on each; null uses the accelerator's own number. Use "
        "2 for v5e-8 and v6e-8 on GKE, which has pairs of machines with 4 chips. On cpu-N it is the number "
        "of processes that share the virtual devices.",
        None,
        unit="hosts",
        ge=1,
        example=2,
    )
    axes: Axes = field(
        "Size of each mesh axis: dcn splits the batch over slices, fsdp splits the batch and the weights, cp "
        "the tokens of each row and the weights, ep the batch and the experts, tp heads and features. Their "
        "product is the number of devices. A missing axis has size 1.",
        unit="devices",
        min_length=1,
        example={"fsdp": 4, "tp": 1},
    )

    @classmethod
    def crosscheck(cls, values: Mapping[str, Any]) -> Iterator[Problem]:
        if values.get("accelerator") is not None and values.get("topology") is not None:
            yield Problem(
                E0107,
                ("topology",),
                "`accelerator` and `topology` both name the machine",
                "remove one of the two",
                at_key=True,
            )
        if values.get("accelerator") is None and values.get("topology") is None:
            yield Problem(
                E0110,
                (),
                "`mesh` names no machine: give `accelerator` or `topology`",
                "accelerator: v5p-8",
                at_key=True,
            )
        axes = values.get("axes")
        if not isinstance(axes, dict):
            return
        for name in axes:
            if name not in AXES:
                meant = words.key(str(name).lower(), "mesh.axes") or ""
                axis = meant.removeprefix("mesh.axes.")
                near = f"did you mean `{axis}`? " if axis in AXES and axis not in axes else ""
                kinds = (
                    "the axes are dcn, which splits the batch over slices, fsdp, which splits the batch and "
                    "the weights, cp, which splits the tokens of each row and the weights, ep, which splits "
                    "the batch and the experts, and tp, which splits heads and features"
                )
                yield Problem(
                    E0101,
                    ("axes", name),
                    f"unknown mesh axis `{name}`",
                    meant if " " in meant else f"{near}{kinds}",
                    at_key=True,
                )


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise fault(
            E0106, f"`{text}` is not a regular expression: {error}", 'match: ".*mlp.down_proj.*"'
        ) from None
    return text


Pattern = Annotated[str, AfterValidator(_regular_expression)]


class ShardingRule(Section):
    """One rule: parameters whose path matches get this PartitionSpec."""

    match: Pattern = field(
        "Regular expression that the parameter's whole path must match.",
        min_length=1,
        example=".*mlp.down_proj.*",
    )
    spec: list[Literal["fsdp", "ep", "tp"] | None] = field(
        "The mesh axis that each dimension is split over; null keeps it whole.",
        example=["tp", "fsdp"],
        choices={
            "fsdp": "Split over fsdp, which also splits the batch, and over cp.",
            "ep": "Split over ep, the axis of experts.",
            "tp": "Split over tp, the axis of heads and features.",
        },
    )


class Sharding(Section):
    """How parameters are split, in addition to the family's defaults."""

    rules: list[ShardingRule] = field(
        "Sharding rules; the first matching rule is used.",
        [],
        example=[{"match": ".*mlp.down_proj.*", "spec": ["tp", "fsdp"]}],
    )
    on_indivisible: Literal["error", "replicate"] = field(
        "What to do with a dimension that its mesh axis does not divide: error refuses the recipe, replicate "
        "keeps that dimension whole.",
        "error",
        choices={
            "error": "Refuse the recipe.",
            "replicate": "Keep that dimension whole on every device.",
        },
    )


Policy = Literal["auto", "none", "block", "decoder", "save_attention", "save_dots", "offload_dots"]


class Remat(Section):
    """Rematerialization: what the backward pass computes again instead of storing it."""

    policy: Policy = field(
        "auto takes the fastest policy that fits the memory by calculation. none stores every activation. "
        "block recomputes within attention and feed-forward blocks. decoder stores only the input of each "
        "decoder layer. save_attention also stores each attention result, and save_dots also the result of "
        "each projection. offload_dots keeps these in the host's memory.",
        "auto",
        choices={
            "auto": "The fastest policy that surely fits the devices' memory, by calculation; decoder if no "
            "policy does. On a CPU: none. `recipe explain` and recipe.lock.json show the choice.",
            "none": "Store every activation: fastest, and needs the most memory.",
            "block": "Recompute attention and feed-forward blocks.",
            "decoder": "Store only the input of each decoder layer, and recompute the layer.",
            "save_attention": "As decoder, and also store each attention result.",
            "save_dots": "As save_attention, and also store the result of each projection and its adapter.",
            "offload_dots": "As save_dots, with those results in the host's memory.",
        },
    )


SCOPED_VMEM = "xla_tpu_scoped_vmem_limit_kib"
"""The flag that `xla.scoped_vmem_kib` sets."""
FlagName = Annotated[str, field("Name of a flag of libtpu, without dashes.", pattern=r"^[a-z][a-z0-9_]*$")]
FlagValue = Annotated[bool | int | float | str, field("Its value.")]


class Xla(Section):
    """Flags that the step is compiled with."""

    profile: Literal["auto", "none", "v5e", "v5p", "v6e", "tpu7x"] = field(
        "Flags from published runs on a TPU generation. They overlap weight gathers with computation, and "
        "need more memory because gathered weights are kept longer.",
        "auto",
        choices={
            "auto": "The profile of the accelerator's generation; none on v4 and on a CPU.",
            "none": "The compiler's defaults.",
            "v5e": "Overlap collectives with computation, on TPU v5e.",
            "v5p": "The same on TPU v5p.",
            "v6e": "The same on TPU v6e, with a larger VMEM limit.",
            "tpu7x": "The same on TPU7x, with SparseCores.",
        },
    )
    scoped_vmem_kib: int | None = field(
        f"VMEM that a single operation may use; null leaves it to the profile. It sets the flag "
        f"{SCOPED_VMEM}.",
        None,
        unit="KiB",
        ge=1024,
        le=262144,
        example=65536,
    )
    flags: dict[FlagName, FlagValue] = field(
        "Flags of libtpu to add to the profile, or to replace its flags.",
        {},
        unit="each flag's own",
        example={"xla_tpu_enable_async_collective_fusion": True},
    )

    @classmethod
    def crosscheck(cls, values: Mapping[str, Any]) -> Iterator[Problem]:
        flags = values.get("flags")
        if values.get("scoped_vmem_kib") is not None and isinstance(flags, dict) and SCOPED_VMEM in flags:
            yield Problem(
                E0107,
                ("flags", SCOPED_VMEM),
                f"`scoped_vmem_kib` and `flags.{SCOPED_VMEM}` both set the VMEM limit",
                "remove one of the two",
                at_key=True,
            )
