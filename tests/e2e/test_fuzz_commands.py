"""Fuzz tests of command lines: valid, nearly valid and random. See tests/robustness/fuzzing.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "robustness"))

from fuzzing import fuzz_commands

pytestmark = pytest.mark.nightly


def test_fuzzed_command_lines_give_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = fuzz_commands(3000, tmp_path, monkeypatch)
    assert sum(outcomes.values()) >= 3000 and len(outcomes) > 50
