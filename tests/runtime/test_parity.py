"""Tests of the models' numerics against transformers and PEFT, in float32, on the CPU.

`make test` compares the logits of every kind of layer of the Gemma models, and trains a decoder with fused
projections. `make e2e` trains the other families, with LoRA on every projection. test_decoder.py has the
logits of the shared decoder's families.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.runtime import training
from tests.runtime.decoders import CASES, CLOSED, EVERY, LIMIT, layers, make, marked
from tests.runtime.references import logits_apart, twenty_steps

pytestmark = pytest.mark.usefixtures("highest")

LOGITS = 2e-4
LOSS = 1e-4
MESHES = [{"fsdp": 8, "tp": 1}, {"fsdp": 4, "tp": 2}]
THREE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "gemma4-text": (tiny.make_gemma4, {**THREE, "multimodal": False}),
    "gemma4-multimodal-sharded": (tiny.make_gemma4, {**THREE, "shards": 3}),
    "gemma4-one-global-head": (tiny.make_gemma4, {**THREE, "num_global_key_value_heads": 1}),
    "gemma4-global-values": (tiny.make_gemma4, {**THREE, "attention_k_eq_v": False}),
    "gemma4-e2b": (tiny.make_gemma4, {**tiny.GEMMA4_E2B, "shards": 2}),
    "gemma4-experts": (tiny.make_gemma4, tiny.GEMMA4_EXPERTS),
    "gemma4-unified": (tiny.make_gemma4_unified, {**THREE, "num_global_key_value_heads": 1}),
    "gemma2": (tiny.make_gemma2, {}),
    "gemma2-mha": (
        *(tiny.make_gemma2, {"num_hidden_layers": 2, "num_key_value_heads": 8, "query_pre_attn_scalar": 16}),
    ),
    "gemma2-one-head": (
        tiny.make_gemma2,
        {
            **{"num_hidden_layers": 2, "num_key_value_heads": 1},
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "gemma3": (tiny.make_gemma3, {}),
    "gemma3-mha": (tiny.make_gemma3, {"num_key_value_heads": 8}),
    "gemma3-one-head": (tiny.make_gemma3, {"num_key_value_heads": 1}),
}
VARIANTS = ("gemma4-text", "gemma2-mha", "gemma2-one-head", "gemma3-mha")
"""Kinds of `make e2e`: other head counts, or fewer parts, of a model that `make test` has."""
ONLY_FSDP = ("gemma4-text", "gemma4-e2b", "gemma2", "gemma2-mha")
"""Kinds whose logits are compared without tp."""


def write(kind: str, folder: Path) -> Any:
    """Write a tiny checkpoint, and return transformers' model."""
    make, fields = KINDS[kind]
    return make(folder, **fields)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.e2e) if kind in VARIANTS else kind for kind in KINDS]
)
def test_logits_match_transformers(
    kind: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Compare padded rows, and packed samples longer than the window with each sample by itself."""
    model = write(kind, tmp_path)
    mesh, built = training.build(tmp_path, MESHES[kind not in ONLY_FSDP], remat="none")
    difference, size = logits_apart(model, built, mesh)
    print(f"\n{kind}: logits differ by {difference:.1e} of {size:.1f}")
    record_property("logits", difference / size)
    assert size > 10, "logits are not flat"
    assert difference <= LOGITS


@pytest.mark.e2e
@pytest.mark.parametrize(
    "kind", ["gemma4-multimodal-sharded", "gemma4-e2b", "gemma4-experts", "gemma2", "gemma3"]
)
def test_twenty_training_steps_match_peft(
    kind: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Run 20 steps of 2 micro-batches with rematerialization, from the same initial adapters."""
    model = write(kind, tmp_path / "base")
    axes, policy, targets = MESHES[1], "decoder", training.TARGETS
    if kind == "gemma4-experts":
        axes, policy, targets = MESHES[0], "block", (*training.TARGETS, "experts", "router.proj")
    alike = twenty_steps(tmp_path / "base", model, axes, tmp_path / "run", policy, targets)
    record_property("losses", alike.losses / alike.of_loss)
    print(f"\n{kind} {axes}: {alike}")
    assert alike.losses <= LOSS
    assert alike.gradients <= 1e-4


AXES = {"fsdp": 2, "tp": 2}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("base", "targets"),
    [
        (partial(make, "qwen3_moe", num_experts=6), ("q_proj", "experts", "router")),
        (partial(make, "nemotron_h-latent", n_routed_experts=6), ("q_proj", "in_proj", "experts")),
        (partial(write, "gemma4-experts"), ("q_proj", "experts", "router.proj")),
    ],
    ids=["qwen3_moe", "nemotron_h-latent", "gemma4"],
)
def test_expert_adapters_on_the_ep_axis_train_as_in_peft(
    base: Callable[..., Any], targets: tuple[str, ...], tmp_path: Path
) -> None:
    model = base(tmp_path / "base")
    axes = {"fsdp": 2, "ep": 2, "tp": 2}
    alike = twenty_steps(tmp_path / "base", model, axes, tmp_path / "run", targets=targets)
    assert alike.losses <= LIMIT * alike.of_loss
    assert alike.gradients <= 1e-4
    assert alike.parameters <= 0.02 * alike.moved
    assert alike.moved > 5e-3


@pytest.mark.parametrize("case", map(marked, CASES))
def test_twenty_steps_of_decoders_match_peft(
    case: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    model = make(case, tmp_path / "base")
    projections = sum(
        # A router may be a linear layer too, of a class of its own.
        type(module).__name__ in ("Linear", "FalconLinear")
        and not name.endswith(("shared_expert_gate", ".gate", ".router"))
        and ".indexer." not in name
        and ".router." not in name  # Granite's and Trinity's, which `targets` leaves out
        and not (case in CLOSED and name.endswith("out_proj"))
        for name, module in layers(model).named_modules()
    )
    targets = CLOSED.get(case, EVERY)
    if "dsa" in case:  # an expression would also match a projection of GLM 5's indexer, in PEFT alone
        targets = (r".*[abo]_proj(_with_mqa)?", r".*(gate|up|down)_proj")
    # A router and experts are parameters. PEFT cannot adapt the router of these: its scores are corrected.
    corrected = case.startswith(("deepseek_v3", "glm"))
    if hasattr(model.config.get_text_config(), "num_experts") and not corrected:
        routers = () if case in ("afmoe", "lfm2_moe") else ("router",)
        targets = (*EVERY, "experts", *routers)
        mixtures = sum(any(hasattr(one, "experts") for one in layer.children()) for layer in layers(model))
        projections += (2 + len(routers)) * mixtures
    alike = twenty_steps(tmp_path / "base", model, AXES, tmp_path / "run", targets=targets)
    record_property("losses", alike.losses / alike.of_loss)
    print(f"\n{case}: {alike}")
    assert alike.adapted == projections
    assert alike.losses <= LIMIT * alike.of_loss
    assert alike.gradients <= 1e-4
    assert alike.parameters <= 0.02 * alike.moved, "Adam makes much of the noise of gradients that are small"
    assert alike.moved > 5e-3
