"""Tests of training in several processes: the same numbers as in one, also after a signal."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from recipec.compiler.miniature.small_checkpoint import write_checkpoint
from tests.hosts.processes import DUMPED, PATIENT, begun, dumped_rows, light, losses, start
from tests.runtime.artifacts import SLOW, STOPPING, assert_equal, steps, train, write_artifact
from tests.runtime.lives import Lives
from tests.runtime.reinforced import write_reinforced

STEPS = 4


@pytest.mark.e2e
def test_two_processes_stopped_and_resumed_train_like_one_process(place: Path, lives: Lives) -> None:
    """Train on 50 rows with 10 held-out rows, in two micro-batches a step, with evaluation and dropout.

    The processes stop after a step where no checkpoint is due. Resumed, they end like one process.
    """
    prelude = light({"fsdp": 2, "tp": 1}, more=DUMPED)
    write_artifact(place / "pair", prelude=prelude, steps=STEPS)
    assert train(lives, place, "one", artifact="pair").status == 0
    write_artifact(place / "told", prelude=prelude + SLOW.format(seconds=2), steps=STEPS, every=100)
    group = start(lives, place, "two", 2, artifact="told", peer=PATIENT)
    group.until(lambda: begun(place, "two", 1))
    group[1].send(signal.SIGTERM)
    assert group.wait() == [143, 143], group.said()
    assert group.errors() == [[], []] and "Traceback" not in group.said()
    (step,) = steps(place / "two" / "checkpoints")
    assert 0 < step < STEPS
    logs = [(place / "two" / "logs" / f"process-{n}.log") for n in range(2)]
    assert f"stops after step {step}, as process 1 of 2" in logs[0].read_text()
    again = start(lives, place, "two", 2, "--resume", artifact="told", port=group.port, peer=PATIENT)
    assert again.wait() == [0, 0], again.said()
    assert losses(place / "two" / "checkpoints") == losses(place / "one" / "checkpoints")
    assert_equal(place, "one", "two", STEPS)
    whole, parts = dumped_rows(place / "one", 1), dumped_rows(place / "two", 2)
    assert whole == parts and len(whole) > STEPS * 2 * 4
    assert "step 4/4" in again[0].stderr
    assert again[1].stderr == "", "what process 0 says is said once"
    assert "step 4: " in logs[1].read_text()


@pytest.mark.e2e
def test_two_processes_stop_early_after_the_same_step(place: Path, lives: Lives) -> None:
    """Let each process count the evaluation loss, which is equal on both."""
    noted = """
import os

given = Evaluating.record


def noting(self, step, losses):
    number = os.environ["JAX_PROCESS_ID"]
    path = Path(sys.argv[sys.argv.index("--output") + 1]) / f"losses-{number}.txt"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        print(step, losses["loss"], file=file)
    return given(self, step, losses)


Evaluating.record = noting
"""
    prelude = light({"fsdp": 2, "tp": 1}, more=STOPPING + noted)
    write_artifact(place / "patient", prelude=prelude, every=100, keep=1)
    group = start(lives, place, "early-two", 2, artifact="patient", peer=PATIENT)
    assert group.wait() == [0, 0], group.said()
    assert steps(place / "early-two" / "checkpoints") == [4, 8]
    assert "(early stopping after step 8: " in group[0].stdout
    mine, other = ((place / "early-two" / f"losses-{n}.txt").read_text() for n in range(2))
    assert mine == other and len(set(mine.split())) == 10


@pytest.mark.nightly
@pytest.mark.parametrize("rollout", ["", "axes={'fsdp': 1, 'tp': 2}"])
def test_two_processes_learn_from_rewards_like_one_process(rollout: str, place: Path, lives: Lives) -> None:
    """Generate on the mesh of training, and on one that splits layers over both processes."""
    more = light({"fsdp": 2, "tp": 1}, 0.0).replace("DATA =", "_ =") + COUNTED
    options = {"train": "eval_every=2", "data": "eval=('held_out.jsonl',)", "more": more}
    write_reinforced(place, "rl", grpo="iterations=2", rollout=rollout, steps=STEPS, **options)
    assert train(lives, place, "one", artifact="rl").status == 0
    group = start(lives, place, "two", 2, artifact="rl", peer=PATIENT)
    assert group.wait() == [0, 0], group.said()
    assert_equal(place, "one", "two", STEPS)
    one, two = (place / name / "checkpoints" for name in ("one", "two"))
    for name in ("completions.jsonl", "generations.jsonl"):
        assert (one / name).read_text() == (two / name).read_text()
    assert losses(one) == losses(two)
    assert (place / "two" / "scored-0").exists() and not (place / "two" / "scored-1").exists()


@pytest.mark.nightly
def test_two_processes_learn_from_own_answers_like_one_process(place: Path, lives: Lives) -> None:
    config = json.loads((place / "model" / "config.json").read_text())
    write_checkpoint(place / "teacher", config, dtype="float32", embedding_scale=0.8)
    more = light({"fsdp": 2, "tp": 1}, 0.0, more=STUDENT)
    options = {"prelude": more, "steps": STEPS, "arguments": "\n            teacher=TEACHER,"}
    write_artifact(place / "own", **options)
    teacher = ("--teacher", str(place / "teacher"))
    alone = train(lives, place, "one", *teacher, artifact="own")
    assert alone.status == 0, alone.stderr
    group = start(lives, place, "two", 2, *teacher, artifact="own", peer=PATIENT)
    assert group.wait() == [0, 0], group.said()
    assert_equal(place, "one", "two", STEPS)
    one, two = (place / name / "checkpoints" for name in ("one", "two"))
    assert (one / "completions.jsonl").read_text() == (two / "completions.jsonl").read_text()
    assert losses(one) == losses(two)


STUDENT = """
import dataclasses

from runtime.sections import Distill

TEACHER = dataclasses.replace(MODEL, id="recipec/teacher")
TRAIN = dataclasses.replace(
    TRAIN, objective="distill", distill=Distill(lmbda=0.6, max_completion_length=12, temperature=2.0)
)
"""
COUNTED = """
import os

from runtime.reinforcement.rewards import Rewards

scores = Rewards.score


def counted(self, *asked):
    output = Path(sys.argv[sys.argv.index("--output") + 1])
    (output / f"scored-{os.environ.get('JAX_PROCESS_ID', '0')}").touch()
    return scores(self, *asked)


Rewards.score = counted
"""
"""Code of an artifact whose processes say that they score completions."""
