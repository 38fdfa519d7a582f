"""Tests of numerics against transformers and PEFT, in float32, on the CPU.

`make test` compares the logits of every kind of layer on one mesh, and trains a Gemma 4. `make e2e` trains
the other families, and `make nightly` uses the other mesh. test_decoder_training.py trains the families of
the shared decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.runtime import training
from tests.runtime.references import reference_logits, twenty_steps

pytestmark = pytest.mark.usefixtures("highest")

LOGITS = 2e-4
LOSS = 1e-4
MESHES = [{"fsdp": 8, "tp": 1}, {"fsdp": 4, "tp": 2}]
PERIOD = ["sliding_attention", "sliding_attention", "full_attention"]

KINDS: dict[str, Callable[[Path], Any]] = {
    "gemma4-text": lambda folder: tiny.make_gemma4(
        folder, multimodal=False, num_hidden_layers=3, layer_types=PERIOD
    ),
    "gemma4-multimodal-sharded": lambda folder: tiny.make_gemma4(
        folder, shards=3, num_hidden_layers=3, layer_types=PERIOD
    ),
    "gemma4-one-global-head": lambda folder: tiny.make_gemma4(
        folder, num_global_key_value_heads=1, num_hidden_layers=3, layer_types=PERIOD
    ),
    "gemma4-global-values": lambda folder: tiny.make_gemma4(
        folder, attention_k_eq_v=False, num_hidden_layers=3, layer_types=PERIOD
    ),
    "gemma4-e2b": lambda folder: tiny.make_gemma4(folder, shards=2, **tiny.GEMMA4_E2B),
    "gemma4-experts": lambda folder: tiny.make_gemma4(folder, **tiny.GEMMA4_EXPERTS),
    "gemma4-unified": lambda folder: tiny.make_gemma4_unified(
        folder, num_global_key_value_heads=1, num_hidden_layers=3, layer_types=PERIOD
    ),
    "gemma2": lambda folder: tiny.make_gemma2(folder),
    "gemma2-fused-qkv": lambda folder: tiny.make_gemma2(
        folder, num_hidden_layers=2, num_key_value_heads=8, query_pre_attn_scalar=16
    ),
    "gemma2-one-head": lambda folder: tiny.make_gemma2(
        folder,
        num_hidden_layers=2,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "gemma3": lambda folder: tiny.make_gemma3(folder),
    "gemma3-fused-qkv": lambda folder: tiny.make_gemma3(folder, num_key_value_heads=8),
    "gemma3-one-head": lambda folder: tiny.make_gemma3(folder, num_key_value_heads=1),
    "llama": lambda folder: tiny.make_llama(folder, shards=3),
    "llama-tied-one-head": lambda folder: tiny.make_llama(
        folder,
        tie_word_embeddings=True,
        num_key_value_heads=1,
        head_dim=24,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    ),
    "qwen2": lambda folder: tiny.make_qwen2(folder, shards=2),
    "qwen2-untied-scaled": lambda folder: tiny.make_qwen2(
        folder, tie_word_embeddings=False, rope_parameters=dict(tiny.LLAMA3_ROPE)
    ),
    "qwen3": lambda folder: tiny.make_qwen3(folder, shards=2),
    "qwen3-untied-one-head": lambda folder: tiny.make_qwen3(
        folder, tie_word_embeddings=False, num_key_value_heads=1
    ),
}
ONE_MESH = {
    "gemma4-e2b": "8x1",
    "gemma4-experts": "4x2",
    "gemma4-unified": "4x2",
    "gemma2": "8x1",
    "gemma2-fused-qkv": "8x1",
    "gemma2-one-head": "4x2",
    "llama": "8x1",
    "llama-tied-one-head": "4x2",
    "qwen2": "4x2",
    "qwen2-untied-scaled": "8x1",
    "qwen3": "8x1",
    "qwen3-untied-one-head": "4x2",
}
"""Kinds of one family with equal layers, which together use both meshes.

A single key/value head differs if tp is 2. Training uses the other mesh for the other kinds.
"""

SECOND_MESH = {
    "gemma4-multimodal-sharded": "8x1",
    "gemma3": "8x1",
    "gemma4-text": "4x2",
    "gemma4-one-global-head": "8x1",
    "gemma4-global-values": "8x1",
    "gemma3-fused-qkv": "8x1",
    "gemma3-one-head": "8x1",
    "qwen2": "4x2",
    "qwen2-untied-scaled": "8x1",
    "qwen3": "8x1",
}
"""Kinds whose difference from another kind, or from one of test_decoder.py, is the same on each mesh.

`make nightly` runs them.
"""


def mesh_name(axes: dict[str, int]) -> str:
    return f"{axes['fsdp']}x{axes['tp']}"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Return a function that makes a tiny checkpoint's folder and transformers' model once by kind."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            folder = tmp_path_factory.mktemp("tiny") / kind
            made[kind] = folder, KINDS[kind](folder)
        return made[kind]

    return get


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        pytest.param(
            kind,
            axes,
            id=f"{kind}-{mesh_name(axes)}",
            marks=[pytest.mark.nightly] if SECOND_MESH.get(kind) == mesh_name(axes) else [],
        )
        for kind in KINDS
        for axes in MESHES
        if ONE_MESH.get(kind, mesh_name(axes)) == mesh_name(axes)
    ],
)
def test_logits_match_transformers(
    kind: str,
    axes: dict[str, int],
    checkpoint: Callable[[str], tuple[Path, Any]],
    record_property: Callable[[str, object], None],
) -> None:
    import torch

    folder, model = checkpoint(kind)
    one = training.batch(0)
    with torch.no_grad():
        expected = reference_logits(model, one).numpy()
    mesh, built = training.build(folder, axes, remat="none")
    found = training.logits(built, mesh, one)
    built.provider.check_used()
    real = one["segment_ids"] > 0
    difference = np.abs(found - expected)[real].max()
    print(f"\n{kind} {axes}: logits differ by {difference:.1e} of {np.abs(expected[real]).max():.1f}")
    record_property("logits", float(difference / np.abs(expected[real]).max()))
    assert np.abs(expected[real]).max() > 10, "logits are not flat"
    assert difference <= LOGITS


def test_packed_samples_match_separate_samples_in_transformers(
    checkpoint: Callable[[str], tuple[Path, Any]],
) -> None:
    """Put two samples into each row, so that positions restart under scaled frequencies."""
    import torch

    folder, model = checkpoint("llama")
    one = training.packed_batch()
    mesh, built = training.build(folder, MESHES[1], remat="none")
    found = training.logits(built, mesh, one)
    worst = 0.0
    for row, segments in enumerate(one["segment_ids"]):
        for segment in (1, 2):
            mine = segments == segment
            with torch.no_grad():
                alone = model(torch.tensor(one["tokens"][row, mine])[None].long(), use_cache=False).logits
            worst = max(worst, float(np.abs(found[row, mine] - alone[0].numpy()).max()))
    print(f"\npacked: logits differ by {worst:.1e}")
    assert worst <= LOGITS


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        pytest.param("gemma4-multimodal-sharded", MESHES[0], marks=pytest.mark.nightly),
        ("gemma4-multimodal-sharded", MESHES[1]),
        pytest.param("gemma4-e2b", MESHES[1], marks=pytest.mark.e2e),
        pytest.param("gemma4-experts", MESHES[0], marks=pytest.mark.e2e),
        pytest.param("gemma2", MESHES[1], marks=pytest.mark.e2e),
        pytest.param("gemma3", MESHES[1], marks=pytest.mark.e2e),
        pytest.param("gemma3-fused-qkv", MESHES[0], marks=pytest.mark.nightly),
    ],
    ids=lambda value: value if isinstance(value, str) else mesh_name(value),
)
def test_twenty_training_steps_match_peft(
    kind: str,
    axes: dict[str, int],
    checkpoint: Callable[[str], tuple[Path, Any]],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Run 20 steps of 2 micro-batches with rematerialization, from the same initial adapters."""
    folder, _ = checkpoint(kind)
    policy, targets = "decoder", training.TARGETS
    if kind == "gemma4-experts":
        policy, targets = "block", (*training.TARGETS, "experts", "router.proj")
    alike = twenty_steps(folder, KINDS[kind](tmp_path / "again"), axes, tmp_path, policy, targets)
    record_property("losses", alike.losses / alike.of_loss)
    print(f"\n{kind} {axes}: {alike}")
    assert alike.losses <= LOSS
    assert alike.gradients <= 1e-4
