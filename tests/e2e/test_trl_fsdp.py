"""Tests of baseline/ on two processes, sharded by its accelerate.yaml, against one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipec.compiler.artifacts.artifact import write
from recipec.compiler.emitters.emit import emit
from recipec.compiler.lower import lower
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.parity.compare import ComparedRun, compare, read_trace
from recipec.runtime.training.trace import Trace
from recipec.spec.load import load
from tests.parity.running import Case, Place

pytestmark = pytest.mark.nightly

HERE = Path(__file__).parent
OBJECTIVES: dict[str, dict[str, Any]] = {
    "sft": {},
    "dpo": {"objective": "dpo", "label_smoothing": 0.1},
    "sft with pictures": {},
    "dpo of all weights": {"objective": "dpo", "optimizer": {"learning_rate": 1e-4, "max_grad_norm": 1.0}},
}


def case(objective: str) -> Case:
    """Hold out 5 of 48 pairs, so that evaluation fills up its last batch."""
    data: dict[str, Any] = {"format": "preference", "loss_on": "completion", "max_length": 64}
    lora: dict[str, Any] = {"rank": 4, "dropout": 0.0}
    if objective.startswith("sft"):
        data = {"packing": True, "max_length": 64}
    if pictures := "pictures" in objective:  # a row without pictures, on one of the processes
        data |= {"packing": False, "max_length": 128, "images": {}}
        lora |= {"vision": True, "targets": ["q_proj", "v_proj", "fc1", "out_proj"]}
    return Case(
        "google/gemma-3-4b-it" if pictures else "google/gemma-3-1b-it",
        ["sliding_attention"] * 5 + ["full_attention"],
        {
            # A micro-batch has as many rows as on the accelerators below.
            "mesh": {"accelerator": "cpu-4", "axes": {"fsdp": 4, "tp": 1}},
            "lora": None if "all weights" in objective else lora,
            "data": {"train": ["train.jsonl"], "eval_fraction": 0.1, **data},
            "train": {
                "steps": 6,
                "global_batch_size": 4,
                "micro_batch_size": 1,
                "eval_every": 3,
                "optimizer": {"learning_rate": 0.01, "max_grad_norm": 1.0},
                "log": {"every": 2, "tensorboard": False},
                **OBJECTIVES[objective],
            },
        },
    )


def environment(yaml: Path) -> dict[str, str]:
    """Return the variables that `accelerate launch` sets from its configuration, on CPUs."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    arguments = launch_command_parser().parse_args(["--config_file", str(yaml), "train_trl.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    given = prepare_multi_gpu_env(arguments)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FSDP", "ACCELERATE"))}
    told = {name: value for name, value in given.items() if name.startswith(("FSDP", "ACCELERATE"))}
    return kept | told | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def sharded(place: Place, artifact: Path, output: str, *options: str) -> Trace:
    """Run an artifact's train_trl.py on two processes, and return its trace."""
    trace = place.folder / f"{output}.npz"
    command = [
        *(Path(sys.executable).parent / "torchrun", "--standalone", "--nproc_per_node", 2),
        *(HERE / "cpu_fsdp.py", artifact / "baseline" / "train_trl.py"),
        *("--model", place.folder / "model", "--data-dir", place.folder),
        *("--output", place.folder / output, "--trace", trace, *options),
    ]
    done = subprocess.run(
        list(map(str, command)),
        env=environment(artifact / "baseline" / "accelerate.yaml"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done: steps=") == 1
    return read_trace(trace)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_trl_fsdp_on_two_processes_matches_one_process(objective: str, tmp_path: Path) -> None:
    """Compare losses to 1e-5 and gradients to 1e-6, and a run resumed from its shards bit for bit."""
    place = Place(tmp_path, case(objective), (Backend.TUNIX, Backend.TRL))
    one = place.train(Backend.TRL, "one")
    lowered = lower(load(tmp_path / "recipe.yaml", ["mesh={accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}"]))
    assert lowered.program is not None
    write(tmp_path / "sharded", {"tiny": emit(lowered.program, (Backend.TRL,))})
    artifact = tmp_path / "sharded" / "tiny"
    two = sharded(place, artifact, "two")
    assert two.about["devices"] == 2
    np.testing.assert_allclose(two.losses, one.losses, atol=1e-5)
    assert two.targets == one.targets
    for name, gradient in one.gradients.items():
        np.testing.assert_allclose(two.gradients[name], gradient, atol=1e-6, err_msg=name)
    assert_same_metrics(*(place.folder / output for output in ("one", "two")))
    cut = sharded(place, artifact, "cut", "--steps", "3")
    rest = sharded(place, artifact, "cut", "--resume")
    assert rest.losses == two.losses[3:]
    for name, array in two.trained.items():
        assert np.array_equal(rest.trained[name], array), name
        if "lora" in name:
            assert np.array_equal(two.initial[name], one.initial[name]), name
            assert np.array_equal(rest.initial[name], cut.trained[name]), name
    kept = {row.quantity: row for row in compare([ComparedRun("one", one), ComparedRun("two", two)], {})}
    assert kept["rows"].ok, "the processes' rows are together those of one"
    np.testing.assert_equal(rest.rows, two.rows[3:])


def assert_same_metrics(one: Path, two: Path) -> None:
    """Compare the logs, including evaluations and rewards, except for times and memory."""
    left, right = (
        [json.loads(line) for line in (output / "checkpoints-trl" / "metrics.jsonl").read_text().splitlines()]
        for output in (one, two)
    )
    assert [entry["step"] for entry in left if "eval_loss" in entry] == [0, 3, 6]
    timed = {"tokens_per_second", "step_seconds", "peak_memory_bytes"}
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - timed - {"rewards_accuracy"}:
            assert b[name] == pytest.approx(a[name], abs=1e-4), (name, a["step"])
