"""The two fuzz tests for any number of cases: of the command line, and of the language."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_lines import Writes, command_lines, without_work
from examine import examine
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as profile
from inside import RECIPE, fill, recipe
from recipe_texts import Case, cases

LEFT_OUT = ("web", "huge", "long path", "zero", "full")
"""Kinds of files that take long, or that a bug could delete."""


def _profile(count: int) -> Any:
    return profile(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # failing cases are short already, and shrinking takes minutes
        suppress_health_check=list(HealthCheck),
    )


def fuzz_language(count: int, folder: Path, patch: pytest.MonkeyPatch) -> Counter[frozenset[str]]:
    """Try `count` recipes, and return how often each set of diagnostics occurred.

    Raises:
        AssertionError: an invariant does not hold for a recipe.
    """
    patch.chdir(folder)
    (folder / "train.jsonl").write_text('{"conversation": [1, 2]}\nnot json\n[]\n"x"\n')
    outcomes: Counter[frozenset[str]] = Counter()

    @_profile(count)
    @given(cases())
    def holds(case: Case) -> None:
        outcomes[examine(folder, case)] += 1

    _timed("recipes", holds, outcomes)
    return outcomes


def fuzz_commands(count: int, folder: Path, patch: pytest.MonkeyPatch) -> Counter[tuple[str, int, bool]]:
    """Try `count` command lines, and count each command's exit statuses, at its work or before.

    Raises:
        AssertionError: one ended without a sentence and 0, 1 or 2, or wrote elsewhere.
    """
    patch.chdir(folder)
    for name in ("HOME", "XDG_CACHE_HOME", "RECIPEC_CACHE", "TMPDIR"):
        (folder / name.lower()).mkdir()
        patch.setenv(name, str(folder / name.lower()))
    patch.setattr("tempfile.tempdir", str(folder / "tmpdir"))
    kinds = fill(folder)
    names = ["good.yaml"] * 8 + [name for kind, name in kinds.items() if kind not in LEFT_OUT]
    outcomes: Counter[tuple[str, int, bool]] = Counter()
    writes = Writes(folder)

    @_profile(count)
    @given(command_lines(names))
    def holds(line: list[str]) -> None:
        worked: list[str] = []
        (folder / "good.yaml").unlink(missing_ok=True)
        (folder / "good.yaml").write_text(RECIPE, encoding="utf-8")  # an earlier line may have replaced it
        writes.watching = True
        try:
            with without_work(worked):
                done = recipe(*line)
        finally:
            writes.watching = False
        assert not done.faults(), f"{line!a}: {done.faults()}: {done.err!a}"
        assert not writes.outside, f"{line!a}: {writes.outside}"
        assert os.getcwd() == str(folder)
        outcomes[line[0] if line else "", done.status, bool(worked)] += 1

    _timed("command lines", holds, outcomes)
    return outcomes


def _timed(what: str, test: Callable[[], None], outcomes: Counter[Any]) -> None:
    started = time.process_time()
    test()
    seconds = time.process_time() - started
    print(f"\n{sum(outcomes.values()):,} {what}, {len(outcomes):,} outcomes, {seconds:.0f} s")
