"""A small base with exported adapters, and changes of the export."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from recipec.runtime.checkpoints.trained_weights import TrainedAdapters, load_trained
from recipec.runtime.errors import UserError
from recipec.runtime.peft.importing import import_adapter
from recipec.runtime.settings import ModelSettings
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny
from tests.runtime.runs import lora_section, save_run, write_adapter, write_lock

LIMIT = 5e-5
"""The tolerance for logits of up to 20 or 30."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

TEXT = r"model\.language_model\.layers\.\d+\."


def randomize(wrapped: Any) -> None:
    """Set a PEFT model's A and B to nonzero values."""
    torch.set_num_threads(1)  # on models this small, more threads mostly wait for each other
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def arrays_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / WEIGHTS)


def assert_same(expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> None:
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        assert array.dtype == found[name].dtype and array.shape == found[name].shape, name
        assert array.tobytes() == found[name].tobytes(), name


class Small:
    """A Gemma 3 of two layers, random adapters in our format, and their export."""

    def __init__(self, folder: Path) -> None:
        tiny.make_gemma3(folder / "base", num_hidden_layers=2)
        self.base = HFCheckpoint.open(folder / "base")
        self.section = lora_section(targets=["q_proj", "k_proj", "v_proj", "down_proj"], dropout=0.0)
        save_run(folder / "run", self.base, self.section)
        self.trained = load_trained(folder / "run", "latest", self.base)
        assert isinstance(self.trained, TrainedAdapters)
        self.adapter = folder / "adapter"
        self.export(self.trained, self.adapter)
        self.artifact = folder / "artifact"
        write_lock(self.artifact, self.base, self.section)

    def export(self, trained: TrainedAdapters, folder: Path) -> None:
        folder.mkdir()
        model = ModelSettings(id="some/gemma", family=self.base.family.name)
        write_adapter(folder, self.base, model, trained)

    def fail(self, adapter: Path | str, folder: Path, section: Mapping[str, Any] | None = None) -> str:
        """Return the message of a refused import, which must leave no files."""
        artifact = self.artifact
        if section is not None:
            artifact = folder / "artifact"
            write_lock(artifact, self.base, section)
        with pytest.raises(UserError) as caught:
            import_adapter(adapter, self.base, artifact, folder / "imported")
        assert not (folder / "imported").exists(), "nothing is left of a refused import"
        assert caught.value.help
        return f"{caught.value.message}\n{caught.value.help}".replace(str(adapter), "ADAPTER")


def write_tensors(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / WEIGHTS)


def set_config(**values: Any) -> Callable[[Path], Any]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**config, **values}))

    return apply


def rename(old: str, new: str) -> Callable[[Path], Any]:
    """Return a function that renames tensors."""
    return lambda folder: write_tensors(
        folder, {name.replace(old, new): array for name, array in arrays_of(folder).items()}
    )


BUILD = "build the recipe with {}"
