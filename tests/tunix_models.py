"""Tunix's own models of Gemma 2, 3 and 4, as references.

Their loaders of Tunix 0.1.7 read a folder of safetensors, with these limits:

- Gemma 2: queries are scaled by the head size, and the rotary base is 10,000. This excludes the 27B.
- Gemma 3: every sixth layer is global. A multimodal checkpoint's names begin with language_model.model.
- Gemma 4: names begin with model.language_model, as in a multimodal checkpoint. Layers that share keys and
  values are not read, because transformers does not write weights for them. Experts are read, but Tunix's
  router reads another input than transformers'.

Qwix gives the fused weight of K and V one A, as `lora.kv: shared` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recipec.runtime.model.families.decoder_family import DecoderArchitecture
from recipec.runtime.model.families.family import FULL, SLIDING

PROJECTIONS = {
    "attn.q_einsum": ("self_attn.q_proj",),
    "attn.k_einsum": ("self_attn.k_proj",),
    "attn.kv_einsum": ("self_attn.k_proj", "self_attn.v_proj"),
    "attn.attn_vec_einsum": ("self_attn.o_proj",),
    **{f"mlp.{name}": (f"mlp.{name}",) for name in ("gate_proj", "up_proj", "down_proj")},
}
"""Hugging Face's projections in a weight of Tunix's layers."""
Pairs = Mapping[str, tuple[np.ndarray, ...]]
"""A [rank, in] and B [out, rank] of each projection, as in PEFT ("layers.0.self_attn.q_proj")."""


def load(folder: Path, a: DecoderArchitecture) -> Any:
    """Return Tunix's model of a checkpoint, in float32, on one device."""
    import jax.numpy as jnp
    from tunix.models.gemma import params_safetensors as gemma2
    from tunix.models.gemma3 import params_safetensors as gemma3
    from tunix.models.gemma4 import params_safetensors as gemma4

    readers = {
        "gemma2": (gemma2, gemma2_config),
        "gemma3": (gemma3, gemma3_config),
        "gemma4": (gemma4, gemma4_config),
    }
    reader, config = readers[a.family]
    return reader.create_model_from_safe_tensors(str(folder), config(a, jnp.float32), None, jnp.float32)


def add_lora(model: Any, rank: int, alpha: float) -> Any:
    """Return Tunix's model with Qwix's LoRA on every projection of its layers."""
    import qwix
    from flax import nnx

    modules = "|".join(re.escape(path.replace(".", "/")) for path in PROJECTIONS)
    provider = qwix.LoraProvider(module_path=rf"layers/\d+/({modules})", rank=rank, alpha=alpha)
    return qwix.apply_lora_to_model(model, provider, **model.get_model_input(), rngs=nnx.Rngs(0))


def adapters(model: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return A and B of Tunix's model, as in PEFT."""
    pairs = {}
    for name, a, b, slot in _variables(model):
        part = np.asarray(b.get_value() if slot is None else b.get_value()[:, slot])
        rank = len(part)
        low = np.asarray(a.get_value()).reshape(-1, rank)
        pairs[name] = low.T.copy(), part.reshape(rank, -1).T.copy()
    return pairs


def set_adapters(model: Any, pairs: Pairs) -> None:
    """Set A and B of Tunix's model. Those of a layer's K and V have the same A."""
    import jax.numpy as jnp

    variables = list(_variables(model))
    assert {name for name, *_ in variables} == pairs.keys()
    for name, a, b, slot in variables:
        low, high = pairs[name]
        a.set_value(jnp.asarray(low.T.reshape(a.get_value().shape)))
        at = slice(None) if slot is None else (slice(None), slot)
        part = b.get_value()[at]
        b.set_value(b.get_value().at[at].set(high.T.reshape(part.shape)))
    for name, pair in adapters(model).items():
        assert all(map(np.array_equal, pair, pairs[name])), name


def _variables(model: Any) -> Iterator[tuple[str, Any, Any, int | None]]:
    """Yield each projection's name, the variables of its A and B, and its index into a fused B."""
    for number, layer in enumerate(model.layers):
        for path, projections in PROJECTIONS.items():
            block, _, name = path.partition(".")
            module = getattr(getattr(layer, block), name, None)
            if module is None:
                continue
            weight = "w" if block == "attn" else "kernel"
            a, b = (getattr(module, f"{weight}_lora_{letter}") for letter in "ab")
            for slot, projection in enumerate(projections):
                yield f"layers.{number}.{projection}", a, b, slot if len(projections) > 1 else None


def merge(base: Path, a: DecoderArchitecture, output: Path, model: Any, rank: int, alpha: float) -> None:
    """Write a checkpoint, which is one file, with the LoRA of Tunix's model merged into it, by Tunix.

    Tunix names the tensors of Gemma 3, which are those of Gemma 2. For Gemma 4 it does only the arithmetic.
    """
    from tunix.models import safetensors_saver
    from tunix.models.gemma3 import params

    if a.family != "gemma4":
        params.save_lora_merged_model_as_safetensors(str(base), str(output), model, rank, alpha)
        return

    def projections(layers: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        split = {}
        for path, (low, high) in layers.items():
            _, number, module = path.split(".", 2)
            names = PROJECTIONS[module]
            for slot, name in enumerate(names):
                split[f"layers.{number}.{name}"] = [low, high[:, slot] if len(names) > 1 else high]
        return split

    safetensors_saver.save_lora_merged_model_as_safetensors(
        *(str(base), str(output), model, rank, alpha),
        state_key_transform_fn=lambda name: f"model.language_model.{name}.weight",
        custom_layer_extractor_fn=projections,
        transpose_rules={".weight": (1, 0)},
    )


def gemma2_config(a: DecoderArchitecture, dtype: Any) -> Any:
    """Return Tunix's ModelConfig of a Gemma 2; its weights have the loader's dtype."""
    from tunix.models.gemma import model

    assert {(rope.theta, rope.kind) for rope in dict(a.ropes).values()} == {(10_000.0, "default")}
    assert a.attention_scale == a.head_dim**-0.5
    kinds = {FULL: model.AttentionType.GLOBAL, SLIDING: model.AttentionType.LOCAL_SLIDING}
    return model.ModelConfig(
        num_layers=a.num_layers,
        num_embed=a.vocab_size,
        embed_dim=a.hidden_size,
        hidden_dim=a.intermediate_size,
        num_heads=a.num_heads,
        head_dim=a.head_dim,
        num_kv_heads=a.num_kv_heads,
        final_logit_softcap=a.logit_softcap,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=tuple(kinds[kind] for kind in a.layer_types),
        attn_logits_soft_cap=a.score_softcap,
        sliding_window_size=a.sliding_window,
    )


def gemma3_config(a: DecoderArchitecture, dtype: Any) -> Any:
    """Return Tunix's ModelConfig of a Gemma 3 without images."""
    from tunix.models.gemma3 import model

    ropes = dict(a.ropes)
    scales = model.QueryPreAttentionNormalisation
    by_scale = {
        (a.hidden_size // a.num_heads) ** -0.5: scales.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS,
        a.head_dim**-0.5: scales.BY_ONE_OVER_SQRT_HEAD_DIM,
    }
    assert a.layer_types == tuple(FULL if i % 6 == 5 else SLIDING for i in range(a.num_layers))
    return model.ModelConfig(
        num_layers=a.num_layers,
        num_embed=a.vocab_size,
        embed_dim=a.hidden_size,
        hidden_dim=a.intermediate_size,
        num_heads=a.num_heads,
        head_dim=a.head_dim,
        num_kv_heads=a.num_kv_heads,
        sliding_window_size=a.sliding_window,
        local_base_frequency=int(ropes[SLIDING].theta),
        global_base_frequency=int(ropes[FULL].theta),
        local_scale_factor=ropes[SLIDING].factor,
        global_scale_factor=ropes[FULL].factor,
        query_pre_attn_norm=by_scale[a.attention_scale],
        param_dtype=dtype,
    )


def gemma4_config(a: DecoderArchitecture, dtype: Any) -> Any:
    """Return Tunix's ModelConfig of a Gemma 4 without experts."""
    from tunix.models.gemma4 import model

    assert a.full_heads is not None
    kinds = {FULL: model.AttentionType.GLOBAL, SLIDING: model.AttentionType.LOCAL_SLIDING}
    ropes = dict(a.ropes)
    # Tunix truncates layers - fraction * layers: half a layer less keeps it from rounding down.
    shared = (a.kv_shared_layers - 0.5) / a.num_layers if a.kv_shared_layers else 0.0
    return model.ModelConfig(
        num_layers=a.num_layers,
        num_embed=a.vocab_size,
        embed_dim=a.hidden_size,
        hidden_dim=a.intermediate_size,
        num_heads=a.num_heads,
        head_dim=a.head_dim,
        num_kv_heads=a.num_kv_heads,
        final_logit_softcap=a.logit_softcap,
        sliding_window_size=a.sliding_window,
        per_layer_input_dim=a.per_layer_input,
        num_global_kv_heads=a.full_heads.kv_heads,
        global_key_size=a.full_heads.head_dim,
        attention_pattern=tuple(kinds[kind] for kind in a.layer_types),
        frac_shared_layers=shared,
        global_rope_proportion=ropes[FULL].share,
        k_eq_v_global=a.k_eq_v,
        override_kv_shared_ffw_hidden=a.wide_mlp or a.intermediate_size,
        local_base_frequency=int(ropes[SLIDING].theta),
        global_base_frequency=int(ropes[FULL].theta),
        param_dtype=dtype,
        dtype=dtype,
        use_sliding_window_kv_cache=False,
    )
