"""Tests of `recipe plan --backend torchax` with libtpu's own compiler, against the plan of the Tunix step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from recipec.compiler.emitters.backends import Backend
from recipec.compiler.plan.results import Compiled, Job
from tests.e2e import planned
from tests.e2e.planned import program_of

pytestmark = pytest.mark.nightly

QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
RECIPE = planned.RECIPE.replace("size: 2", "size: 4").replace("none", "save_attention")
DPO = ("train.objective=dpo", "data.format=preference", "data.loss_on=completion", "data.packing=false")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recipe, with a small model's config.json next to it."""
    return planned.small(tmp_path_factory.mktemp("small"), QWEN, RECIPE)


@pytest.fixture(scope="module", autouse=True)
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with planned.compiler(tmp_path_factory.mktemp("cache")):
        yield


@pytest.fixture(scope="module")
def steps(recipe: Path) -> dict[str, Compiled]:
    """Compile steps by name: each backend's supervised step and preference step."""
    torchax, program, preferences = Backend.TORCHAX, program_of(recipe), program_of(recipe, *DPO)
    work = {
        "torchax": (program, Job(recipe, (), tuple(range(2)), backend=torchax)),
        "tunix": (program, Job(recipe, (), tuple(range(2)))),
        "dpo": (preferences, Job(recipe, DPO, tuple(range(2)), backend=torchax)),
        "tunix dpo": (preferences, Job(recipe, DPO, tuple(range(2)))),
    }
    return planned.compiled(work)


def test_torchax_sft_step_matches_the_tunix_step(steps: dict[str, Compiled]) -> None:
    torchax, tunix = steps["torchax"], steps["tunix"]
    assert torchax.weights == pytest.approx(tunix.weights, rel=0.01)
    assert torchax.adapters == pytest.approx(tunix.adapters, rel=0.01)
    assert torchax.optimizer == pytest.approx(tunix.optimizer, rel=0.01)
    # PEFT computes its adapters, wide for so small a model, in float32.
    assert torchax.flops == pytest.approx(tunix.flops, rel=0.13)
    assert torchax.seconds == pytest.approx(tunix.seconds, rel=0.15)
    # The recipe's kernel runs its forward pass once per layer, because save_attention keeps the result.
    assert [(k.name, k.count) for k in torchax.kernels] == [(k.name, k.count) for k in tunix.kernels]
    assert sum(k.count for k in torchax.kernels) == 2 * 3
    # Both backends gather the weights equally often, and the activations, which are sharded over both axes.
    gathered = [
        {c.axes: c.count for c in one.collectives if c.kind == "all-gather"} for one in (torchax, tunix)
    ]
    assert gathered[0] == gathered[1] and set(gathered[0]) == {("fsdp",), ("tp",)}


def test_torchax_dpo_step_includes_the_reference_model(steps: dict[str, Compiled]) -> None:
    """Count two rows of each pair, and the forward pass without adapters, which has no gradients."""
    supervised, torchax, tunix = steps["torchax"], steps["dpo"], steps["tunix dpo"]
    assert torchax.batch == pytest.approx(2 * supervised.batch, rel=0.01)
    assert torchax.weights == pytest.approx(supervised.weights, rel=1e-9)
    assert torchax.flops == pytest.approx(tunix.flops, rel=0.13)
    assert torchax.seconds == pytest.approx(tunix.seconds, rel=0.15)
    assert [(k.name, k.count) for k in torchax.kernels] == [(k.name, k.count) for k in tunix.kernels]
    assert sum(k.count for k in torchax.kernels) == 2 * (3 + 1)
