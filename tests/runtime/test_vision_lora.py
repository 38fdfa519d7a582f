"""Adapters in vision towers, and projectors trained whole, against transformers and PEFT in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recipec.runtime.checkpoints.trained_weights import TrainedAdapters
from recipec.runtime.model.adapters import LoraSettings, build_adapters
from recipec.runtime.model.selection import trained_whole
from recipec.runtime.peft.adapter import open_adapter
from recipec.runtime.peft.fitting import fitting, settings_of
from recipec.runtime.peft.importing import arrays_of
from recipec.runtime.settings import ModelSettings
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests.runtime import references, towers, training
from tests.runtime.runs import write_adapter, write_merged

pytestmark = pytest.mark.usefixtures("highest")

LIMIT = 1e-5
AXES = {"fsdp": 2, "tp": 2}
NAMES = {
    "gemma3": ("out_proj", "fc1", "fc2"),
    "qwen3_vl": ("qkv", "proj", "linear_fc1", "linear_fc2"),
}
"""The linear layers of towers and projectors that the language model does not have."""


@pytest.mark.parametrize(
    ("case", "methods", "adapted"),
    [
        pytest.param("gemma3", {"vision": True}, 14 + 12, marks=pytest.mark.e2e),
        pytest.param("qwen3_vl", {"vision": True}, 14 + 12 + 6, marks=pytest.mark.nightly),
        pytest.param("mistral3", {"modules_to_save": ["projector"]}, 14 + 6, marks=pytest.mark.e2e),
    ],
)
def test_twenty_steps_match_peft(
    case: str, methods: dict[str, object], adapted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = towers.reference(case)
    model.save_pretrained(tmp_path / "base")
    architecture = HFCheckpoint.open(tmp_path / "base").seeing().architecture
    batch = towers.batches(architecture.vision, bool(architecture.turned_axes))
    monkeypatch.setattr(training, "batch", batch)
    targets = (*training.TARGETS, *NAMES.get(case, ()))
    alike = references.twenty_steps(
        tmp_path / "base", model, AXES, tmp_path / "run", targets=targets, images=True, clip=0.05, **methods
    )
    print(f"\n{alike}")
    assert alike.adapted == adapted
    assert alike.losses <= LIMIT * alike.of_loss
    assert alike.gradients <= 1e-4
    assert alike.parameters <= 0.02 * alike.moved
    assert alike.moved > 5e-3


ALL = (*training.TARGETS, "out_proj", "fc1", "fc2", "qkv", "proj", "linear_fc1", "linear_fc2")
SETTINGS = {
    "gemma3": {"vision": True, "targets": ALL, "rank_pattern": {"fc1": 2}},
    "gemma3-projector": {"modules_to_save": ("projector",), "targets": training.TARGETS},
    "gemma4": {"vision": True, "targets": (*ALL, "embedding_projection"), "layers": (1,)},
    "mistral3": {"vision": True, "targets": ("q_proj", "linear_1"), "kind": "dora"},
    "mistral3-projector": {"vision": True, "modules_to_save": ("projector",), "targets": training.TARGETS},
    "qwen3_vl": {"vision": True, "targets": ALL, "alpha_pattern": {"linear_fc1": 3.0}},
    "qwen2_vl": {"vision": True, "targets": ("q_proj", "qkv", "fc1", "mlp.0")},
    "qwen2_5_vl": {"vision": True, "targets": ("q_proj", "proj", "mlp.2")},
    "llava-clip": {"vision": True, "targets": ("q_proj", "out_proj", "fc1", "linear_2")},
    "paddleocr_vl": {"vision": True, "targets": ("q_proj", "out_proj", "fc2", "linear_1")},
    "llama4": {"vision": True, "targets": ("q_proj", "fc1", "linear_1")},
    "qwen3_vl_moe": {"vision": True, "targets": ("q_proj", "experts", "linear_fc2")},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_merges_and_adapters_equal_those_of_peft(name: str, tmp_path: Path) -> None:
    """Write trained values as an adapter, and compare PEFT's merge of it with ours, and what is read back."""
    import peft

    model, _ = towers.reference(name.removesuffix("-projector"))
    model.save_pretrained(tmp_path / "base")
    base = HFCheckpoint.open(tmp_path / "base").seeing()
    settings = LoraSettings(rank=3, alpha=4.5, dropout=0.0, **SETTINGS[name])
    trained = drawn(base, settings)
    adapter, expected = tmp_path / "adapter", tmp_path / "expected"
    adapter.mkdir()
    write_adapter(adapter, base, ModelSettings(id="base", family=base.family.name), trained)

    write_merged(base, changes := trained.changes(base), tmp_path / "merged")
    peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(expected)
    merged, wanted = HFCheckpoint.open(tmp_path / "merged"), HFCheckpoint.open(expected)
    assert merged.tensors.keys() == wanted.tensors.keys()
    for tensor in merged.tensors:
        assert np.array_equal(merged.read(tensor), base.read(tensor)) == (tensor not in changes)
        np.testing.assert_allclose(merged.read(tensor), wanted.read(tensor), rtol=1e-5, atol=1e-5)

    opened = open_adapter(adapter)
    again = settings_of(opened, base)
    assert (again.vision, again.modules_to_save) == (settings.vision, settings.modules_to_save)
    arrays = arrays_of(fitting(opened, base, settings), base, settings)
    for one in trained.adapters:
        for (path, *_), value in zip(one.arrays, trained.arrays[one.target.weight], strict=True):
            np.testing.assert_array_equal(arrays[path], value)
    for path, value in trained.whole.items():
        np.testing.assert_array_equal(arrays[path], value)


def drawn(base: HFCheckpoint, settings: LoraSettings) -> TrainedAdapters:
    """Return random values of everything that is trained."""
    random = np.random.default_rng(0)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    adapters = tuple(build_adapters(base.family, base.architecture, settings))
    arrays = {a.target.weight: tuple(draw(shape) for _, shape, _ in a.arrays) for a in adapters}
    parameters = trained_whole(base.family.parameters(base.architecture), settings)
    whole = {parameter.path: draw(parameter.shape) for parameter in parameters}
    return TrainedAdapters(1, {}, b"", settings, adapters, arrays, parameters, whole)
