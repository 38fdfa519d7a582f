"""Fuzz tests of recipes: valid, nearly valid and broken. See tests/robustness/fuzzing.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "robustness"))

from fuzzing import fuzz_language

pytestmark = pytest.mark.nightly


def test_fuzzed_recipes_give_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = fuzz_language(2000, tmp_path, monkeypatch)
    assert sum(outcomes.values()) >= 2000 and len(outcomes) > 50
