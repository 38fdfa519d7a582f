"""Tunix's own models of the families that the decoder describes, as references."""

from __future__ import annotations

from typing import Any

from recipec.runtime.model.families.base import FULL, SLIDING
from recipec.runtime.model.families.decoder import DecoderArchitecture


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
