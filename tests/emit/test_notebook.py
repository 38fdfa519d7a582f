"""Tests of notebook.ipynb: nbformat's schema, and each command by its program's own parser."""

from __future__ import annotations

import argparse
import ast
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from huggingface_hub.cli.hf import app as hf
from pip._internal.commands import create_command

from recipec.compiler.artifacts.artifact import NOTEBOOK, has_notebook
from recipec.compiler.emitters.emit import emit
from recipec.compiler.pack import pack
from recipec.runtime.merging import merge
from recipec.runtime.training import train
from tests.docs.shell import recipe as recipe_problems
from tests.emit.emitting import program_of

RECIPE = """
recipe: 1
name: sample
model: {id: Qwen/Qwen3-4B, revision: 0123abc}
mesh: {accelerator: v6e-1, axes: {fsdp: 1, tp: 1}}
lora: {rank: 16}
data: {train: ["hf://owner/name"]}
train: {steps: 100, global_batch_size: 8, log: {wandb_project: sample}}
"""
SHAPES: dict[str, list[str]] = {
    "colab": [],
    "colab-v5e": [
        "mesh.accelerator=v5e-1",
        "model.id=meta-llama/Llama-3.2-1B-Instruct",
        "checkpoint.directory='a run'",
    ],
    "kaggle": ["mesh={accelerator: v5e-8, axes: {fsdp: 8, tp: 1}}", "lora=null", "model.id=Qwen/Qwen3-0.6B"],
    "here": ["mesh={accelerator: cpu-8, axes: {fsdp: 4, tp: 2}}", "model={id: recipec/tiny-gemma4}"],
}
SHELL = {"cp", "mkdir", "tar"}


@pytest.fixture(params=SHAPES)
def notebook(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return made(tmp_path, SHAPES[request.param])


def made(folder: Path, sets: Sequence[str]) -> Any:
    """Return a recipe's notebook, read by nbformat."""
    program = replace(program_of(folder, sets, RECIPE), notebook=True)
    return nbformat.reads(emit(program)[NOTEBOOK].decode(), as_version=nbformat.NO_CONVERT)


def commands(notebook: Any) -> Iterator[list[str]]:
    """Yield the words of each call of run, without its time limit."""
    for cell in notebook.cells:
        for node in ast.walk(ast.parse(cell.source if cell.cell_type == "code" else "")):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "run":
                words = shlex.split(_text(node.args[0]))
                yield words[3:] if words[0] == "timeout" else words


def _text(node: ast.expr) -> str:
    """Return a string literal, with FOUND for inserted values."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "FOUND" for part in node.values)
    return str(ast.literal_eval(node))


def accept(words: Sequence[str]) -> None:
    """Parse a command with its program's own parser, which exits if it refuses."""
    program, rest = words[0], list(words[1:])
    if program == "venv/bin/hf":
        context = hf.make_context("hf", rest)
        _, command, rest = hf.resolve_command(context, [*context._protected_args, *context.args])
        command.make_context("download", rest, parent=context)
    elif rest[:2] == ["-m", "pip"]:
        assert rest[2:5] == ["--python", "venv/bin/python", "install"]
        create_command("install").parse_args(rest[5:])
    elif rest[:2] == ["-m", "venv"]:
        assert rest[2:] == ["--without-pip", "venv"]
    elif program == "venv/bin/python":
        script = {"sample/train.py": train, "sample/merge.py": merge}[rest[0]]
        script.parse_arguments(Path("sample"), rest[1:])
    else:
        assert program in SHELL, words


def test_notebook_is_valid_and_its_commands_parse(notebook: Any) -> None:
    nbformat.validate(notebook)
    found = [*commands(notebook)]
    for words in found:
        accept(words)
    called = [Path(word).name for words in found for word in words[:2]]
    assert called.count("train.py") == called.count("merge.py") == 1
    assert ("hf" in called) == ("recipec/tiny-gemma4" not in notebook.cells[0].source)
    for line in notebook.cells[0].source.split("`"):
        if line.startswith("recipe "):
            assert not [*recipe_problems(line.split()[1:])]


def test_notebook_writes_and_reads_checkpoints_in_persistent_folder(notebook: Any) -> None:
    """Check that checkpoints are written to and read from one folder, outside of the session's disk."""
    found = {Path(words[1]).name: words for words in commands(notebook) if words[0] == "venv/bin/python"}
    output = found["train.py"][found["train.py"].index("--output") + 1]
    assert "--resume" in found["train.py"]
    read = found["merge.py"][found["merge.py"].index("--checkpoint") + 1]
    assert Path(read).parent == Path(output)
    kept = [words[-1] for words in commands(notebook) if words[:2] == ["cp", "--recursive"]]
    assert kept[-1] == output
    assert output.startswith(("/content/drive/MyDrive/", "/kaggle/working/", "kept/"))


@pytest.mark.parametrize("shape", ["colab", "kaggle"])
def test_secrets_come_from_the_platform(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(Exception):
        pass

    def secret(name: str) -> str:
        if name == "WANDB_API_KEY":
            raise Missing(f"no {name}.")
        return f"of {shape}"

    class Client:
        def get_secret(self, label: str) -> str:
            return secret(label)

    userdata = {"get": secret, "SecretNotFoundError": Missing, "NotebookAccessError": Missing}
    for name, values in {
        "google.colab": {"userdata": argparse.Namespace(**userdata)},
        "kaggle_secrets": {"UserSecretsClient": Client, "BackendError": Missing},
    }.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    environ: dict[str, str] = {}
    (cell,) = (cell for cell in made(tmp_path, SHAPES[shape]).cells if cell.id == "secrets")
    exec(cell.source, {"os": argparse.Namespace(environ=environ)})
    assert environ == {"HF_TOKEN": f"of {shape}"}


def test_rebuild_keeps_the_notebook_until_no_notebook_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from recipec.compiler.cli.main import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "sample.yaml").write_text(RECIPE)

    def build(*options: str) -> bool:
        done = CliRunner().invoke(app, ["build", "sample.yaml", *options], catch_exceptions=False)
        assert done.exit_code == 0, done.stderr
        assert (tmp_path / "generated/sample" / NOTEBOOK).exists() == has_notebook(Path("generated/sample"))
        return has_notebook(Path("generated/sample"))

    assert not build()
    assert build("--notebook") and build() and build("--check")
    pack("sample", Path("generated"), Path("sample.yaml"))
    assert not build("--no-notebook")


def test_notebook_is_the_same_from_any_folder(tmp_path: Path) -> None:
    texts = {json.dumps(made(tmp_path / name, [])) for name in ("one", "two")}
    assert len(texts) == 1


def test_kaggle_notebook_restores_checkpoints_of_the_last_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the test's end restores both
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    there, work = tmp_path / "kaggle", tmp_path / "work"
    for path in ("input/archive/sample/train.py", "input/last/sample-run/checkpoints/3/state"):
        (there / path).parent.mkdir(parents=True)
        (there / path).write_text(path)
    (there / "working" / "sample-run").mkdir(parents=True)
    work.mkdir()
    cells = {cell.id: cell.source for cell in made(tmp_path / "made", SHAPES["kaggle"]).cells}
    artifact = cells["artifact"].replace('"/tmp"', repr(str(work))).replace("/kaggle", str(there))
    values: dict[str, Any] = {}
    exec(cells["run"], values)
    exec(artifact, values)
    assert (work / "sample" / "train.py").read_text() == "input/archive/sample/train.py"
    assert (there / "working" / "sample-run" / "checkpoints" / "3" / "state").is_file()
    with pytest.raises(RuntimeError, match="ended with 2"):
        values["run"]("ls none")
