"""Tests of `recipe calibrate`: probes compared with plans, and plans that use probes.

The compiler is a fake.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.errors import ArtifactError
from recipec.compiler.plan import calibration
from tests.plan.plans import lowered
from tests.plan.test_commands import RECIPE, run

pytestmark = pytest.mark.usefixtures("full_speed", "told")

TIMES = {"micro_batch_seconds": 64.0, "peak_bytes": 2**30}


def probe(folder: Path, seconds: float, **changes: Any) -> Path:
    """Write a recipe and a probe of it."""
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    program = lowered(folder / "recipe.yaml")
    found = {
        "probe": 1,
        "date": "2026-11-26",
        "recipe": calibration.digest(program),
        "machine": {"platform": "tpu", "flags": list(calibration.flags(program))},
        "versions": {},
        "time": {"micro_batch_seconds": seconds, "peak_bytes": None},
        "problems": [],
        **changes,
    }
    (folder / "probe.json").write_text(json.dumps(found), encoding="utf-8")
    return folder / "probe.json"


def planned(folder: Path) -> tuple[float, str]:
    estimate = json.loads(run("plan", folder / "recipe.yaml", "--json").stdout)["plan"]["estimate"]
    return estimate["seconds"], estimate["interval"]["basis"]


def test_plan_uses_and_cites_the_calibrated_probe(tmp_path: Path) -> None:
    file = probe(tmp_path, 35.2)
    before, _ = planned(tmp_path)
    assert before == pytest.approx(32)  # 2 outside of the layers and 0.5 in each of the 60
    said = run("calibrate", file).stdout
    assert "1.100 times the planned" in said and "outside" not in said
    seconds, basis = planned(tmp_path)
    assert seconds == pytest.approx(35.2)
    assert "1 probe on v5p took 1.1 times the estimate" in basis and str(calibration.path()) in basis
    assert "by probes of such machines" in run("plan", tmp_path / "recipe.yaml").stdout
    assert "matrix products" not in said
    parts = {"products": 30.0, "other": 3.0, "idle": 2.2}
    said = run(
        "calibrate", probe(tmp_path, 35.2, time=TIMES | {"micro_batch_seconds": 35.2, "parts": parts})
    ).stdout
    assert "    matrix products 30,000.0 ms, planned " in said and "\n    no operation 2,200.0 ms" in said
    assert "HBM at its peak: 1.00 GiB, planned" in said
    # A new probe of the same recipe replaces the old one. It is compared with the uncalibrated plan.
    run("calibrate", probe(tmp_path, 32.0))
    assert planned(tmp_path)[0] == pytest.approx(32)


@pytest.mark.parametrize(
    ("seconds", "changes", "cause"),
    [
        (64.0, {"versions": {"jax": "0.0.1"}}, "the probe ran jax 0.0.1"),
        (64.0, {"machine": {"platform": "tpu", "flags": []}}, "other flags of libtpu"),
        (64.0, {"product": {"slow": ["device 3 takes 2.00 times as long"]}}, "device 3 takes 2.00 times"),
        (16.0, {}, "reach more than those of published runs"),
        (64.0, {}, "none that the files show"),
        (
            64.0,
            {"time": TIMES | {"parts": {"products": 32.0, "collectives": 24.0, "idle": 8.0}}},
            "exposed collectives took 24,000.0 ms, and 0 ms were planned",
        ),
    ],
)
def test_probe_outside_the_interval_gets_a_likely_cause(
    tmp_path: Path, seconds: float, changes: dict[str, Any], cause: str
) -> None:
    said = run("calibrate", probe(tmp_path, seconds, **changes)).stdout
    assert "outside the interval; a likely cause: " in said and cause in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"probe": 2}, "a probe of version 2"),
        ({"machine": {"platform": "cpu"}}, "from a cpu"),
        ({"problems": ["on a mesh it differs"]}, "on a mesh it differs"),
        ({"time": {}}, "no time of the step"),
        ({"time": TIMES | {"parts": {"products": "much"}}}, "parts of a step are not times"),
        ({"time": TIMES | {"parts": 3}}, "is not the file of a probe"),
        ({"recipe": "another"}, "of another recipe"),
    ],
)
def test_calibrate_refuses_invalid_probes(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        run("calibrate", probe(tmp_path, 32.0, **changes))
    assert not calibration.path().exists()
