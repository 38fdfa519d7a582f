"""Tests of a whole train.py as users run it: finished, refused, stopped and resumed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from recipec.runtime.checkpoints.record import check_record, read_record, write_record
from recipec.runtime.errors import UserError
from tests.runtime.artifacts import STEPS, assert_equal, entries, steps, train, write_artifact
from tests.runtime.lives import Lives


@pytest.mark.parametrize("turn", ["first", "second"])
def test_no_test_sees_what_another_wrote(
    turn: str, place: Path, whole: subprocess.CompletedProcess[str]
) -> None:
    """Write under the same names in two tests, also into the shared run and its data."""
    for name in ("train.jsonl", "whole/checkpoints/metrics.jsonl"):
        assert (place / name).read_text()
        (place / name).write_text("")
    (place / "run").mkdir()


def test_run_prints_summary_and_writes_logs_and_checkpoints(
    place: Path, whole: subprocess.CompletedProcess[str]
) -> None:
    assert whole.returncode == 0, whole.stderr
    (summary,) = whole.stdout.splitlines()
    assert summary.startswith(f"done: steps={STEPS} tokens/s=")
    for part in (" loss=", " eval_loss=", " peak_memory="):
        assert part in summary
    assert "Traceback" not in whole.stderr and "Warning" not in whole.stderr
    assert "50 of 50 samples kept" in whole.stderr
    assert f"step {STEPS}/{STEPS}: loss " in whole.stderr
    folder = place / "whole" / "checkpoints"
    assert (folder / "recipe.lock.json").read_bytes() == (place / "artifact/recipe.lock.json").read_bytes()
    assert list((folder / "tensorboard").iterdir())
    assert steps(folder) == [8, 10]
    losses = [entry["loss"] for entry in entries(folder) if "loss" in entry]
    assert len(losses) == STEPS and losses[-1] < losses[0]


def test_a_finished_run_has_nothing_to_resume(
    place: Path, lives: Lives, whole: subprocess.CompletedProcess[str]
) -> None:
    found = train(lives, place, "whole", "--resume")
    assert found.status == 0, found.stderr
    assert found.stdout.startswith("done: steps=10 loss=")
    assert "eval_loss=" in found.stdout


def test_resume_with_another_recipe_is_refused(
    place: Path, lives: Lives, whole: subprocess.CompletedProcess[str]
) -> None:
    write_artifact(place / "other", rate=2e-2)
    found = train(lives, place, "whole", "--resume", artifact="other")
    assert found.status == 1
    assert "train.optimizer.learning_rate was 0.01, now 0.02; these keys set the learning" in found.stderr


def test_resume_with_changed_data_is_refused(
    place: Path, lives: Lives, whole: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    """Change one word of one row."""
    for name in ("train", "eval"):
        shutil.copy(place / f"{name}.jsonl", tmp_path)
    lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(lines[30])
    row["messages"][1]["content"] = "zero"
    lines[30] = json.dumps(row) + "\n"
    (tmp_path / "train.jsonl").write_text("".join(lines))
    found = train(lives, place, "whole", "--resume", "--data-dir", str(tmp_path))
    assert found.status == 1, found.stderr
    directory = place / "whole" / "checkpoints"
    error = found.stderr[found.stderr.index("error: ") :].splitlines()
    assert error[0].startswith(f"error: {directory}: the checkpoint of step 10 was trained on other data: ")
    assert "fingerprint was " in error[0] and ", now " in error[0]
    assert error[1] == (
        "  = help: give that run's data with --data-dir and continue, or start a new run in another --output"
    )
    assert steps(directory) == [8, 10], "nothing was touched"


def test_run_stopped_by_steps_option_resumes_to_same_result(
    place: Path, lives: Lives, whole: subprocess.CompletedProcess[str]
) -> None:
    """Compare --steps and --resume with one run, including the metrics."""
    early = train(lives, place, "stopped", "--steps", "3")
    assert early.status == 0, early.stderr
    assert "done: steps=3 " in early.stdout and "stopped after step 3 of 10" in early.stderr
    last = train(lives, place, "stopped", "--resume")
    assert last.status == 0, last.stderr
    assert "continuing after step 3 of 10" in last.stderr
    assert_equal(place, "whole", "stopped", STEPS)
    found = entries(place / "stopped" / "checkpoints")
    found.remove(next(entry for entry in found if entry["step"] == 3 and "eval_loss" in entry))
    assert found == entries(place / "whole" / "checkpoints")


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--model", "missing"], "missing: no such folder"), (["--data-dir", "missing"], "train.jsonl")],
)
def test_missing_model_or_data_gives_error_and_writes_nothing(
    place: Path, lives: Lives, options: list[str], message: str
) -> None:
    found = train(lives, place, "nothing", *options)
    assert found.status == 1
    assert found.stderr.startswith("error: ") or "\nerror: " in found.stderr
    assert message in found.stderr and "Traceback" not in found.stderr
    assert not (place / "nothing").exists()


def test_invalid_options_print_usage_and_exit_with_2(place: Path, lives: Lives) -> None:
    for options in (["--steps", "0"], ["--rank", "8"], ["--res"]):
        found = train(lives, place, "nothing", *options)
        assert found.status == 2
        assert "usage: train.py" in found.stderr


def test_record_with_older_keys_continues_with_their_places_of_today(tmp_path: Path) -> None:
    """The base's quantization was in `lora`, and is in `model`."""
    artifact = tmp_path / "artifact"
    write_artifact(artifact)
    lock = json.loads((artifact / "recipe.lock.json").read_text())
    today = {
        "model": {"id": "tiny", "quantization": "int8", "quantized_matmul": "both"},
        "lora": {"rank": 2, "modules_to_save": ["lm_head"]},
        "train": {**lock["recipe"]["train"], "trainable_modules": []},
    }
    older = {
        "model": {"id": "tiny"},
        "lora": {"rank": 2, "train_also": ["lm_head"], "quantize": "int8", "products": "both"},
        "train": {**lock["recipe"]["train"], "only": []},
    }
    (artifact / "recipe.lock.json").write_text(json.dumps(lock | {"recipe": lock["recipe"] | today}))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recipe.lock.json").write_text(json.dumps(lock | {"recipe": lock["recipe"] | older}))
    assert read_record(tmp_path / "run")["recipe"] == lock["recipe"] | today
    assert check_record(tmp_path / "run", artifact) is None
    older["lora"]["quantize"] = "fp8"
    (tmp_path / "run/recipe.lock.json").write_text(json.dumps(lock | {"recipe": lock["recipe"] | older}))
    with pytest.raises(UserError, match=r'recipe\.model\.quantization was "fp8", now "int8"'):
        check_record(tmp_path / "run", artifact)


def test_check_record_refuses_changed_recipe(tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    write_artifact(artifact)
    with pytest.raises(UserError, match="no record of the recipe"):
        read_record(tmp_path)
    with pytest.raises(UserError, match="there is no run yet") as before_training:
        read_record(tmp_path / "checkpoints")
    assert "run train.py first" in str(before_training.value.help)
    write_record(tmp_path / "run", artifact)
    check_record(tmp_path / "run", artifact)
    lock = json.loads((artifact / "recipe.lock.json").read_text())
    lock["recipe"]["train"]["log"]["every"] = 7
    lock["recipe"]["serve"] = {"port": 1}
    lock["compiler"] = "recipec 0.2.0"
    (artifact / "recipe.lock.json").write_text(json.dumps(lock))
    check_record(tmp_path / "run", artifact)
    lock["recipe"]["lora"] = {"rank": 8}
    lock["packages"] = {"jax": "1"}
    (artifact / "recipe.lock.json").write_text(json.dumps(lock))
    with pytest.raises(UserError, match=r"recipe\.lora was null, now .*packages\.jax was null"):
        check_record(tmp_path / "run", artifact)
    (tmp_path / "run" / "recipe.lock.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        check_record(tmp_path / "run", artifact)
