"""Tests of damaged checkpoints: they are noticed, renamed, and skipped for the step before them."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.checkpoints import manifest, resuming
from recipec.runtime.checkpoints import saved_steps as step_folders
from recipec.runtime.checkpoints.record import read_record
from recipec.runtime.checkpoints.saving import kept
from recipec.runtime.checkpoints.trained_weights import load_trained
from recipec.runtime.errors import UserError
from recipec.runtime.training.session import check_directory
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests.runtime import runs
from tests.runtime.artifacts import STEPS, assert_equal, entries, error_of, steps, train
from tests.runtime.lives import Lives


def flip(path: Path, place: int) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def data_file(step: Path) -> Path:
    """Return the largest array file of a step."""
    return max((step / "model_params").rglob("d/*"), key=lambda path: path.stat().st_size)


def drop_line(step: Path) -> None:
    sums = step / "model_params" / "SHA256SUMS"
    sums.write_text("".join(sums.read_text().splitlines(keepends=True)[1:]))


def change_data_state(step: Path) -> None:
    path = step / "_CHECKPOINT_METADATA"
    path.write_text(path.read_text().replace('"rows": 80', '"rows": 88'))


def empty(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped bit": (
        lambda step: flip(data_file(step), 1000),
        "the content of model_params/FILE is not what was saved",
    ),
    "missing file": (lambda step: data_file(step).unlink(), "model_params/FILE is missing"),
    "empty folder": (empty, "its folder is empty"),
    "missing metadata": (
        lambda step: (step / "_CHECKPOINT_METADATA").unlink(),
        "_CHECKPOINT_METADATA is missing",
    ),
    "state of the data changed": (change_data_state, "_CHECKPOINT_METADATA is damaged"),
    "missing checksums": (
        lambda step: (step / "model_params" / "SHA256SUMS").unlink(),
        "model_params/SHA256SUMS is missing",
    ),
    "checksums cut off": (drop_line, "model_params/SHA256SUMS does not list _METADATA"),
    "file that nobody saved": (
        lambda step: (step / "model_params" / "d" / "more").write_text("x"),
        "model_params/SHA256SUMS does not list d/more",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_resume_skips_a_damaged_step_and_gives_the_reason(
    place: Path, whole: subprocess.CompletedProcess[str], tmp_path: Path, kind: str
) -> None:
    directory = tmp_path / "checkpoints"
    shutil.copytree(place / "whole" / "checkpoints", directory)
    assert resuming.find(str(directory)).step == 10
    file = str(data_file(directory / "10").relative_to(directory / "10" / "model_params"))
    change, reason = DAMAGE[kind]
    change(directory / "10")
    found = resuming.find(str(directory))
    assert found.step == 8 and found.data is not None and found.data["rows"] == 64
    ((step, why),) = found.damaged
    assert (step, why.replace(file, "FILE")) == (10, reason)


def test_flipped_bit_in_any_checkpoint_file_is_detected(
    place: Path, whole: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    """Flip bits that Orbax mostly restores without an error."""
    step = tmp_path / "checkpoints" / "10"
    shutil.copytree(place / "whole" / "checkpoints" / "10", step)
    choose, noticed = random.Random(1), 0
    for item in ("model_params", "optimizer_state"):
        for path in sorted((step / item).rglob("*")):
            if path.is_file() and path.name != "commit_success.txt" and path.stat().st_size:
                before = path.read_bytes()
                flip(path, choose.randrange(len(before)))
                assert resuming.examine(resuming.epath.Path(step))[0] is not None, path
                path.write_bytes(before)
                noticed += 1
    assert noticed > 15
    assert resuming.examine(resuming.epath.Path(step))[0] is None


def test_resumed_training_renames_damaged_step_and_gives_the_same_result(
    place: Path, lives: Lives, whole: subprocess.CompletedProcess[str]
) -> None:
    """A damaged step is renamed. Training continues from the step before it, with the same result."""
    folder = place / "damaged" / "checkpoints"
    shutil.copytree(place / "whole" / "checkpoints", folder)
    (folder / "corrupt-10").mkdir()
    file = data_file(folder / "10")
    flip(file, 1000)
    kept = file.read_bytes()
    life = train(lives, place, "damaged", "--resume")
    assert life.status == 0, life.stderr
    inside = file.relative_to(folder / "10")
    assert (
        f"note: the checkpoint of step 10 is damaged (the content of {inside} is not what was saved); "
        "it is now corrupt-10-2, and training continues from step 8\n"
    ) in life.stderr
    assert "continuing after step 8 of 10" in life.stderr
    assert (folder / "corrupt-10-2" / inside).read_bytes() == kept
    assert steps(folder) == [8, 10]
    assert_equal(place, "whole", "damaged", STEPS)
    assert entries(folder) == entries(place / "whole" / "checkpoints")


def test_resume_without_a_complete_step_is_refused_with_each_damage(
    place: Path, lives: Lives, whole: subprocess.CompletedProcess[str]
) -> None:
    folder = place / "ruined" / "checkpoints"
    shutil.copytree(place / "whole" / "checkpoints", folder)
    for step in (8, 10):
        empty(folder / str(step))
    life = train(lives, place, "ruined", "--resume")
    assert life.status == 1
    assert error_of(life, place, "ruined") == [
        "error: DIRECTORY: none of its checkpoints is complete: step 10: its folder is empty; "
        "step 8: its folder is empty",
        "  = help: restore one from a copy, or start again without --resume in another --output",
    ]
    assert steps(folder) == [8, 10], "nothing is renamed when nothing can be continued"
    refused = train(lives, place, "ruined")
    assert refused.status == 1
    assert "already holds checkpoints, the newest of step 10" in refused.stderr


def test_load_trained_names_the_complete_step_before_a_damaged_one(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from etils import epath

    base = HFCheckpoint.open(place / "model")
    runs.save_run(tmp_path, base, runs.lora_section(), steps=(2, 4, 6))
    for step in (2, 4, 6):
        manifest.write(epath.Path(tmp_path) / str(step) / "model_params")
    assert load_trained(tmp_path, "latest", base).step == 6
    file = data_file(tmp_path / "6")
    flip(file, 1000)
    empty(tmp_path / "4")
    with pytest.raises(UserError) as caught:
        load_trained(tmp_path, "latest", base)
    inside = file.relative_to(tmp_path / "6")
    assert str(caught.value) == (
        f"{tmp_path}: the checkpoint of step 6 is damaged (the content of {inside} is not what was saved)"
    )
    assert caught.value.help == "--step 2 is the newest complete one before it"
    assert load_trained(tmp_path, "2", base).step == 2
    empty(tmp_path / "6")
    assert load_trained(tmp_path, "latest", base).step == 2
    assert capsys.readouterr().err == "".join(
        f"note: {tmp_path}/{step} holds no checkpoint; step 2 is used\n" for step in (4, 6)
    )


def test_directory_and_record_that_cannot_be_read_give_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.lock.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"recipe.lock.json: cannot be read: 'utf-8' codec"):
        read_record(tmp_path)

    def denied(directory: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(step_folders, "_numbered", denied)
    with pytest.raises(UserError, match=r"cannot be read: Permission denied$") as caught:
        check_directory(str(tmp_path), tmp_path, resume=True)
    assert caught.value.help == "allow this process to read it"
    assert kept(str(tmp_path)) == "what was saved before is kept"
