"""Tests of the decoder against Tunix's own models of Gemma 4, filled by Tunix's loader from the same files.

The loader cannot read layers that share keys and values: transformers does not write their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tunix.models.gemma4 import params_safetensors

from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny
from tests.runtime import training
from tests.tunix_models import gemma4_config

LENGTH = 21
LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": LAYERS, "num_hidden_layers": 4},
        {
            **{"layer_types": LAYERS, "num_hidden_layers": 4, "attention_k_eq_v": False},
            "hidden_size_per_layer_input": 16,
        },
    ],
    ids=["keys as values", "inputs of each layer"],
)
def test_logits_match_tunix(fields: dict[str, Any], tmp_path: Path) -> None:
    """Compare float32 logits; they may differ by 1e-5 of the largest, which is the order of the sums."""
    folder = tmp_path / "model"
    tiny.make_gemma4(folder, **fields)
    a = HFCheckpoint.open(folder).architecture
    tokens = np.random.default_rng(0).integers(5, a.vocab_size - 8, (2, LENGTH)).astype(np.int32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))
    causal = np.tile(np.tril(np.ones((LENGTH, LENGTH), bool)), (2, 1, 1))

    config = gemma4_config(a, jnp.float32)
    tunix = params_safetensors.create_model_from_safe_tensors(str(folder), config, None, jnp.float32)
    expected = np.asarray(tunix(jnp.asarray(tokens), jnp.asarray(positions), None, jnp.asarray(causal))[0])

    mesh, built = training.build(folder, {"fsdp": 1}, full=True)
    rows = {"tokens": tokens, "positions": positions, "segment_ids": np.ones_like(tokens)}
    logits = training.logits(built, mesh, rows)
    assert np.abs(expected).max() > 10, "logits are not flat"
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()
