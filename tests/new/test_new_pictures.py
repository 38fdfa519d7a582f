"""Tests of `recipe new` with pictures in the data."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli.main import app
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lower import lower
from recipec.compiler.miniature.small_recipe import pictured_row
from recipec.spec.load import load

INLINE = pictured_row([{"content": ""}] * 2, "chat", 1)["images"][0]
PNG = base64.b64decode(INLINE.partition(",")[2])
ASKED = {"role": "user", "content": "What?"}
ANSWER = {"role": "assistant", "content": "Red."}
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "parts and a column": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
                ANSWER,
            ],
            "images": [INLINE],
        },
        "chat",
    ),
    "a column of paths": (
        {"messages": [{"role": "user", "content": "What?"}, ANSWER], "image": "a.png"},
        "chat",
    ),
    "turns of prompt and completion": (
        {"prompt": [ASKED], "completion": [ANSWER], "image": "a.png"},
        "prompt_completion",
    ),
    "question and answer": (
        {"image": {"bytes": None, "path": "a.png"}, "question": "What?", "answer": "Red."},
        "instruction",
    ),
}


def new(folder: Path, model: str = "Qwen/Qwen2.5-VL-3B-Instruct", data: str = "rows.jsonl") -> Any:
    arguments = ["--model", model, "--accelerator", "v5e-8", "--data", str(folder / data), "-o", str(folder)]
    return CliRunner().invoke(app, ["new", "example", *arguments])


def write(folder: Path, row: dict[str, Any]) -> None:
    (folder / "a.png").write_bytes(PNG)
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 3, "utf-8")


@pytest.mark.parametrize("name", ROWS)
def test_data_with_pictures_gets_data_images(name: str, tmp_path: Path) -> None:
    row, format = ROWS[name]
    write(tmp_path, row)
    done = new(tmp_path)
    assert done.exit_code == 0, done.output
    lowered = lower(load(tmp_path / "example.yaml"))
    assert lowered.program is not None, lowered.diagnostics
    data = lowered.program.recipe.data
    assert data.images is not None and data.format == format
    assert not [item for item in lowered.diagnostics if item.code.startswith(("W04", "E04"))]
    assert data.max_length < 2_048, "the picture's bytes are no text"


def test_a_folder_with_metadata_is_read(tmp_path: Path) -> None:
    write(tmp_path, {})
    (tmp_path / "metadata.csv").write_text("file_name,question,answer\na.png,What?,Red.\n")
    (tmp_path / "rows.jsonl").unlink()
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("a.png", "metadata.csv"):
        (tmp_path / name).rename(folder / name)
    assert new(tmp_path, data="set").exit_code == 0
    text = (tmp_path / "example.yaml").read_text("utf-8")
    assert "fields: {instruction: question, output: answer}" in text and "images: {}" in text


def test_pictures_without_a_question_are_refused_with_a_transform(tmp_path: Path) -> None:
    write(tmp_path, {"image": INLINE, "text": "x^2"})
    done = new(tmp_path)
    assert isinstance(done.exception, ArtifactError)
    assert "has the columns image and text" in str(done.exception)
    added = 'return {"instruction": "...", "output": row["text"], "images": row["image"]}'
    assert added in str(done.exception.help)


def test_a_model_without_a_tower_is_refused_and_other_values_are_no_pictures(tmp_path: Path) -> None:
    write(tmp_path, ROWS["a column of paths"][0])
    done = new(tmp_path, model="Qwen/Qwen3-0.6B")
    assert "has no vision tower in this version" in str(done.exception)
    write(tmp_path, {"messages": [ASKED, ANSWER], "image": "python:3.13"})
    assert "would not see: column image in 3" in str(new(tmp_path).exception)
