"""Vision towers against transformers: features from pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from recipec.runtime.model.layers import Config
from recipec.runtime.model.loading import variables_of
from recipec.runtime.model.vision import parts, tower
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import vision_checkpoints

LIMIT = 1e-5
"""Relative to the largest feature: the float32 noise of either library."""


def patches_of(pixels: np.ndarray, size: int) -> np.ndarray:
    """Return [N, patches, channels * size * size] of pixels [N, channels, height, width], row by row."""
    count, channels, height, width = pixels.shape
    cut = pixels.reshape(count, channels, height // size, size, width // size, size)
    return cut.transpose(0, 2, 4, 1, 3, 5).reshape(count, -1, channels * size * size)


def tower_of(folder: Path) -> Any:
    """Return the tower of a checkpoint with its arrays in float32."""
    base = HFCheckpoint.open(folder)
    architecture = base.family.seeing(base.architecture, base.config, base.tensors)
    assert architecture is not None
    module = tower(Config(architecture, jnp.float32))
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
    patches = patches_of(pixels, 4).reshape(2, 72, 48)
    module = tower_of(tmp_path / "base")
    with jax.default_matmul_precision("highest"):
        whole = module(patches, None, None)
        monkeypatch.setattr(parts, "SCORES_BYTES", 20_000)
        in_pieces = module(patches, None, None)
    for features in (whole, in_pieces):
        difference = np.abs(np.asarray(features[0]).reshape(expected.shape) - expected).max()
        assert difference <= LIMIT * np.abs(expected).max()
