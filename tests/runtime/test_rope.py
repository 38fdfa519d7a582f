"""Tests of every kind of rotary embedding against transformers, and of contradictory configs."""

from __future__ import annotations

import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from recipec.runtime.model.families import UnsupportedCheckpoint
from recipec.runtime.model.families.rotary import read_rope, read_ropes
from recipec.runtime.model.rope import Rope, rotate, sin_cos
from tests import tiny

SIZES = {
    "hidden_size": 288,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
"""Heads of 48 features."""
SHORT = [1.0 + 0.03 * i for i in range(24)]
LONG = [1.1 + 1.7 * i for i in range(24)]
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LONGROPE = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
MINISTRAL = {**YARN, "rope_theta": 1e6, "mscale": 0.7, "mscale_all_dim": 1.3, "llama_4_scaling_beta": 0.1}
MROPE = {"rope_type": "default", "mrope_section": [2, 2, 2], "mrope_interleaved": True}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "default": ("Llama", {"rope_theta": 500_000.0}, {}),
    "linear": ("Llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}, {}),
    "dynamic": ("Llama", {"rope_scaling": {"type": "dynamic", "factor": 3.7}}, {}),
    "llama3": ("Llama", {"rope_scaling": tiny.LLAMA3_ROPE, "rope_theta": 5e5}, {}),
    "llama3-one-bound": ("Llama", {"rope_scaling": {**tiny.LLAMA3_ROPE, "high_freq_factor": 1.0}}, {}),
    "yarn": ("Qwen2", {"rope_scaling": YARN}, {}),
    "yarn-from-longest": ("Qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0}, "head_dim": 64}, {}),
    "yarn-untruncated": ("Llama", {"rope_scaling": {**YARN, "truncate": False, "beta_fast": 20}}, {}),
    "yarn-by-ratio": ("Llama", {"rope_scaling": {**YARN, "factor": None}}, {}),
    "yarn-no-mscale": ("Llama", {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0}}, {}),
    "yarn-narrow": ("Llama", {"rope_scaling": {**YARN, "beta_fast": 1.01, "truncate": False}}, {}),
    "yarn-low-base": ("Llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 5.0}, {}),
    "olmo3": ("Olmo3", {"rope_parameters": {**YARN, "attention_factor": 1.2, "rope_theta": 5e5}}, {}),
    "ministral3": ("Ministral3", {"rope_parameters": MINISTRAL, "head_dim": 48}, {}),
    "smollm3": ("SmolLM3", {"rope_theta": 2_000_000.0}, {}),
    "granite": ("Granite", {"rope_theta": 1e7}, {}),
    "longrope": ("Phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64}, {"share": 1.0}),
    "longrope-su": (
        "Phi3",
        {"rope_scaling": {**LONGROPE, "type": "su", "original_max_position_embeddings": 64}}
        | {"original_max_position_embeddings": 64},
        {"share": 1.0},
    ),
    "longrope-partial": (
        "Phi3",
        {"rope_scaling": {**LONGROPE, "short_factor": SHORT[:18], "long_factor": LONG[:18]}}
        | {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 100},
        {"share": 1.0},
    ),
    "longrope-factors": (
        "Phi3",
        {"rope_scaling": {**LONGROPE, "factor": 32.0}, "original_max_position_embeddings": 64},
        {"share": 1.0},
    ),
    "glm4": ("Glm4", {"head_dim": 48}, {"share": 0.5, "interleaved": True}),
    "glm4-given": (
        "Glm4",
        {"head_dim": 40, "rope_parameters": {"rope_theta": 1e5, "partial_rotary_factor": 0.25}},
        {"share": 0.5, "interleaved": True},
    ),
    "cohere2": ("Cohere2", {"rope_theta": 50_000}, {"interleaved": True}),
    "qwen3_5": ("Qwen3_5", {"rope_parameters": MROPE, "head_dim": 48}, {"share": 0.25}),
}
TEXT = {"Qwen3_5": "Qwen3_5Text"}


def reference(family: str, config: dict[str, Any]) -> tuple[Any, Any]:
    """Return transformers' rotary module, and its Python module."""
    module = importlib.import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
    name = TEXT.get(family, family)
    made = getattr(transformers, f"{name}Config")(**SIZES, **config)
    return getattr(module, f"{name}RotaryEmbedding")(made), module


def queries(module: Any, x: np.ndarray, cos: Any, sin: Any) -> np.ndarray:
    """Rotate [B, T, N, H] with transformers."""
    q = torch.from_numpy(x).transpose(1, 2)
    return module.apply_rotary_pos_emb(q, q, cos, sin)[0].transpose(1, 2).numpy()


@pytest.mark.parametrize("case", CASES)
def test_sines_cosines_and_rotation_match_transformers(case: str) -> None:
    """Compare within the original context, in a batch with one longer row, and far beyond."""
    family, given, options = CASES[case]
    config = SIZES | given
    rope = read_rope(config, family, **options)
    theirs, module = reference(family, given)
    head_dim = config.get("head_dim") or 48
    x = np.random.default_rng(0).standard_normal((2, 3, 6, head_dim), np.float32)
    rotated = jax.jit(lambda x, sin, cos: rotate(x, sin, cos, rope.interleaved))
    found = jax.jit(lambda positions: sin_cos(rope, positions, head_dim))
    for rows in (
        [[0, 1, 63], [5, 7, 63]],
        [[0, 1, 64], [7, 8, 9]],
        [[0, 600, 37], [1, 2, 3]],
        [[9, 131_071, 4_000]] * 2,
    ):
        positions = np.array(rows, np.int32)
        cos, sin = theirs(torch.zeros(1), torch.from_numpy(positions).long())
        ours = [np.asarray(one) for one in found(positions)]
        turned = rope.turned(head_dim)
        assert cos.shape[-1] == turned and ours[0].shape == (2, 3, turned // 2)
        # transformers stores each value twice: next to each other in Cohere, half a head apart in all others.
        pairs = slice(0, None, 2) if family == "Cohere2" else slice(0, turned // 2)
        # A float32 holds an angle, and its frequency, with a relative error of 2**-24.
        angles = positions[..., None] * np.abs(theirs.inv_freq.numpy())
        noise = (1e-6 + angles * 2.0**-22) * rope.attention
        for mine, their in zip(ours, (sin, cos), strict=True):
            assert (np.abs(mine - their[..., pairs].numpy()) <= noise).all(), (case, rows)
        # Use the same sines and cosines, so that only the rotation is compared.
        mine = np.asarray(rotated(x, sin[..., pairs].numpy(), cos[..., pairs].numpy()))
        np.testing.assert_allclose(mine, queries(module, x, cos, sin), atol=1e-6, rtol=1e-6)
        assert np.array_equal(mine[..., turned:], x[..., turned:])
        assert not np.allclose(mine[..., :turned], x[..., :turned])


@pytest.mark.parametrize("case", [case for case in CASES if case != "dynamic"])
def test_frequencies_and_attention_factor_match_transformers(case: str) -> None:
    family, given, options = CASES[case]
    theirs, _ = reference(family, given)
    head_dim = (SIZES | given).get("head_dim") or 48
    rope = read_rope(SIZES | given, family, **options)
    # Before its first batch, transformers' module holds the frequencies of a short one.
    pairs = [(rope.frequencies(head_dim), theirs.inv_freq)]
    if rope.kind == "longrope":
        theirs(torch.zeros(1), torch.tensor([[4_000]]))
        pairs.append((rope.frequencies(head_dim, long=True), theirs.inv_freq))
        assert not np.allclose(pairs[0][0], pairs[1][0])
    for mine, their in pairs:
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, their.numpy(), rtol=3e-7)
        assert (mine != their.numpy()).sum() <= 2
    assert math.isclose(rope.attention, theirs.attention_scaling, rel_tol=1e-12)


def test_partial_rotation_keeps_unrotated_features_and_dtype() -> None:
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 4, 2, 24)), jnp.bfloat16)
    out = rotate(x, *sin_cos(Rope(1e4, share=0.5), jnp.arange(4)[None], 24))
    assert out.dtype == jnp.bfloat16
    assert jnp.array_equal(out[..., 12:], x[..., 12:])
    whole = rotate(x.astype(jnp.float32), *sin_cos(Rope(1e4, share=0.5), jnp.arange(4)[None], 24))
    assert jnp.array_equal(out, whole.astype(jnp.bfloat16)), "turned in less than float32"


def test_layer_types_have_separate_rope_parameters() -> None:
    plain, scaled = {"rope_type": "default", "rope_theta": 1e4}, {**YARN, "rope_theta": 5e5}
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    nested = {"sliding_attention": plain, "full_attention": scaled}
    ropes = read_ropes(SIZES | {"rope_parameters": nested}, types, "a model")
    assert ropes["sliding_attention"] == Rope(1e4)
    assert ropes["full_attention"] == read_rope(SIZES | {"rope_parameters": scaled}, "a model")
    flat = read_ropes(SIZES | {"rope_parameters": scaled}, types, "a model")
    assert flat == dict.fromkeys(types, ropes["full_attention"])
    with pytest.raises(UnsupportedCheckpoint, match="has none for layers of full_attention"):
        read_ropes(SIZES | {"rope_parameters": {"sliding_attention": plain}}, types, "a model")
    with pytest.raises(UnsupportedCheckpoint, match="differs between layers; a model has one"):
        read_rope(SIZES | {"rope_parameters": nested}, "a model")


def test_mrope_of_text_equals_default_rope() -> None:
    old = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}, "rope_theta": 1e6}
    assert read_rope(SIZES | old, "a model") == Rope(1e6)


@pytest.mark.parametrize(
    ("scaling", "key", "said"),
    [
        ({"type": "cubic"}, "rope_scaling", "known are default, linear, dynamic, yarn, longrope, llama3 and"),
        ({"type": ["yarn"]}, "rope_scaling", "is of type"),
        ({"type": "linear", "factor": 0.5}, "rope_scaling", "factor is 0.5, below 1"),
        ({"type": "dynamic"}, "rope_scaling", "has no factor"),
        ({"type": "dynamic", "factor": math.nan}, "factor", "not a positive number"),
        ({**YARN, "factor": -4.0}, "factor", "not a positive number"),
        ({**YARN, "factor": None, "original_max_position_embeddings": 1024}, "rope_scaling", "is above"),
        ({**YARN, "original_max_position_embeddings": 1}, "original_max_position_embeddings", "context"),
        ({**YARN, "beta_fast": 1, "beta_slow": 32}, "rope_scaling", "beta_slow .32. is not below beta_fast"),
        ({**YARN, "truncate": "no"}, "truncate", "neither true nor false"),
        ({**YARN, "mscale": "1"}, "mscale", "not a positive number"),
        ({**YARN, "attention_factor": 0}, "attention_factor", "not a positive number"),
        ({**LONGROPE, "long_factor": LONG[1:]}, "long_factor", "is 23 numbers, not one .* 24 frequencies"),
        ({**LONGROPE, "short_factor": 1.0}, "short_factor", "is 1.0, not one number"),
        ({**LONGROPE, "short_factor": [*SHORT[1:], math.inf]}, "short_factor", "not a positive number"),
        ({**LONGROPE, "short_factor": [*SHORT[1:], None]}, "short_factor", "not a positive number"),
        ({**LONGROPE, "factor": 0.9}, "rope_scaling", "below 1"),
        ({**tiny.LLAMA3_ROPE, "low_freq_factor": 5.0}, "rope_scaling", "is not below high_freq_factor"),
        ({"partial_rotary_factor": 0.44}, "partial_rotary_factor", "a head's 48 features, 21 would turn"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor", "above 1"),
        ({"partial_rotary_factor": math.nan}, "partial_rotary_factor", "not a positive number"),
        ({"rope_theta": 1.0}, "rope_theta", "not above 1"),
    ],
)
def test_invalid_rope_config_is_refused_with_its_key(scaling: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=said) as refusal:
        read_rope(SIZES | {"rope_scaling": scaling}, "a model", share=1.0)
    assert refusal.value.key == key


def test_unsupported_partial_rotary_factor_or_dynamic_rope_is_refused() -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"a model supports only 1\.0"):
        read_rope(SIZES | {"partial_rotary_factor": 0.5}, "a model")
    two = {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}}
    with pytest.raises(UnsupportedCheckpoint, match=r"is 0\.25 in rope_parameters and 0\.5 next to it"):
        read_rope(SIZES | two, "a model", share=1.0)
    with pytest.raises(UnsupportedCheckpoint, match="dynamic scaling needs two pairs"):
        read_rope(SIZES | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "a model", head_dim=2)


@pytest.mark.parametrize("case", ["longrope", "dynamic"])
def test_length_that_is_given_chooses_frequencies_instead_of_the_batch(case: str) -> None:
    family, given, options = CASES[case]
    rope = read_rope(SIZES | given, family, **options)
    short, longer = (np.array([[3, most]], np.int32) for most in (5, 599))
    found = sin_cos(rope, short, 48, 600)[0][:, 0]
    assert np.array_equal(found, sin_cos(rope, longer, 48)[0][:, 0])
    assert not np.array_equal(found, sin_cos(rope, short, 48)[0][:, 0])
