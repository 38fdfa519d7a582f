"""Vision towers, and models with them, against transformers' own, in float32, on pictures of unlike sizes."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests.runtime import towers, training

pytestmark = pytest.mark.usefixtures("highest")

LIMIT = 1e-5
"""Relative to the largest value: the float32 noise of either library."""


@pytest.mark.parametrize("case", towers.CASES)
def test_features_and_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model, config = towers.reference(case)
    model.save_pretrained(tmp_path)
    mesh, built = training.build(tmp_path, {"fsdp": 2}, images=True, full=True, remat="none")
    vision = built.forward.architecture.vision
    pictures = towers.Pictures.of(case, vision, config.to_dict())
    one = towers.tokens_of(pictures)

    named = {source.name for parameter in vision.parameters() for source in parameter.sources}
    tensors = HFCheckpoint.open(tmp_path).tensors
    assert not {name for name in tensors if name.removeprefix("model.").startswith(towers.PARTS)} - named

    graph, state = nnx.split(built.model)
    with mesh:
        arrays = pictures.arrays().values()
        out = np.asarray(
            jax.jit(lambda state, *given: nnx.merge(graph, state).vision(*given))(state, *arrays)
        )
    for r, row in enumerate(pictures.ROWS):
        start = 0
        for i in row:
            with torch.no_grad():
                wanted = pictures.features(model, i)
            got = out[:, r, start : start + wanted.shape[1]]
            assert got.shape == wanted.shape == (1 + len(vision.deepstack), pictures.counts()[i], 36)
            assert np.abs(got - wanted).max() <= LIMIT * np.abs(wanted).max()
            start += wanted.shape[1]

    expected = []
    for r, row in enumerate(pictures.ROWS):
        real = one["segment_ids"][r] > 0
        tokens = torch.tensor(one["tokens"][r, real][None]).long()
        kinds = torch.tensor((one["image_ids"][r, real][None] > 0).astype(np.int64))
        given = pictures.arguments(model, row)
        if "qwen" in case:
            at, _ = model.model.get_rope_index(tokens, kinds, given["image_grid_thw"])
            one.setdefault("rotary_positions", np.zeros((*one["tokens"].shape, 3), np.int32))
            one["rotary_positions"][r, real] = at[:, 0].T
        if case.startswith(("gemma4", "qwen")):
            given["mm_token_type_ids"] = kinds
        if case == "gemma3":
            given["token_type_ids"] = kinds
        with torch.no_grad():
            expected.append(model(input_ids=tokens, **given).logits[0].numpy())
    found = training.logits(built, mesh, one)
    blind = training.logits(built, mesh, {**one, "patches": np.zeros_like(one["patches"])})
    for r, wanted in enumerate(expected):
        got = found[r, : len(wanted)]
        assert np.abs(got - wanted).max() <= LIMIT * np.abs(wanted).max()
        assert np.abs(blind[r, : len(wanted)] - wanted).max() > 0.05 * np.abs(wanted).max()
