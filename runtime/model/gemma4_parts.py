"""What some sizes of Gemma 4 have: E2B and E4B embeddings for each layer, 26B-A4B experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .families.base import LoraTarget, Parameter, Source, dense, plain
from .families.gemma import norm

if TYPE_CHECKING:
    from .families.gemma4 import Gemma4Architecture


def per_layer_embeddings(a: Gemma4Architecture) -> list[Parameter]:
    d, layers, width = a.hidden_size, a.num_layers, a.per_layer_input
    into, name = (d, layers, width), "per_layer_model_projection"
    projected = Source(f"{name}.weight", (layers * width, d), (layers, width, d), (2, 0, 1))
    table = a.vocab_size, layers, width
    rows = Source("embed_tokens_per_layer.weight", (a.vocab_size, layers * width), table, (0, 1, 2))
    return [
        Parameter(f"embedder.{name}.w", into, ("fsdp", None, "tp"), (projected,)),
        norm("embedder.per_layer_projection_norm", "per_layer_projection_norm", width),
        Parameter("embedder.per_layer_input_embedding", table, ("tp", None, "fsdp"), (rows,)),
    ]


def per_layer_input(a: Gemma4Architecture, layer: str) -> list[Parameter]:
    d, width = a.hidden_size, a.per_layer_input
    gate, back = f"{layer}.per_layer_input_gate", f"{layer}.per_layer_projection"
    return [
        dense(f"{gate}.w", gate, (d, width), ("fsdp", "tp")),
        dense(f"{back}.w", back, (width, d), ("tp", "fsdp")),
        norm(f"{layer}.post_per_layer_input_norm", f"{layer}.post_per_layer_input_norm", d),
    ]


def experts(a: Gemma4Architecture, layer: str) -> list[Parameter]:
    d, e, f = a.hidden_size, a.experts, a.expert_size
    return [
        norm(f"{layer}.moe_pre_ffw_norm", f"{layer}.pre_feedforward_layernorm_2", d),
        norm(f"{layer}.moe_post_ffw_norm", f"{layer}.post_feedforward_layernorm_2", d),
        norm(f"{layer}.dense_post_ffw_norm", f"{layer}.post_feedforward_layernorm_1", d),
        dense(f"{layer}.moe.router_logits", f"{layer}.router.proj", (d, e), (None, None)),
        Parameter(f"{layer}.moe.router_scale", (d,), (None,), (plain(f"{layer}.router.scale", (d,)),)),
        Parameter(
            f"{layer}.moe.per_expert_scale", (e,), (None,), (plain(f"{layer}.router.per_expert_scale", (e,)),)
        ),
        Parameter(
            f"{layer}.moe.gating_einsum",
            (e, 2, f, d),
            ("fsdp", None, None, "tp"),
            (Source(f"{layer}.experts.gate_up_proj", (e, 2 * f, d), (e, 2, f, d), (0, 1, 2, 3)),),
        ),
        Parameter(
            f"{layer}.moe.linear",
            (e, f, d),
            ("fsdp", "tp", None),
            (Source(f"{layer}.experts.down_proj", (e, d, f), (e, d, f), (0, 2, 1)),),
        ),
    ]


def expert_targets(a: Gemma4Architecture, i: int) -> list[LoraTarget]:
    """Return a layer's router and experts as LoRA targets."""
    moe = f"layers.{i}.moe"
    out = [LoraTarget(i, f"{moe}.router_logits", (0,), ("router.proj",), words=("router",))]
    for name, axis, held in (("gating_einsum", 3, "gate_up_proj"), ("linear", 1, "down_proj")):
        parameter = f"experts.{held}"
        out.append(
            LoraTarget(
                i,
                f"{moe}.{name}",
                (axis,),
                (parameter,),
                experts=a.experts,
                words=("experts",),
                parameter=parameter,
            )
        )
    return out
