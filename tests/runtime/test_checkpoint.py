"""Tests of how checkpoints are opened: their layouts, and errors of broken ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from recipec.runtime.settings import ModelSettings
from recipec.runtime.weights.checkpoint import INDEX, HFCheckpoint
from recipec.runtime.weights.headers import ITEM_BYTES
from recipec.runtime.weights.locate import locate_model
from recipec.runtime.weights.safetensors_files import DTYPES, write_arrays
from tests import tiny
from tests.refusals import message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a Gemma 4 in the multimodal layout, in several files."""
    target = tmp_path_factory.mktemp("gemma4")
    tiny.make_gemma4(target, shards=3, num_hidden_layers=2, hidden_size=32, intermediate_size=32)
    return target


def open_and_verify(directory: Path) -> HFCheckpoint:
    base = HFCheckpoint.open(directory)
    base.verify()
    return base


def rewrite(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Rewrite a safetensors file with other arrays."""
    arrays = load_file(path)
    change(arrays)
    with path.open("wb") as file:
        write_arrays(file, arrays.items(), {"format": "pt"})


def test_tensors_and_metadata_match_the_safetensors_library(folder: Path) -> None:
    base = open_and_verify(folder)
    assert base.prefix == "model.language_model."
    assert base.index == INDEX and len(base.files) > 1
    assert base.side_files == ("config.json", "generation_config.json")
    assert base.unused() == []
    seen = 0
    for file in base.files:
        with safe_open(folder / file, "numpy") as reference:
            assert base.headers[file].metadata == reference.metadata()
            for name in reference.keys():  # noqa: SIM118
                np.testing.assert_array_equal(base.read(name), reference.get_tensor(name))
                seen += 1
    assert seen == len(base.tensors)


def test_text_only_bfloat16_checkpoint_in_one_file_is_read(tmp_path: Path) -> None:
    tiny.make_gemma3(tmp_path, num_hidden_layers=1)
    before = HFCheckpoint.open(tmp_path).read("model.norm.weight").copy()

    def cast(arrays: dict[str, np.ndarray]) -> None:
        arrays.update({name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()})
        arrays["model.layers.0.extra"] = np.zeros(3, np.float32)

    rewrite(tmp_path / "model.safetensors", cast)
    base = open_and_verify(tmp_path)
    assert (base.family.name, base.prefix, base.files) == ("gemma3", "model.", ("model.safetensors",))
    assert base.index is None and base.unused() == ["model.layers.0.extra"]
    np.testing.assert_array_equal(base.read("model.norm.weight"), before.astype(ml_dtypes.bfloat16))


def test_folder_without_a_supported_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "no such folder" in message(lambda: HFCheckpoint.open(tmp_path / "none"))
    (tmp_path / "config.json").write_text('{"model_type": 2}')
    assert "model_type is 2; known are " in message(lambda: HFCheckpoint.open(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert "neither model.safetensors nor" in message(lambda: HFCheckpoint.open(tmp_path))
    shutil.rmtree(tmp_path)
    tiny.make_gemma3(tmp_path, num_hidden_layers=1)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert f"no {INDEX}" in message(lambda: HFCheckpoint.open(tmp_path))
    (tmp_path / "weights.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "another format" in message(lambda: HFCheckpoint.open(tmp_path))
    with (tmp_path / "model.safetensors").open("wb") as file:
        write_arrays(file, [("x", np.zeros(2, np.float32))], {})
    assert "no text embedding" in message(lambda: HFCheckpoint.open(tmp_path))


def test_locate_model_uses_a_folder_and_reports_a_failed_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelSettings(id="google/gemma-3-1b-it", family="gemma3")
    assert locate_model(model, tmp_path) == tmp_path
    assert "no such folder" in message(lambda: locate_model(model, tmp_path / "none"))
    assert locate_model(ModelSettings(id=str(tmp_path), family="gemma3")) == tmp_path
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    text = message(lambda: locate_model(model))
    assert "google/gemma-3-1b-it" in text and "could not be downloaded" in text


def test_dtype_item_sizes_match_numpy() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES
