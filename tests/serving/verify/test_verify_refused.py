"""Tests of what `recipe serve verify` cannot compare, and of its errors as a command: one sentence each."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli import serve as cli_serve
from recipec.compiler.serving import verify_reference
from recipec.runtime import memory
from recipec.runtime.errors import UserError
from tests.serving.fake_vllm import Start
from tests.serving.verify.verifying import Computed, check


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return f"{caught.value.message} | {caught.value.help}"


def test_ambiguous_or_missing_model_name_is_refused(checkpoint: Path, fake: Start) -> None:
    server = fake(["a", "b"])
    assert f"{server.url} serves a, b: which of them is meant? | --name NAME" in refusal(
        lambda: check(server, checkpoint)
    )
    assert f"{server.url} serves a, b, and not mine" in refusal(
        lambda: check(server, checkpoint, name="mine")
    )


def test_server_without_token_ids_is_refused(checkpoint: Path, fake: Start) -> None:
    server = fake(["m"])
    answer = {"choices": [{"text": "x", "logprobs": None, "token_ids": None}]}
    server.faults.shape["/v1/completions"] = answer
    assert "returns no token ids" in refusal(lambda: check(server, checkpoint))


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_missing_package_error_gives_the_install_command(
    missing: str, checkpoint: Path, fake: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def without(name: str, *rest: Any) -> Any:
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    monkeypatch.setattr(verify_reference.importlib, "import_module", without)
    said = refusal(lambda: check(fake(["m"]), checkpoint))
    assert said.startswith(
        f"verifying compares with transformers, and {missing} is not installed | pip install"
    )


def test_model_larger_than_memory_is_refused_before_loading(
    checkpoint: Path, fake: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 4000000 kB\nMemAvailable:  1000000 kB\n")
    monkeypatch.setattr(memory, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(verify_reference, "count_numbers", lambda folder: 31_000_000_000)
    server = fake(["m"])
    said = refusal(lambda: check(server, checkpoint))
    assert (
        f"{checkpoint} has 31.00 billion numbers, which take 131.7 GB in float32, and this machine has"
        in said
    )
    assert "1.0 GB available" in said and "--dtype bfloat16 takes 66.6 GB" in said
    assert not server.bodies("/v1/completions")


FOLDERS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("nowhere", lambda folder: None, "nowhere is not there | run merge.py, or name the merged folder"),
    ("empty", lambda folder: folder.mkdir(), "empty is not a checkpoint: it has no config.json"),
    (
        "odd",
        lambda folder: (folder.mkdir(), (folder / "config.json").write_text("{")),
        "config.json is not JSON: Expecting property name enclosed in double quotes: line 1 column 2",
    ),
    (
        "light",
        lambda folder: (folder.mkdir(), (folder / "config.json").write_text("{}")),
        "light holds no weights: no .safetensors file",
    ),
    (
        "damaged",
        lambda folder: (
            folder.mkdir(),
            (folder / "config.json").write_text("{}"),
            (folder / "model.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0{]"),
        ),
        "model.safetensors is damaged: its header cannot be read",
    ),
]


@pytest.mark.parametrize(("name", "make", "wanted"), FOLDERS)
def test_invalid_checkpoint_folders_give_one_sentence_errors(
    name: str, make: Callable[[Path], Any], wanted: str, fake: Start, tmp_path: Path
) -> None:
    make(tmp_path / name)
    assert wanted in refusal(lambda: check(fake(["m"]), tmp_path / name))


def test_unknown_architecture_gives_one_sentence_error(fake: Start, checkpoint: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(checkpoint, odd)
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**config, "architectures": ["Gemma9"]}))
    said = refusal(lambda: check(fake(["m"], language=Computed(checkpoint)), odd))
    assert said.startswith(f"transformers does not load {odd}: ")


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(cli_serve.app, ["verify", *map(str, arguments)])


def test_verify_command_prints_comparison_and_verdict(fake: Start, checkpoint: Path) -> None:
    server = fake(["m"], language=Computed(checkpoint))
    common = (server.url, "--model", checkpoint, "--tokens", 2, "--server-dtype", "float32")
    done = invoke(*common)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["prompt", "kind", "tokens"] and "same answer" in lines[0]
    assert lines[-1] == "verdict: the same model"
    assert json.loads(invoke(*common, "--json").stdout)["problems"] == []
    other = fake(["m"], language=Computed(checkpoint, rank=1))
    failed = invoke(other.url, *common[1:])
    assert failed.exit_code == 1
    assert failed.stdout.splitlines()[-1] == "verdict: the endpoint is not this checkpoint"


def test_verify_command_errors_are_one_sentence(fake: Start, checkpoint: Path, tmp_path: Path) -> None:
    assert invoke("http://127.0.0.1:1").exit_code == 2
    done = invoke("not an address", "--model", checkpoint)
    assert done.exit_code == 1 and done.stderr.startswith(
        "error: 'not an address' is not the address of a server\n"
    )
    done = invoke("http://127.0.0.1:1", "--artifact", tmp_path / "nowhere")
    assert done.exit_code == 1
    assert done.stderr.startswith(f"error: there is no artifact {tmp_path / 'nowhere'}\n  = help: ")
