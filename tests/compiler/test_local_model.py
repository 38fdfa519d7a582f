"""A checkpoint's own config.json: it wins over the catalogue, and a broken one is a diagnostic."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compiler import catalog
from compiler.lower import Lowered

Lower = Callable[..., Lowered]
TINY = catalog.entries()["recipec/tiny-gemma4"]["config"]
SETS = ("model.id=./checkpoint", "mesh={accelerator: cpu-2, axes: {fsdp: 2}}", "lora.rank=8")


def write(tmp_path: Path, config: Any) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))


def changed(**values: Any) -> dict[str, Any]:
    config = copy.deepcopy(TINY)
    config["text_config"] |= values
    return config


def test_its_sizes_are_taken(lowered: Lower, tmp_path: Path) -> None:
    write(tmp_path, changed(hidden_size=128))
    program = lowered(*SETS).program
    assert program is not None
    assert program.architecture.hidden_size == 128
    assert program.model_origin == "./checkpoint/config.json"


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"hidden_size": 0}, "E0803"),
        ({"num_hidden_layers": 10**9}, "E0803"),
        ({"layer_types": 5}, "E0803"),
        ({"hidden_size_per_layer_input": "x"}, "E0803"),
        ({"num_global_key_value_heads": [1]}, "E0803"),
        ({"hidden_activation": "relu"}, "E0803"),
    ],
)
def test_what_is_not_possible_with_a_local_checkpoint_is_said(
    values: dict[str, Any], code: str, lowered: Lower, tmp_path: Path
) -> None:
    write(tmp_path, changed(**values))
    assert code in {d.code for d in lowered(*SETS).diagnostics}


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"model_type": "mistral"}', "null"])
def test_a_broken_file_is_a_diagnostic(text: str, lowered: Lower, tmp_path: Path) -> None:
    write(tmp_path, text)
    found = [d for d in lowered(*SETS).diagnostics if d.severity == "error"]
    assert [d.code[:3] for d in found] == ["E08"] and found[0].path == "model.id"


@pytest.mark.parametrize(
    "model_id", ["./absent", "~nobody-of-that-name/x", "gs://bucket/model", "owner/model"]
)
def test_what_cannot_be_read_is_a_diagnostic(model_id: str, lowered: Lower) -> None:
    found = [d for d in lowered(f"model.id={model_id}").diagnostics if d.severity == "error"]
    assert [d.code[:3] for d in found] == ["E08"] and found[0].help


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("google/gemma-4-31b-it", "google/gemma-4-31B-it"),
        ("gemma-4-31B-it", "google/gemma-4-31B-it"),
        ("google/gemma3-4b-it", "google/gemma-3-4b-it"),
    ],
)
def test_the_nearest_id_is_suggested(wrong: str, right: str, tmp_path: Path) -> None:
    with pytest.raises(catalog.UnknownModel) as caught:
        catalog.find(wrong, tmp_path)
    assert caught.value.help.startswith(f"did you mean `{right}`?")


def test_models_are_titled_by_their_size_and_directories_by_their_path() -> None:
    assert catalog.title("google/gemma-4-26B-A4B-it") == "Gemma 4 26B-A4B"
    assert catalog.title("google/gemma-3-270m") == "Gemma 3 270M"
    assert catalog.title("./checkpoint") == "./checkpoint"
