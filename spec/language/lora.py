"""The `lora` section."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from recipec.spec.core_schema import flow
from recipec.spec.language.base import Section, distinct, fault, field

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

_RANGE = re.compile(r"(\d{1,4})-(\d{1,4})")


def _layers(value: Any) -> Any:
    form = "layers: all, a range such as 20-59 (both ends included), or a list such as [0, 5, 11]"
    if isinstance(value, str):
        match = _RANGE.fullmatch(value)
        if value != "all" and match is None:
            raise fault("E0106", f"`{value}` names no layers", form)
        if match and int(match[1]) > int(match[2]):
            raise fault("E0106", f"the range {value} ends before it starts", f"layers: {match[2]}-{match[1]}")
        return value
    if not isinstance(value, list):
        raise fault("E0103", f"`layers` must be all, a range or a list of numbers, not {flow(value)}", form)
    if not value:
        raise fault("E0109", "`layers` lists no layer", form)
    for index, item in enumerate(value):
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            message = f"a layer must be a whole number, counted from 0, not {flow(item)}"
            raise fault("E0103", message, form, at=f"[{index}]")
    return distinct(value)


Layers = Annotated[
    str | list[int],
    BeforeValidator(_layers),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": "all"},
                {"type": "string", "pattern": f"^{_RANGE.pattern}$"},
                {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 0},
                    "minItems": 1,
                    "uniqueItems": True,
                },
            ]
        }
    ),
]


INITS = Literal["peft", "qwix", "gaussian", "zero_a", "pissa", "olora", "loftq"]
_FAST = re.compile(r"pissa_niter_[1-9]\d{0,2}")


def _init(value: Any, known: ValidatorFunctionWrapHandler) -> Any:
    return value if isinstance(value, str) and _FAST.fullmatch(value) else known(value)


Init = Annotated[
    INITS,
    WrapValidator(_init),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "enum": list(get_args(INITS))},
                {"type": "string", "pattern": f"^{_FAST.pattern}$"},
            ]
        }
    ),
]


def _alpha_of_rank(given: dict[str, Any]) -> float:
    return float(given.get("rank", 1))


class Lora(Section):
    """Low-rank adapters: what is trained in place of the whole model."""

    rank: int = field("Inner dimension of each adapter.", 64, unit="dimensions", ge=1, le=4096)
    alpha: float = field(
        "The adapter's product is scaled by alpha / rank.",
        unit="none (a factor)",
        default_is="the rank",
        default_factory=_alpha_of_rank,
        gt=0,
        allow_inf_nan=False,
        example=64,
    )
    rslora: bool = field("Rank-stabilised LoRA: scale by alpha / sqrt(rank) in place of alpha / rank.", False)
    rank_pattern: dict[str, Annotated[int, field("Rank.", unit="dimensions", ge=1, le=4096)]] = field(
        "Other ranks for some projections, as in PEFT: a target's spelling to its rank. The first that "
        "matches holds.",
        {},
        unit="dimensions",
        example={"down_proj": 16},
    )
    alpha_pattern: dict[
        str, Annotated[float, field("Alpha.", unit="none (a factor)", gt=0, allow_inf_nan=False)]
    ] = field(
        "Other alphas for some projections, as in PEFT: a target's spelling to its alpha. The first that "
        "matches holds.",
        {},
        unit="none (a factor)",
        example={"down_proj": 32},
    )
    dropout: float = field(
        "Share of the adapters' inputs that is zeroed while training.", 0.05, unit="probability", ge=0, lt=1
    )
    targets: Annotated[list[str], AfterValidator(distinct)] = field(
        "What carries an adapter: projections by their Hugging Face names, or regular expressions that match "
        "a whole module name such as layers.7.self_attn.q_proj; `experts` for all experts of a layer, each "
        "with an A and a B of its own, and `router` for what chooses among them. Where it is left out, every "
        "projection of the model, whatever they are called, and neither experts nor routers.",
        PROJECTIONS,
        min_length=1,
    )
    train_also: Annotated[list[str], AfterValidator(distinct)] = field(
        "Modules beside the projections that are trained whole, as PEFT's modules_to_save: embed_tokens, "
        "lm_head and norms, by their Hugging Face names or regular expressions that match a whole name. They "
        "are kept in lora.dtype, and computed in model.dtype.",
        [],
        example=["embed_tokens", "lm_head"],
    )
    layers: Layers = field(
        'Which decoder layers carry adapters, counted from 0: all, a range "20-59" (both ends included), or '
        "a list.",
        "all",
        unit="indices",
    )
    kind: Literal["lora", "dora"] = field(
        "What is trained beside the frozen weights.",
        "lora",
        choices={
            "lora": "A and B of each projection.",
            "dora": "A, B and a magnitude for each output, as PEFT's use_dora.",
        },
    )
    init: Init = field(
        "How A and B start. Drawn, their product is zero. With pissa and olora it is a part of the base's "
        "weights, which are frozen without it; pissa_niter_16 and the like compute it by so many iterations. "
        "The adapter that merge writes belongs to the base as it was, and has twice the rank.",
        "peft",
        choices={
            "peft": "A is uniform with bound 1/sqrt(fan_in), as in PEFT; B is zero.",
            "qwix": "A is uniform with bound sqrt(6/fan_in), as in Qwix; B is zero.",
            "gaussian": "A is normal with the deviation 1/rank, as PEFT's gaussian; B is zero.",
            "zero_a": "A is zero; B is uniform with bound 1/sqrt(rank), PEFT's rule for A.",
            "pissa": "The largest singular values of a weight with their vectors, as PEFT's pissa.",
            "olora": "The first columns and rows of a weight's QR decomposition, as PEFT's olora.",
            "loftq": "The largest singular values of what quantize: nf4 loses of a weight, as PEFT's loftq.",
        },
    )
    plus_ratio: float | None = field(
        "LoRA+: B's learning rate is so many times A's; null gives both the same.",
        None,
        unit="none (a ratio)",
        gt=0,
        allow_inf_nan=False,
        example=16.0,
    )
    dtype: Literal["float32", "bfloat16"] = field(
        "Type of the adapters.",
        "float32",
        choices={
            "float32": "32 bits a number: small updates are not rounded away.",
            "bfloat16": "16 bits a number: half the memory, coarser updates.",
        },
    )
    kv: Literal["independent", "shared"] = field(
        "Where key and value are one fused weight: independent gives each its own A, as PEFT does; shared "
        "gives them one, as Qwix does.",
        "independent",
        choices={
            "independent": "K and V have an A each, as in PEFT.",
            "shared": "K and V share one A, as in Qwix.",
        },
    )
    quantize: Literal["nf4", "int8", "fp8"] | None = field(
        "Quantisation of the frozen base weights (QLoRA), of linear layers and of experts; null keeps "
        "model.dtype.",
        None,
        example="nf4",
        choices={
            "nf4": "4 bits a number, with a scale for each 64 inputs.",
            "int8": "8 bits a number, with a scale for each output.",
            "fp8": "8 bits a number in floating point (float8_e4m3fn), with a scale for each output.",
        },
    )
    products: Literal["forward", "both"] | None = field(
        "Products of the frozen weights in the eight bits that they are stored in, with activations that are "
        "rounded row by row: faster on the chips that have such products, and less exact; null computes them "
        "in model.dtype. Only with quantize: int8 or fp8.",
        None,
        example="forward",
        choices={
            "forward": "The forward pass; the gradient of the activations is computed in model.dtype.",
            "both": "The gradient of the activations too.",
        },
    )
