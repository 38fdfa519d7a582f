"""A language of three versions: the third is the one of today, and the steps to it are made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from spec import versions
from spec.upgrade import STEPS
from spec.upgrade.draft import Draft


def one_to_two(draft: Draft) -> None:
    """Renames, a section that went elsewhere, a key that is gone, changed defaults, another spelling."""
    draft.move("train.batch_size", "train.global_batch_size")
    draft.move("train.lr", "train.optimizer.learning_rate")
    draft.move("tokens.max_length", "data.max_length")
    draft.prune("tokens")
    draft.move("data.train[].share", "data.train[].weight")
    draft.convert("data.train[].weight", fraction)
    draft.drop("train.fused", "every step is")
    draft.pin("train.seed", 17)
    draft.pin("serve.max_num_seqs", 64, within="serve")
    if draft.value("train.scale") is not None:
        draft.refuse("train.scale", "gradients are no longer scaled", "remove it")


def two_to_three(draft: Draft) -> None:
    draft.move("data.max_length", "data.max_length_now")
    draft.move("data.max_length_now", "data.max_length")
    draft.pin("train.log.every", 25)


def fraction(share: object) -> float:
    if not isinstance(share, int):
        raise ValueError("a share is a whole number of per cent")
    return share / 100


@pytest.fixture
def three_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "VERSION", 3)
    monkeypatch.setitem(STEPS, 1, one_to_two)
    monkeypatch.setitem(STEPS, 2, two_to_three)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs `recipe` in an empty folder, in this process."""
    from compiler.cli import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    runner = CliRunner()

    def run(*arguments: str | Path) -> Result:
        return runner.invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)

    return run
