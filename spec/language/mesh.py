"""The `mesh`, `sharding`, `remat` and `xla` sections: devices, how the model lies on them, and how it is
compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, WithJsonSchema

from recipec.spec import words
from recipec.spec.language.base import Problem, Section, fault, field

AXES = ("dcn", "fsdp", "cp", "ep", "tp")
"""The mesh axes: between slices, those that Tunix's models are annotated with, that of tokens and that of
experts."""
ASKED_FOR = ("dcn", "cp", "ep")
"""Those that stand only where they have several devices."""


def _with_all_axes(axes: dict[str, int]) -> dict[str, int]:
    """In the order of AXES."""
    return {name: axes.get(name, 1) for name in AXES if name not in ASKED_FOR or axes.get(name, 1) > 1}


_AXES = {
    "dcn": "Splits the batch alone, over slices that the data centre's network joins.",
    "fsdp": "Splits the batch and the weights.",
    "cp": "Splits the tokens of each row and, with fsdp, the weights: for rows too long for one device.",
    "ep": "Splits the batch and, of models with experts, the experts.",
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
    """The devices, and the axes they are arranged along."""

    accelerator: str | None = field(
        "The machine by name: v4-8, v5e-8, v5p-8, v6e-8, tpu7x-8, or cpu-N for N virtual CPU devices. Either "
        "this or topology.",
        None,
        min_length=1,
        example="v5p-8",
    )
    topology: str | None = field(
        "The machine by generation and chip grid, in place of accelerator.",
        None,
        min_length=1,
        example="v5p:2x2x1",
    )
    hosts: int | None = field(
        "Machines that train together, one process on each; null takes the accelerator's own number. 2 for "
        "v5e-8 and v6e-8 as GKE's pairs of machines with 4 chips; on cpu-N, processes that share the virtual "
        "devices.",
        None,
        unit="hosts",
        ge=1,
        example=2,
    )
    axes: Axes = field(
        "Size of each mesh axis: dcn splits the batch over slices, fsdp splits the batch and the weights, cp "
        "the tokens of each row and the weights, ep the batch and the experts, tp heads and features. Their "
        "product is the number of devices; an axis left out is 1.",
        unit="devices",
        min_length=1,
        example={"fsdp": 4, "tp": 1},
    )

    @classmethod
    def crosscheck(cls, given: Mapping[str, Any]) -> Iterator[Problem]:
        if given.get("accelerator") is not None and given.get("topology") is not None:
            yield Problem(
                "E0107",
                ("topology",),
                "`accelerator` and `topology` both name the machine",
                "remove one of the two",
                at_key=True,
            )
        if given.get("accelerator") is None and given.get("topology") is None:
            yield Problem(
                "E0110",
                (),
                "`mesh` does not say which machine: give `accelerator` or `topology`",
                "accelerator: v5p-8",
                at_key=True,
            )
        axes = given.get("axes")
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
                    "E0101",
                    ("axes", name),
                    f"unknown mesh axis `{name}`",
                    meant if " " in meant else f"{near}{kinds}",
                    at_key=True,
                )


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise fault(
            "E0106", f"`{text}` is not a regular expression: {error}", 'match: ".*mlp.down_proj.*"'
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
            "fsdp": "Split over the axis that also splits the batch, and over cp.",
            "ep": "Split over the axis of experts.",
            "tp": "Split over the axis of heads and features.",
        },
    )


class Sharding(Section):
    """How parameters are split, beyond the family's defaults."""

    rules: list[ShardingRule] = field(
        "Sharding rules; the first that matches wins.",
        [],
        example=[{"match": ".*mlp.down_proj.*", "spec": ["tp", "fsdp"]}],
    )
    on_indivisible: Literal["error", "replicate"] = field(
        "What to do with a dimension that its mesh axis does not divide: error refuses the recipe, replicate "
        "keeps that dimension whole.",
        "error",
        choices={
            "error": "The recipe is refused.",
            "replicate": "That dimension is kept whole on every device.",
        },
    )


class Remat(Section):
    """Rematerialisation: what the backward pass computes again in place of storing it."""

    policy: Literal["none", "block", "decoder", "save_attention", "save_dots", "offload_dots"] = field(
        "none stores every activation; block recomputes within attention and feed-forward blocks; decoder "
        "stores only each decoder layer's input; save_attention stores each attention's result beside it, "
        "save_dots that of each projection too; offload_dots keeps those in the host's memory.",
        "decoder",
        choices={
            "none": "Every activation is stored: fastest, and takes the most memory.",
            "block": "Attention and feed-forward blocks are computed again.",
            "decoder": "Only each decoder layer's input is stored; the layer is computed again.",
            "save_attention": "As decoder, with each attention's result stored too.",
            "save_dots": "As save_attention, with the result of each projection and its adapter stored too.",
            "offload_dots": "As save_dots, with those results in the host's memory.",
        },
    )


SCOPED_VMEM = "xla_tpu_scoped_vmem_limit_kib"
"""The flag that `xla.scoped_vmem_kib` stands for."""
FlagName = Annotated[str, field("Name of a flag of libtpu, without dashes.", pattern=r"^[a-z][a-z0-9_]*$")]
FlagValue = Annotated[bool | int | float | str, field("Its value.")]


class Xla(Section):
    """Flags that the step is compiled with."""

    profile: Literal["auto", "none", "v5e", "v5p", "v6e", "tpu7x"] = field(
        "Flags of published runs on a generation, which let gathers of weights go on beside products; they "
        "cost memory, since gathered weights are kept longer.",
        "auto",
        choices={
            "auto": "That of the accelerator's generation; none on v4 and on a CPU.",
            "none": "The compiler's defaults.",
            "v5e": "Collectives beside products, on TPU v5e.",
            "v5p": "The same on TPU v5p.",
            "v6e": "The same on TPU v6e, with a larger limit of VMEM.",
            "tpu7x": "The same on TPU7x, with SparseCores.",
        },
    )
    scoped_vmem_kib: int | None = field(
        f"VMEM that a single operation may use; null leaves it to the profile. The flag {SCOPED_VMEM}.",
        None,
        unit="KiB",
        ge=1024,
        le=262144,
        example=65536,
    )
    flags: dict[FlagName, FlagValue] = field(
        "Flags of libtpu that are added, or that replace those of the profile.",
        {},
        unit="each flag's own",
        example={"xla_tpu_enable_async_collective_fusion": True},
    )

    @classmethod
    def crosscheck(cls, given: Mapping[str, Any]) -> Iterator[Problem]:
        flags = given.get("flags")
        if given.get("scoped_vmem_kib") is not None and isinstance(flags, dict) and SCOPED_VMEM in flags:
            yield Problem(
                "E0107",
                ("flags", SCOPED_VMEM),
                f"`scoped_vmem_kib` and `flags.{SCOPED_VMEM}` both set the limit of VMEM",
                "remove one of the two",
                at_key=True,
            )
