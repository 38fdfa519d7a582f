"""Tests of early stopping and the best checkpoint: in whole and interrupted runs, and after their end."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import EarlyStoppingCallback, Trainer

from recipec.runtime.checkpoints.resuming import find
from recipec.runtime.checkpoints.saved_steps import choose_step
from recipec.runtime.sections import EarlyStopping
from recipec.runtime.training.early_stopping import Evaluations
from tests.runtime.artifacts import STOPPING, assert_equal, steps, train, write_artifact
from tests.runtime.lives import Lives


@pytest.mark.parametrize("min_delta", [0.0, 0.05, 0.3])
def test_early_stopping_counts_match_transformers(min_delta: float) -> None:
    """Use transformers' callback, which sees an evaluation before the Trainer compares it with the best."""
    choose = random.Random(0)
    for _ in range(50):
        patience = choose.randint(1, 4)
        callback = EarlyStoppingCallback(patience, min_delta)
        args = SimpleNamespace(
            metric_for_best_model="eval_loss", greater_is_better=False, save_strategy="steps"
        )
        state = SimpleNamespace(best_metric=None, best_global_step=None, global_step=0)
        trainer = SimpleNamespace(args=args, state=state)
        control = SimpleNamespace(should_training_stop=False)
        ours, loss = Evaluations(), 3.0
        for step in range(2, 40, 2):
            loss = math.nan if choose.random() < 0.05 else 3.0 + choose.uniform(-1, 0.5) - step / 100
            state.global_step = step
            callback.on_evaluate(args, state, control, {"eval_loss": loss})
            Trainer._determine_best_metric(trainer, {"eval_loss": loss}, None)
            ours = ours.after(step, loss, min_delta)
            assert ours.without == callback.early_stopping_patience_counter
            assert ours.step == state.best_global_step
            assert ours.best == (None if math.isinf(state.best_metric) else state.best_metric)
            assert ours.ends(EarlyStopping(patience, min_delta)) == control.should_training_stop
            if control.should_training_stop:
                break


@pytest.mark.e2e
def test_early_stopped_run_keeps_best_step_and_does_not_continue(place: Path, lives: Lives) -> None:
    """Compare with a run that --steps interrupts at an evaluation that does not count."""
    write_artifact(place / "stopping", prelude=STOPPING, every=100, keep=1)
    whole = train(lives, place, "early", artifact="stopping")
    assert whole.status == 0, whole.stderr
    why = "early stopping after step 8: no progress in 2 evaluations; eval_loss was lowest, 1.0000, at 4"
    assert whole.stdout.startswith("done: steps=8 ") and whole.stdout.endswith(f"({why})\n")
    first = train(lives, place, "early-twice", "--steps", "5", artifact="stopping")
    assert first.status == 0 and steps(place / "early-twice" / "checkpoints") == [4, 5]
    second = train(lives, place, "early-twice", "--resume", artifact="stopping")
    assert second.status == 0 and second.stdout.endswith(f"({why})\n"), second.stderr
    assert_equal(place, "early", "early-twice", 8)
    for output in ("early", "early-twice"):
        folder = place / output / "checkpoints"
        assert steps(folder) == [4, 8]
        assert choose_step(folder, "best") == 4 and choose_step(folder, "latest") == 8
        assert find(str(folder)).evaluations == {"count": 4, "best": 1.0, "step": 4, "without": 2}
        state = json.loads((folder / "state.json").read_text())
        assert (state["state"], state["reason"], state["total"]) == ("done", why, 10)
    again = train(lives, place, "early", "--resume", artifact="stopping")
    assert again.status == 0 and again.stdout.endswith(f"({why})\n")
    assert f"{why}; --resume continues from there if the recipe has more patience" in again.stderr
    assert steps(place / "early" / "checkpoints") == [4, 8]
