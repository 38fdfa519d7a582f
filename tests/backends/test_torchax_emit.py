"""Tests of what `--backend torchax` adds to an artifact, and of what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipec.compiler.emitters.refused import check_torchax as check
from recipec.compiler.emitters.torchax import emit_torchax
from recipec.compiler.emitters.train import emit_train
from tests.emit.emitting import program_of, tool


def test_torchax_refuses_trained_embedding_rows(tmp_path: Path) -> None:
    (found,) = check(program_of(tmp_path, ["lora.train_tokens=[5]"]))
    assert (found.code, found.path) == ("E0943", "lora.train_tokens") and found.help


def test_supported_recipe_has_no_torchax_findings(tmp_path: Path) -> None:
    assert list(check(program_of(tmp_path))) == []


def test_torchax_script_differs_from_train_py_only_in_backend_lines(tmp_path: Path) -> None:
    """Check equal values, schedule and optimizer: only the backend differs."""
    program = program_of(tmp_path, ["train.schedule.warmup_ratio=0.03"])
    files = emit_torchax(program)
    ours, theirs = (set(text.splitlines()) for text in (files["train_torchax.py"], emit_train(program)))
    assert ours - theirs == {
        '"""LoRA fine-tuning of google/gemma-4-31B-it on v5p-8, by transformers\' model under torchax.',
        "from runtime.backends.arguments import parse_arguments",
        "from runtime.backends.torchax.train import run",
        '    arguments = parse_arguments("train_torchax.py", ARTIFACT)',
        '    sys.exit(f"{error}: pip install -r requirements-torchax.txt")',
    }


@pytest.mark.parametrize("sets", [(), ("train.optimizer.name=sgd", "lora=null")])
def test_torchax_script_passes_ruff(sets: tuple[str, ...], tmp_path: Path, root: Path) -> None:
    files = emit_torchax(program_of(tmp_path, sets))
    script = tmp_path / "train_torchax.py"
    script.write_text(files["train_torchax.py"], encoding="utf-8")
    config = ("--config", root / "pyproject.toml")
    assert tool("ruff", "format", "--check", *config, script) == ""
    assert tool("ruff", "check", *config, script) == ""


def test_the_requirements_are_pinned_exactly(tmp_path: Path) -> None:
    """Pin a development version of torchax, because no stable version supports this torch."""
    lines = emit_torchax(program_of(tmp_path))["requirements-torchax.txt"].splitlines()
    for line in ("torchax==0.0.14.dev20261026", "torch==2.13.0", "peft==0.21.2", "jax[tpu]==0.10.2"):
        assert line in lines
    assert all("==" in line for line in lines if line and not line.startswith("#"))
