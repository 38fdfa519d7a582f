"""Tests of the errors of train.py and merge.py for a broken checkpoint: one message, exit status 1."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from recipec.runtime.merging import merge
from recipec.runtime.model.adapters import LoraSettings
from recipec.runtime.settings import (
    CheckpointSettings,
    DataSettings,
    MeshSettings,
    ModelSettings,
    TrainSettings,
)
from recipec.runtime.training.train import parse_arguments, run
from tests.runtime import artifacts

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TEXT = "model.language_model."
AGAIN = "copy or download the checkpoint again"
ONE = "config.json and the weights must be of one checkpoint"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 5\n"
PAGE = b"<!DOCTYPE html>\n<html><body>Access denied</body></html>\n"


def cut(name: str, keep: int) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def put(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content)


def edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    """Return a function that changes a JSON file."""

    def apply(folder: Path) -> None:
        fields = json.loads((folder / name).read_text())
        change(fields)
        (folder / name).write_text(json.dumps(fields))

    return apply


def configure(**values: Any) -> Callable[[Path], Any]:
    """Return a function that sets keys of the text model in config.json."""
    return edit("config.json", lambda config: config["text_config"].update(values))


def rewrite(name: str, change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[Path], Any]:
    """Return a function that changes the arrays of a safetensors file."""

    def apply(folder: Path) -> None:
        arrays = {key: array.copy() for key, array in load_file(folder / name).items()}
        change(arrays)
        save_file(arrays, folder / name, {"format": "pt"})

    return apply


def recast(arrays: dict[str, np.ndarray]) -> None:
    name = f"{TEXT}layers.0.self_attn.q_proj.weight"
    arrays[name] = arrays[name].astype(np.int8)


def misplace(index: dict[str, Any]) -> None:
    index["weight_map"][f"{TEXT}norm.weight"] = FIRST


def more_tokens(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["vocab"] |= {f"more-{i}": 512 + i for i in range(3)}


BROKEN: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "header cut off": (
        cut(FIRST, 1000),
        f"MODEL/{FIRST}: truncated within its header (1000 of 1920 bytes)",
        AGAIN,
    ),
    "empty file": (cut(FIRST, 0), f"MODEL/{FIRST}: is an empty file", AGAIN),
    "git lfs pointer": (
        put(FIRST, POINTER),
        f"MODEL/{FIRST}: is a Git LFS pointer instead of the file",
        "run `git lfs pull` in that folder",
    ),
    "web page": (
        put(FIRST, PAGE),
        f"MODEL/{FIRST}: is a web page or an error of the server that it came from",
        "download it again; a gated model needs HF_TOKEN",
    ),
    "missing file": (
        lambda folder: (folder / SECOND).unlink(),
        f"MODEL: {SECOND} missing; {INDEX} names 2 files",
        AGAIN,
    ),
    "index cut off": (
        cut(INDEX, 100),
        f"MODEL/{INDEX}: not JSON (Unterminated string starting at: line 6 column 5 (char 70))",
        AGAIN,
    ),
    "index names a tensor that is nowhere": (
        edit(INDEX, lambda index: index["weight_map"].update({f"{TEXT}more": FIRST})),
        f"MODEL/{INDEX}: names {TEXT}more, which {FIRST} does not hold",
        AGAIN,
    ),
    "index names another file": (
        edit(INDEX, misplace),
        f"MODEL/{INDEX}: names {TEXT}norm.weight in {FIRST}; it is in {SECOND}",
        AGAIN,
    ),
    "tensor in two files": (
        rewrite(FIRST, lambda arrays: arrays.update({f"{TEXT}norm.weight": np.zeros(64, np.float32)})),
        f"MODEL: {TEXT}norm.weight is in both {FIRST} and {SECOND}",
        AGAIN,
    ),
    "no config.json": (
        lambda folder: (folder / "config.json").unlink(),
        "MODEL: no config.json",
        "--model takes a folder of config.json and safetensors",
    ),
    "another hidden size": (
        configure(hidden_size=96),
        f"MODEL/{FIRST}: {TEXT}embed_tokens.weight has shape [512, 64], expected [512, 96] from config.json",
        ONE,
    ),
    "more layers than config.json": (
        rewrite(SECOND, lambda arrays: arrays.update({f"{TEXT}layers.2.more": np.zeros(2, np.float32)})),
        f"MODEL/{SECOND}: {TEXT}layers.2.more is of layer 2, "
        "and config.json has num_hidden_layers 2, which ends at layer 1",
        ONE,
    ),
    "integers for weights": (
        rewrite(FIRST, recast),
        f"MODEL/{FIRST}: {TEXT}layers.0.self_attn.q_proj.weight has type I8, which is not a float type",
        "quantized checkpoints cannot be trained or merged; use the original one",
    ),
}

TOKENIZERS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "tokenizer cut off": (
        cut("tokenizer.json", 500),
        "the tokenizer of MODEL cannot be loaded: Unterminated string starting at: "
        "line 27 column 7 (char 490)",
        "tokenizer.json and tokenizer_config.json must be in the model's folder; model.tokenizer names "
        "another tokenizer",
    ),
    "tokenizer with more tokens than embeddings": (
        edit("tokenizer.json", more_tokens),
        "the tokenizer of MODEL has token ids up to 514, and the model has 512 embeddings",
        "use the model's own tokenizer: leave model.tokenizer out; or model.vocab_size adds rows",
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of both kinds of layers, in two files. Nothing is trained."""
    place = tmp_path_factory.mktemp("bad")
    artifacts.write_place(place)
    return place


def said(place: Path, tmp_path: Path, change: Callable[[Path], Any], script: str, capsys: Any) -> str:
    """Run a script on a changed copy of the model, and return its error with MODEL for the folder."""
    model = tmp_path / "model"
    shutil.copytree(place / "model", model)
    change(model)
    output = tmp_path / "output"
    artifact = place / "artifact"
    options = ["--model", str(model), "--output", str(output)]
    settings = ModelSettings(id="recipec/tiny-gemma4", family="gemma4")
    if script == "merge":
        status = merge.main(
            artifact,
            settings,
            checkpoint="checkpoints",
            output="merged",
            dtype="bfloat16",
            adapter=True,
            argv=options,
        )
    else:
        status = train(artifact, [*options, "--data-dir", str(place)], settings)
    assert status == 1
    assert not output.exists(), "something was written"
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.replace(str(model), "MODEL")


def train(artifact: Path, options: list[str], settings: ModelSettings) -> int:
    return run(
        artifact,
        parse_arguments(artifact, options),
        model=settings,
        mesh=MeshSettings("cpu", 8, {"fsdp": 8, "tp": 1}),
        lora=LoraSettings(rank=2, alpha=4.0, targets=("q_proj",), dropout=0.0),
        data=DataSettings(train=("train.jsonl",), max_length=48, packing=False),
        train=TrainSettings(epochs=1, global_batch_size=8, micro_batch_size=1),
        checkpoint=CheckpointSettings(directory="checkpoints"),
        learning_rate=lambda steps: lambda step: 0.1,
        optimizer=lambda schedule: None,  # type: ignore[arg-type,return-value]
    )


def expected(message: str, help: str) -> str:
    return f"error: {message}\n" + (f"  = help: {help}\n" if help else "")


@pytest.mark.parametrize(
    ("script", "kind"),
    [*(("train", kind) for kind in BROKEN), ("merge", "web page"), ("merge", "missing file")],
)
def test_broken_checkpoint_gives_one_sentence_error(
    place: Path, tmp_path: Path, capsys: Any, script: str, kind: str
) -> None:
    change, message, help = BROKEN[kind]
    assert said(place, tmp_path, change, script, capsys) == expected(message, help)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_broken_tokenizer_gives_one_sentence_error(
    place: Path, tmp_path: Path, capsys: Any, kind: str
) -> None:
    change, message, help = TOKENIZERS[kind]
    assert said(place, tmp_path, change, "train", capsys) == expected(message, help)
