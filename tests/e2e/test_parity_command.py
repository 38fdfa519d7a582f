"""Tests of `recipe parity` on a shipped recipe: each backend's script in its own process, and the table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipec.compiler.parity.compare import read_trace

pytestmark = pytest.mark.nightly


def command(root: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "recipec.compiler.cli.main", "parity", *map(str, arguments)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_parity_command_passes_for_gemma4_31b_on_three_backends(root: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    done = command(root, "recipes/gemma4-31b-v5p8.yaml", "--steps", "6", "--json", "--keep", kept)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and found["left_out"] == {}
    assert len(found["rows"]) == 3 * 7
    judged = {row["quantity"] for row in found["rows"] if row["limit"] is not None}
    assert judged == {"targets", "rows", "initial", "gradients", "losses", "merged"}
    assert {row["quantity"] for row in found["control"]} == {"gradients", "losses", "trained", "merged"}
    print(done.stderr)
    traces = [kept / "traces" / f"{name}.npz" for name in ("tunix", "trl", "torchax")]
    assert [read_trace(path).backend for path in traces] == [path.stem for path in traces]
    # The same traces, as if they came from three machines.
    again = command(root, "--compare", *traces)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "6 steps, float32" in again.stdout and again.stdout.count("trl - torchax") == 6


def test_parity_command_passes_for_full_fine_tuning_of_quickstart(root: Path) -> None:
    done = command(
        root,
        *("recipes/quickstart.yaml", "--set", "lora=null", "--set", "merge.adapter=false"),
        *("--steps", "4", "--json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    gradients = [row for row in rows if row["quantity"] == "gradients"]
    assert len(gradients) == 3 and all(row["ok"] and row["difference"] is not None for row in gradients)
