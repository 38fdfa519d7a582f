"""Tests of QLoRA by train.py and by the other backends: the same codes and the same run, in float32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.lowering import pins
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.parity.backend_runs import SCRIPTS
from recipec.compiler.parity.compare import TOLERANCES, WORDS, ComparedRun, compare, read_trace
from recipec.runtime.training.trace import Trace
from tests.parity.parity_cases import CASES
from tests.parity.running import Case, Place, merged_tensors

pytestmark = pytest.mark.nightly

LIMITS = TOLERANCES["float32"] | {"trained": 1e-5}
ODD = {"hidden_size": 80, "intermediate_size": 112, "head_dim": 24}
"""Sizes that are no multiples of nf4's blocks of 64."""
TORCHAX: dict[str, tuple[str, str, dict[str, int]]] = {
    "nf4, tp 2, a mean of means": ("gemma3", "nf4", {}),
    "nf4, odd sizes, fsdp 2, packed": ("qwen3", "nf4", ODD),
    "int8, padded": ("llama", "int8", {}),
}


def quantized(name: str, kind: str, sizes: dict[str, int], **data: Any) -> Case:
    """Return a parity case in float32 with a quantized base."""
    case = CASES[name]
    recipe = {
        **case.recipe,
        "model": {"id": "./model", "dtype": "float32", "quantization": kind},
        "data": {**case.recipe["data"], **data},
    }
    return replace(case, recipe=recipe, sizes=sizes)


def check(place: Place, traces: dict[Backend, Trace]) -> None:
    """Compare step 0's gradients, 20 losses, and the trained and merged weights, within parity's limits."""
    runs = []
    for backend, trace in traces.items():
        if backend is not Backend.TUNIX:
            place.merge(backend.value, "--import-adapter", place.folder / backend.value / "adapter")
        runs.append(ComparedRun(backend.value, trace, merged_tensors(place.merge(backend.value))))
    rows = compare(runs, LIMITS)
    for row in rows:
        print(f"\n{row.quantity} differ by {row.difference} of {row.largest:.3g}: {row.note}")
    assert [row for row in rows if not row.ok] == []
    assert {row.quantity for row in rows} == set(WORDS)


@pytest.mark.parametrize("name", TORCHAX)
def test_torchax_qlora_run_matches_train_py(name: str, tmp_path: Path) -> None:
    backends = (Backend.TUNIX, Backend.TORCHAX)
    place = Place(tmp_path, quantized(*TORCHAX[name]), backends)
    check(place, {backend: place.train(backend, backend.value) for backend in backends})


def test_trl_bitsandbytes_nf4_run_matches_train_py(tmp_path: Path) -> None:
    """Run TRL on a CPU, with an evaluation before the first step and between steps."""
    place = Place(tmp_path, quantized("llama", "nf4", {}, eval=["train.jsonl"]), (Backend.TUNIX, Backend.TRL))
    traces = {Backend.TUNIX: place.train(Backend.TUNIX, "tunix"), Backend.TRL: by_bitsandbytes(place)}
    check(place, traces)
    ours, theirs = (evaluations(tmp_path / name) for name in ("tunix", "trl"))
    assert len(ours) > 1 and ours == pytest.approx(theirs, abs=1e-4)


def by_bitsandbytes(place: Place) -> Trace:
    """Run train_trl.py with the bitsandbytes of its requirements, and return the trace."""
    packages = place.folder / "packages"
    version = pins.trl(place.program).direct["bitsandbytes"]
    install = ["pip", "install", "--no-deps", "--target", str(packages), f"bitsandbytes=={version}"]
    subprocess.run([sys.executable, "-m", *install], check=True)
    trace = place.folder / "trl.npz"
    script = [str(place.artifact / SCRIPTS[Backend.TRL]), "--model", str(place.folder / "model")]
    places = ["--data-dir", place.folder, "--output", place.folder / "trl", "--trace", trace]
    done = subprocess.run(
        [sys.executable, *script, *map(str, places)],
        env={**os.environ, "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read_trace(trace)


def evaluations(output: Path) -> list[float]:
    (file,) = output.rglob("metrics.jsonl")
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [line["eval_loss"] for line in lines if "eval_loss" in line]
