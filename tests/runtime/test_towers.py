"""Vision towers, and models with them, against transformers' own, in float32, on pictures of unlike sizes."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file

from recipec.runtime.model.families import UnsupportedCheckpoint, family_of
from recipec.runtime.model.vision import parts
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests.runtime import towers, training

pytestmark = pytest.mark.usefixtures("highest")

LIMIT = 1e-5
"""Relative to the largest value: float32 noise. The logits of transformers are computed in float64, because
its chunks of Qwen 3.5's delta rule alone are 1.3e-5 from that in float32."""

AXES = {"fsdp": 2, "tp": 2}
OFTEN = ("gemma4", "mistral3", "qwen3_vl")
"""Cases of `make test`: one of each way to place patches and to merge them. The others differ less."""


@pytest.mark.parametrize(
    "case", [case if case in OFTEN else pytest.param(case, marks=pytest.mark.e2e) for case in towers.CASES]
)
def test_features_and_logits_equal_transformers(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = towers.reference(case)
    model.save_pretrained(tmp_path)
    mesh, built = training.build(tmp_path, AXES, images=True, full=True, remat="none")
    vision = built.forward.architecture.vision
    pictures = towers.Pictures.of(vision)
    one = towers.tokens_of(pictures)

    named = {source.name for parameter in vision.parameters() for source in parameter.sources}
    tensors = HFCheckpoint.open(tmp_path).tensors
    of_tower = {name for name in tensors if name.removeprefix("model.").startswith(towers.PARTS)}
    assert {name for name in of_tower - named if not re.search(towers.UNUSED.get(case, "$^"), name)} == set()

    graph, state = nnx.split(built.model)
    with mesh:
        arrays = pictures.arrays().values()

        def features() -> np.ndarray:
            compute = jax.jit(lambda state, *given: nnx.merge(graph, state).vision(*given))
            return np.asarray(compute(state, *arrays))

        by_scores = features()
        monkeypatch.setattr(parts, "on_tpu", lambda mesh: True)  # the TPU's kernel, interpreted
        by_kernel = features()
        monkeypatch.undo()
        assert vision.layers is None or not np.array_equal(by_scores, by_kernel)
    for r, row in enumerate(pictures.rows):
        start = 0
        for i in row:
            with torch.no_grad():
                wanted = pictures.features(model, i)
            for out in (by_scores, by_kernel):
                got = out[:, r, start : start + wanted.shape[1]]
                assert got.shape == wanted.shape == (1 + len(vision.deepstack), pictures.counts()[i], 36)
                assert np.abs(got - wanted).max() <= LIMIT * np.abs(wanted).max()
            start += wanted.shape[1]

    expected = []
    precise = copy.deepcopy(model).double()
    for r, row in enumerate(pictures.rows):
        real = one["segment_ids"][r] > 0
        tokens = torch.tensor(one["tokens"][r, real][None]).long()
        kinds = torch.tensor((one["image_ids"][r, real][None] > 0).astype(np.int64))
        given = pictures.arguments(model, row)
        given["pixel_values"] = given["pixel_values"].double()
        if case.startswith(towers.TURNED):
            at, _ = model.model.get_rope_index(tokens, kinds, given["image_grid_thw"])
            one.setdefault("rotary_positions", np.zeros((*one["tokens"].shape, 3), np.int32))
            one["rotary_positions"][r, real] = at[:, 0].T
        if case.startswith(("gemma4", *towers.TURNED)):
            given["mm_token_type_ids"] = kinds
        if case == "gemma3":
            given["token_type_ids"] = kinds
        with torch.no_grad():
            expected.append(precise(input_ids=tokens, **given).logits[0].numpy())
    found = training.logits(built, mesh, one)
    blind = training.logits(built, mesh, {**one, "patches": np.zeros_like(one["patches"])})
    for r, wanted in enumerate(expected):
        got = found[r, : len(wanted)]
        assert np.abs(got - wanted).max() <= LIMIT * np.abs(wanted).max()
        assert np.abs(blind[r, : len(wanted)] - wanted).max() > 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize("size", [24, 36, 18])
def test_experts_of_qwen3_vl_are_read_as_the_hub_and_as_transformers_store_them(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5 saves the weights of all experts transposed. One of an expert's may be square."""
    further = {**towers.FURTHER["qwen3_vl_moe"], "moe_intermediate_size": size}
    monkeypatch.setitem(towers.FURTHER, "qwen3_vl_moe", further)
    model, _ = towers.reference("qwen3_vl_moe")
    model.save_pretrained(tmp_path)
    saved = experts(HFCheckpoint.open(tmp_path))
    file = tmp_path / "model.safetensors"
    tensors = {
        name: np.ascontiguousarray(tensor.swapaxes(1, 2)) if ".experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    published = experts(HFCheckpoint.open(tmp_path))
    assert saved.keys() == published.keys() and len(saved) == 4
    for path, value in saved.items():
        np.testing.assert_array_equal(published[path], value)


def experts(base: HFCheckpoint) -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint's experts, by their paths."""
    base.verify()
    found = {}
    for parameter in base.family.parameters(base.architecture):
        if ".experts." in parameter.path:
            (source,) = parameter.sources
            rows = base.read_rows(source, 0, source.reshape[0])
            found[parameter.path] = rows.transpose(source.transpose).copy()
    return found


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gemma3", {"vision_config": {"model_type": "clip_vision_model"}}, "known is 'siglip_vision_model'"),
        ("gemma3", {"vision_config": {"num_attention_heads": 5}}, "48, which 5 heads do not divide"),
        ("gemma3", {"mm_tokens_per_image": 8}, "6 x 6 patches, which do not average to a square"),
        ("gemma4", {"vision_config": {"head_dim": 18}}, "4 must divide the features"),
        ("gemma4", {"vision_config": {"standardize": 1}}, "standardize is 1, not true or false"),
        ("gemma4", {"vision_config": {"hidden_activation": "selu"}}, "is 'selu'; known are silu"),
        ("gemma4_unified", {"vision_config": {"output_proj_dims": 41}}, "supports only 40"),
        ("mistral3", {"vision_feature_layer": [-2, -5]}, "Pixtral supports only -1"),
        ("mistral3", {"vision_config": {"rope_parameters": {"rope_type": "linear"}}}, "only 'default'"),
        ("qwen2_5_vl", {"text_config": {"rope_parameters": {}}}, "has no mrope_section"),
        ("qwen2_5_vl", {"vision_config": {"window_size": 7}}, "smaller than 2 patches of 4 pixels"),
        ("qwen2_5_vl", {"vision_config": {"out_hidden_size": 48}}, "the language model has 36 features"),
        ("qwen3_vl", {"vision_config": {"num_position_embeddings": 50}}, "50, which is not a square"),
        ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [3]}}, "names no layers of 3"),
        ("llama4", {"vision_config": {"intermediate_size": 200}}, "supports only 192"),
        ("llama4", {"vision_config": {"pixel_shuffle_ratio": 0.4}}, "which do not fit each other"),
    ],
)
def test_unknown_towers_are_refused_by_their_key(case: str, changes: dict[str, Any], message: str) -> None:
    config = towers.config_of(case).to_dict()
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    with pytest.raises(UnsupportedCheckpoint, match=re.escape(message)):
        family_of(config).vision(config)


def test_checkpoint_without_a_known_tower_has_none() -> None:
    config = towers.config_of("mistral3").to_dict()
    assert family_of(config).vision({**config, "vision_config": None}) is None
    llava = {**config, "model_type": "llava", "vision_config": {"model_type": "siglip_vision_model"}}
    assert family_of(llava).vision(llava) is None
