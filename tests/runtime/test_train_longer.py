"""Tests of runs that continue with more steps, or with a new schedule (train.continue_from)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.checkpoints.new_length import Longer, check_length
from recipec.runtime.checkpoints.record import check_record, renew_record, write_record
from recipec.runtime.errors import UserError
from tests.runtime.artifacts import assert_equal, entries, error_of, saved, steps, train, write_artifact
from tests.runtime.lives import Lives


@pytest.mark.e2e
def test_longer_run_at_a_constant_rate_equals_an_uninterrupted_one(place: Path, lives: Lives) -> None:
    for name, length in (("short", 4), ("long", 9)):  # 7 steps an epoch
        write_artifact(place / name, shape="constant", steps=length, every=100)
    assert train(lives, place, "at-once", artifact="long").status == 0
    assert train(lives, place, "twice", artifact="short").status == 0
    before = (place / "twice/checkpoints/recipe.lock.json").read_bytes()
    told = train(lives, place, "twice", "--resume", "--steps", "6", artifact="short")
    assert told.status == 0 and "note: the recipe's run ends at step 4; to train longer, raise" in told.stderr
    again = train(lives, place, "twice", "--resume", artifact="long")
    assert again.status == 0, again.stderr
    assert "note: the run ends at step 9; it was to end at step 4" in again.stderr
    assert "continuing after step 4 of 9" in again.stderr
    assert_equal(place, "at-once", "twice", 9)
    folder = place / "twice" / "checkpoints"
    found = entries(folder)
    # Its first part also evaluated at its own end, which is step 4 in both.
    assert found == entries(place / "at-once" / "checkpoints")
    assert (folder / "recipe.lock.json").read_bytes() == (place / "long/recipe.lock.json").read_bytes()
    assert (folder / "recipe.lock.until-4.json").read_bytes() == before
    back = train(lives, place, "twice", "--resume", artifact="short")
    assert back.status == 1
    assert error_of(back, place, "twice")[0] == (
        "error: the newest checkpoint in DIRECTORY is of step 9, and the recipe's run ends at 4"
    )


@pytest.mark.e2e
def test_new_schedule_begins_after_the_step_and_keeps_the_optimizer(place: Path, lives: Lives) -> None:
    write_artifact(place / "first", shape="cosine", steps=4, every=100)
    write_artifact(place / "more", shape="cosine", steps=8, every=100)
    write_artifact(place / "renewed", shape="cosine", rate=5e-3, steps=8, every=100, continue_from=4)
    fresh = train(lives, place, "renewed", artifact="renewed")
    (message, _) = error_of(fresh, place, "renewed")
    assert message.endswith("begins a new schedule after step 4, and in DIRECTORY there is no checkpoint")
    assert train(lives, place, "renewed", artifact="first").status == 0
    refused = train(lives, place, "renewed", "--resume", artifact="more")
    assert refused.status == 1
    message, help = error_of(refused, place, "renewed")
    assert "train.steps was 4, now 8; a cosine schedule ends with the run" in message
    assert "train: {continue_from: 4} in the recipe begins a new schedule after that step" in help
    # Interrupted between its own checkpoints.
    part = train(lives, place, "renewed", "--resume", "--steps", "6", artifact="renewed")
    assert part.status == 0, part.stderr
    assert "note: a new schedule begins after step 4, and ends at step 8" in part.stderr
    rest = train(lives, place, "renewed", "--resume", artifact="renewed")
    assert rest.status == 0 and "continuing after step 6 of 8" in rest.stderr
    folder = place / "renewed" / "checkpoints"
    rates = {entry["step"]: entry["learning_rate"] for entry in entries(folder) if "learning_rate" in entry}
    cosine = [(1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    expected = [1e-2 * share for share in cosine] + [5e-3 * share for share in cosine]
    assert rates == pytest.approx(dict(enumerate(expected, 1)), rel=1e-6)
    # Adam's count of steps continues.
    counts = [
        int(array) for path, array in saved(place, "renewed", 8, "optimizer_state").items() if "count" in path
    ]
    assert counts and set(counts) == {8}
    assert steps(folder) == [6, 8]


def lock(folder: Path, packages: Any = (), **changes: Any) -> Path:
    """Write an artifact's record, with these keys of `train`."""
    folder.mkdir(parents=True, exist_ok=True)
    section = {
        "steps": 10,
        "epochs": None,
        "continue_from": None,
        "optimizer": {"learning_rate": 1e-3, "b1": 0.9},
    }
    section |= {"schedule": {"name": "constant", "warmup_steps": None, "warmup_ratio": None}, **changes}
    record = {"recipe": {"train": section}, "model": {}, "packages": dict(packages), "runtime": "sha256:0"}
    (folder / "recipe.lock.json").write_text(json.dumps(record))
    return folder


COSINE = {"name": "cosine", "warmup_steps": None, "warmup_ratio": 0.03}


@pytest.mark.parametrize(
    ("began", "now", "message"),
    [
        ({}, {"steps": 20}, None),
        ({}, {"steps": None, "epochs": 2}, None),
        ({"schedule": COSINE}, {"schedule": COSINE, "steps": 20}, r"steps was 10, now 20; a cosine schedule"),
        ({"schedule": COSINE}, {"schedule": COSINE, "steps": 20, "continue_from": 10}, None),
        ({"schedule": COSINE}, {"steps": 20, "continue_from": 10}, None),
        ({"schedule": COSINE}, {"steps": 20}, r"schedule.name was .*; these keys set the learning rates"),
        ({}, {"optimizer": {"learning_rate": 2e-3, "b1": 0.9}}, r"learning_rate was .*; these keys set"),
        ({}, {"optimizer": {"learning_rate": 2e-3, "b1": 0.9}, "continue_from": 10, "steps": 20}, None),
        (
            {},
            {"optimizer": {"learning_rate": 1e-3, "b1": 0.8}, "continue_from": 10},
            "another artifact: .*b1 was",
        ),
        ({}, {"steps": 20, "seed": 1}, r"another artifact: .*seed was null, now 1"),
        ({}, {"steps": 20, "packages": {"jax": "1"}}, r"another artifact: .*packages.jax was null"),
        ({"continue_from": 10}, {}, r"continue_from was 10, now null"),
    ],
)
def test_record_allows_only_another_length_or_a_new_schedule(
    tmp_path: Path, began: dict[str, Any], now: dict[str, Any], message: str | None
) -> None:
    run = tmp_path / "run"
    write_record(run, lock(tmp_path / "first", **began))
    then = lock(tmp_path / "then", **now)
    if message is None:
        longer = check_record(run, then, 10)
        assert isinstance(longer, Longer) and longer.ended(None) == 10
        renew_record(run, then, 10)
        assert check_record(run, then, 10) is None
        return
    with pytest.raises(UserError, match=message) as refused:
        check_record(run, then, 10)
    assert ("continue_from: 10" in str(refused.value.help)) == ("another artifact" not in message)


def test_help_without_a_checkpoint_names_no_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_record(run, lock(tmp_path / "first", schedule=COSINE))
    with pytest.raises(UserError, match=r"and no checkpoint: train\.steps was 10, now 20") as refused:
        check_record(run, lock(tmp_path / "then", schedule=COSINE, steps=20), None)
    assert str(refused.value.help).startswith("start without --resume")


def ratio(share: float | None = None, count: int | None = None) -> dict[str, Any]:
    return {"schedule": {"name": "constant", "warmup_ratio": share, "warmup_steps": count}}


@pytest.mark.parametrize(
    ("now", "began", "given", "said"),
    [
        (
            (7, 20, 10),
            {},
            {"continue_from": 10},
            "after step 10, and in RUN the newest checkpoint is of step 7",
        ),
        (
            (12, 20, 10),
            {},
            {"continue_from": 10},
            "after step 10, and in RUN the newest checkpoint is of step 12",
        ),
        ((10, 20, 10), {}, {"continue_from": 10}, None),
        ((10, 5, None), {}, {"steps": 5}, "is of step 10, and the recipe's run ends at 5"),
        ((10, 20, None), ratio(0.1), ratio(0.1), "a warm-up of 1 steps, and this recipe's has 2"),
        ((10, 20, None), ratio(0.1), ratio(count=1), None),
        ((10, 20, None), ratio(count=3), ratio(count=3), None),
    ],
)
def test_length_and_schedule_must_fit_the_checkpoint(
    now: tuple[int, int, int | None], began: dict[str, Any], given: dict[str, Any], said: str | None
) -> None:
    step, total, first = now
    longer = Longer({"steps": 10, **began}, {"steps": total, **given})
    if said is None:
        assert check_length("RUN", step, total, None, first, longer)
        return
    with pytest.raises(UserError, match=said):
        check_length("RUN", step, total, None, first, longer)


def test_length_of_epochs_is_counted_in_the_data() -> None:
    longer = Longer({"epochs": 1}, {"epochs": 3})
    said = check_length("RUN", 7, 21, 7, None, longer)
    assert said == "the run ends at step 21; it was to end at step 7"
