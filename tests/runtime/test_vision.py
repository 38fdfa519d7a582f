"""Pictures in the model against transformers: features, logits and training steps."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from recipec.runtime.model.layers import Config
from recipec.runtime.model.loading import variables_of
from recipec.runtime.model.vision import Tower, parts
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import vision_checkpoints
from tests.runtime import pictured, references, towers, training
from tests.runtime.built_models import randomize

pytestmark = pytest.mark.usefixtures("highest")

LIMIT = 1e-5
"""Relative to the largest feature: the float32 noise of either library."""


def tower_of(folder: Path) -> Any:
    """Return the tower of a checkpoint with its arrays in float32."""
    base = HFCheckpoint.open(folder)
    architecture = base.family.seeing(base.architecture, base.config, base.tensors)
    assert architecture is not None
    module = Tower(Config(architecture, jnp.float32))
    variables = variables_of(module)
    for parameter in architecture.vision.frozen():
        (source,) = parameter.sources
        value = base.read_rows(source, 0, source.reshape[0]).transpose(source.transpose)
        variables.pop(parameter.path.removeprefix("vision.")).set_value(jnp.asarray(value))
    assert not variables
    return module


def test_gemma3_features_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = vision_checkpoints.make_gemma3(tmp_path / "base")
    pixels = np.random.default_rng(0).standard_normal((4, 3, 24, 24)).astype(np.float32)
    with torch.no_grad():
        expected = model.get_image_features(torch.tensor(pixels)).pooler_output.numpy()
    patches = pictured.patches_of(pixels).reshape(2, 72, 48)
    placed = np.ones((2, 72), np.int32), np.zeros((2, 72, 2), np.int32)
    module = tower_of(tmp_path / "base")
    whole = module(patches, *placed)
    monkeypatch.setattr(parts, "SCORES_BYTES", 20_000)
    in_pieces = module(patches, *placed)
    for features in (whole, in_pieces):
        difference = np.abs(np.asarray(features[0]).reshape(expected.shape) - expected).max()
        assert difference <= LIMIT * np.abs(expected).max()


AXES = {"fsdp": 4, "tp": 2}
CASES = [
    *(pytest.param(case, marks=pytest.mark.e2e) for case in ("gemma3", "qwen3_vl")),
    *(
        pytest.param(case, marks=pytest.mark.nightly)
        for case in (
            *("gemma4", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5"),
            *("llava-clip", "paddleocr_vl"),
        )
    ),
]
"""The models of the twenty steps. Qwen 3 VL has most of what the others have: positions by time, row and
column, features added within the language model, and pictures of any size."""


def test_logits_of_rows_with_pictures_equal_transformers_alone_and_packed(tmp_path: Path) -> None:
    """Compare rows of one sample with transformers, and the same samples packed with themselves alone."""
    model = vision_checkpoints.make_gemma3(tmp_path)
    mesh, built = training.build(tmp_path, AXES, remat="none", images=True)
    randomize(built)
    for adapter in built.adapters:
        _add(model, adapter, training.adapters(built))
    one = pictured.batch()
    with torch.no_grad():
        expected = references.reference_logits(model, one).numpy()
    found = training.logits(built, mesh, one)
    real = one["segment_ids"] > 0
    size = np.abs(expected[real]).max()
    assert np.abs(found - expected)[real].max() <= LIMIT * size
    blind = training.logits(built, mesh, {**one, "patches": np.zeros_like(one["patches"])})
    assert np.abs(blind - expected)[real].max() > 0.1 * size, "pictures change the logits"

    random = np.random.default_rng(1)
    samples = [
        (*pictured.row(random, count, 26), pictured.pictures(random, count)) for count in (1, 0, 2, 1) * 4
    ]
    pairs = [samples[i : i + 2] for i in range(0, 16, 2)]
    packed = training.logits(built, mesh, pictured.filled(pairs, 52, 3))
    for half in (0, 1):
        alone = training.logits(built, mesh, pictured.filled([[pair[half]] for pair in pairs], 52, 3))
        part = packed[:, 26 * half : 26 * (half + 1)]
        assert np.abs(part - alone[:, :26]).max() <= LIMIT * size


def _add(model: Any, adapter: Any, arrays: dict[str, np.ndarray]) -> None:
    """Add an adapter's delta to the weight of transformers' model."""
    a, b = adapter.to_peft(*(arrays[path] for path, *_ in adapter.arrays))
    module = model.model.language_model.get_submodule(adapter.name)
    with torch.no_grad():
        module.weight.add_(torch.tensor(adapter.scale * b @ a))


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_with_pictures_match_peft(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = towers.reference(case)
    model.save_pretrained(tmp_path / "base")
    architecture = HFCheckpoint.open(tmp_path / "base").seeing().architecture
    batch = towers.batches(architecture.vision, bool(architecture.turned_axes))
    monkeypatch.setattr(training, "batch", batch)
    alike = references.twenty_steps(tmp_path / "base", model, AXES, tmp_path / "run", images=True, clip=0.1)
    print(f"\n{case}: {alike}")
    assert alike.losses <= LIMIT * alike.of_loss
    # One rounding of the weights changes this Gemma 4's gradients 20 times as much as those of the others.
    assert alike.gradients <= (5e-4 if case == "gemma4" else 1e-4)
    assert alike.parameters <= 0.02 * alike.moved
    assert alike.moved > 5e-3


def test_gradients_of_the_kernel_are_those_of_scores() -> None:
    """Two rows of 300 patches, which no block divides: of each, 260 in three pictures, with windows."""
    random = np.random.default_rng(0)
    q, k, v, read = (jnp.asarray(random.standard_normal((2, 300, 4, 72)), jnp.float32) for _ in range(4))
    picture = np.repeat([1, 2, 3, 0], [100, 40, 120, 40])
    of_rows = np.stack([picture, np.roll(picture[::-1], -40)])
    groups = np.stack([of_rows, np.where(of_rows > 0, np.arange(300) % 7, 0)], axis=-1).astype(np.int32)
    real = jnp.asarray(of_rows > 0)[..., None, None]
    assert groups[:, -1, 0].tolist() == [0, 0]

    def total(attend: Any, *arrays: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(real, attend(*arrays, jnp.asarray(groups), 0.125), 0) * read)

    wanted = jax.grad(functools.partial(total, parts.attend), argnums=(0, 1, 2))(q, k, v)
    kernel = functools.partial(parts.by_kernel, mesh=None)
    found = jax.grad(functools.partial(total, kernel), argnums=(0, 1, 2))(q, k, v)
    for got, other in zip(found, wanted, strict=True):
        assert jnp.abs(other).max() > 0.1
        assert jnp.abs(got - other).max() <= LIMIT * jnp.abs(other).max()
