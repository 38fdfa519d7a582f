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
from recipec.spec.language.section import E0103, E0105, E0106, E0109, Section, distinct, fault, field

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

_RANGE = re.compile(r"(\d{1,4})-(\d{1,4})")


def _layers(value: Any) -> Any:
    form = "layers: all, a range such as 20-59 (both ends included), or a list such as [0, 5, 11]"
    if isinstance(value, str):
        match = _RANGE.fullmatch(value)
        if value != "all" and match is None:
            raise fault(E0106, f"`{value}` names no layers", form)
        if match and int(match[1]) > int(match[2]):
            raise fault(E0106, f"the range {value} ends before it starts", f"layers: {match[2]}-{match[1]}")
        return value
    if not isinstance(value, list):
        raise fault(E0103, f"`layers` must be all, a range or a list of numbers, not {flow(value)}", form)
    if not value:
        raise fault(E0109, "`layers` lists no layer", form)
    for index, item in enumerate(value):
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            message = f"a layer must be a whole number, counted from 0, not {flow(item)}"
            raise fault(E0103, message, form, at=f"[{index}]")
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


def _tokens(value: Any) -> Any:
    form = 'trainable_tokens: [128256, "<note>"], tokens by number or by text'
    if not isinstance(value, list):
        raise fault(E0103, f"`trainable_tokens` must be a list of tokens, not {flow(value)}", form)
    for index, item in enumerate(value):
        if isinstance(item, bool) or not isinstance(item, int | str) or item == "":
            raise fault(E0103, f"a token must be a number or a text, not {flow(item)}", form, at=f"[{index}]")
        if isinstance(item, int) and not 0 <= item < ROWS:
            message = f"a token's number must be from 0 to {ROWS - 1:,}, not {item}"
            raise fault(E0105, message, form, at=f"[{index}]")
    return distinct(value)


ROWS = 16_777_216
"""The most rows of an embedding, as for model.vocab_size."""

Tokens = Annotated[
    list[int | str],
    BeforeValidator(_tokens),
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "integer", "minimum": 0, "maximum": ROWS - 1},
                    {"type": "string", "minLength": 1},
                ]
            },
            "uniqueItems": True,
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


ALPHA_OF_RANK = 2
"""The default of alpha, as a multiple of the rank."""


def _alpha_of_rank(values: dict[str, Any]) -> float:
    return float(ALPHA_OF_RANK * values.get("rank", 1))


class Lora(Section):
    """Low-rank adapters, which are trained instead of the whole model."""

    rank: int = field("Inner dimension of each adapter.", 16, unit="dimensions", ge=1, le=4096)
    alpha: float = field(
        "The adapter's product is scaled by alpha / rank.",
        unit="none (a factor)",
        default_is="twice the rank",
        default_factory=_alpha_of_rank,
        gt=0,
        allow_inf_nan=False,
        example=32,
    )
    rslora: bool = field("Rank-stabilized LoRA: scale by alpha / sqrt(rank) instead of alpha / rank.", False)
    rank_pattern: dict[str, Annotated[int, field("Rank.", unit="dimensions", ge=1, le=4096)]] = field(
        "Other ranks for some projections, as in PEFT: maps a target to its rank. The first matching entry "
        "is used.",
        {},
        unit="dimensions",
        example={"down_proj": 16},
    )
    alpha_pattern: dict[
        str, Annotated[float, field("Alpha.", unit="none (a factor)", gt=0, allow_inf_nan=False)]
    ] = field(
        "Other alphas for some projections, as in PEFT: maps a target to its alpha. The first matching entry "
        "is used.",
        {},
        unit="none (a factor)",
        example={"down_proj": 32},
    )
    dropout: float = field(
        "Share of the adapters' inputs that is zeroed during training.", 0.0, unit="probability", ge=0, lt=1
    )
    targets: Annotated[list[str], AfterValidator(distinct)] = field(
        "The modules that get an adapter: Hugging Face names of projections, or regular expressions that "
        "match a whole module name such as layers.7.self_attn.q_proj; `experts` for all experts of a layer, "
        "each with its own A and B; `router` for the routers. Without the key, every projection of the model "
        "gets an adapter, with `vision` also those of the tower, but no experts or routers.",
        PROJECTIONS,
        min_length=1,
    )
    modules_to_save: Annotated[list[str], AfterValidator(distinct)] = field(
        "Modules other than projections that are trained in full, as with PEFT's modules_to_save: "
        "embed_tokens, lm_head and norms, as Hugging Face names or regular expressions that match a whole "
        "name; `projector` for all of the projector of a recipe with data.images. They are stored in "
        "lora.dtype and computed in model.dtype.",
        [],
        example=["embed_tokens", "lm_head"],
    )
    trainable_tokens: Tokens = field(
        "Tokens whose rows of the embedding are trained, as with PEFT's trainable_token_indices: their "
        "numbers, or their texts in the model's tokenizer or in model.add_tokens. All other rows stay "
        "frozen. A head that is the embedding uses the trained rows too; another head keeps its own. The "
        "rows are stored in lora.dtype and computed in model.dtype.",
        [],
        unit="tokens",
        example=[128_256, "<note>"],
    )
    vision: bool = field(
        "Adapters in the linear layers of the vision tower and its projector too, of a recipe with "
        "data.images; `targets` then also names those, as out_proj or vision_tower.encoder.layers.7.mlp.fc1. "
        "The key `layers` is about the decoder alone. false leaves tower and projector frozen.",
        False,
    )
    layers: Layers = field(
        'The decoder layers that get adapters, counted from 0: all, a range "20-59" (both ends included), or '
        "a list.",
        "all",
        unit="indices",
    )
    kind: Literal["lora", "dora"] = field(
        "What is trained in addition to the frozen weights.",
        "lora",
        choices={
            "lora": "A and B of each projection.",
            "dora": "A, B and a magnitude for each output, as with PEFT's use_dora.",
        },
    )
    init: Init = field(
        "How A and B are initialized. peft, qwix, gaussian and zero_a draw them, and their product is zero. "
        "pissa and olora take a part of the base's weights, which are frozen without it; pissa_niter_16 "
        "computes that part with 16 iterations. The adapter that merge writes then fits the unchanged base, "
        "and has twice the rank.",
        "peft",
        choices={
            "peft": "A is uniform with bound 1/sqrt(fan_in), as in PEFT; B is zero.",
            "qwix": "A is uniform with bound sqrt(6/fan_in), as in Qwix; B is zero.",
            "gaussian": "A is normal with standard deviation 1/rank, as PEFT's gaussian; B is zero.",
            "zero_a": "A is zero; B is uniform with bound 1/sqrt(rank), PEFT's rule for A.",
            "pissa": "The largest singular values of a weight with their vectors, as PEFT's pissa.",
            "olora": "The first columns and rows of a weight's QR decomposition, as PEFT's olora.",
            "loftq": "The largest singular values of what model.quantization: nf4 loses of a weight, as "
            "PEFT's loftq.",
        },
    )
    start_from: str | None = field(
        "A PEFT adapter (adapter_config.json and adapter_model.safetensors) whose values training begins "
        "with, in place of fresh ones: a folder, relative as data.train's paths are, or an address such as "
        "gs:// or hf://OWNER/NAME. It must be just what the recipe trains. Step, optimizer and data begin "
        "anew.",
        None,
        min_length=1,
        example="adapters/first",
    )
    loraplus_lr_ratio: float | None = field(
        "LoRA+: ratio of B's learning rate to A's; null gives both the same.",
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
            "float32": "32 bits a number: small updates are kept.",
            "bfloat16": "16 bits a number: half the memory, coarser updates.",
        },
    )
    kv: Literal["independent", "shared"] = field(
        "For the keys and values of a layer: independent gives each its own A, as PEFT does; shared gives "
        "them one A, as Qwix does for Tunix's fused weight.",
        "independent",
        choices={
            "independent": "K and V have an A each, as in PEFT.",
            "shared": "K and V share one A, as in Qwix.",
        },
    )
