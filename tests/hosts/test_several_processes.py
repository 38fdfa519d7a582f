"""Training as several processes: the same numbers as one, whoever is killed or stopped in between."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

from tests.hosts.crews import DUMPED, PATIENT, begun, dumped_rows, light, losses, start
from tests.runtime.artifacts import assert_equal, steps, train, write_artifact
from tests.runtime.lives import Lives
from tests.runtime.surviving import SLOW

STEPS = 4


def test_two_processes_train_as_one(place: Path, lives: Lives) -> None:
    """Of 50 training and 10 held-out rows, in two micro-batches a step; with evaluation and dropout. Then one
    is killed, and a single process goes on, on the same mesh."""
    prelude = light({"fsdp": 2, "tp": 1}, more=DUMPED)
    write_artifact(place / "pair", prelude=prelude, steps=STEPS)
    assert train(lives, place, "one", artifact="pair").status == 0
    crew = start(lives, place, "two", 2, artifact="pair", peer=PATIENT)
    assert crew.wait() == [0, 0], crew.said()
    assert losses(place / "two" / "checkpoints") == losses(place / "one" / "checkpoints")
    assert_equal(place, "one", "two", STEPS)
    whole, parts = dumped_rows(place / "one", 1), dumped_rows(place / "two", 2)
    assert whole == parts and len(whole) > STEPS * 2 * 4
    assert "step 4/4" in crew[0].stderr
    assert crew[1].stderr == "", "what process 0 says is said once"
    assert "step 4: " in (place / "two" / "logs" / "process-1.log").read_text()


def test_one_process_goes_on_from_the_checkpoint_of_two_of_which_one_was_killed(
    place: Path, lives: Lives
) -> None:
    """The other one names it at once, and its checkpoint is one that a single process goes on from."""
    prelude = light({"fsdp": 2, "tp": 1}, more=DUMPED) + SLOW.format(seconds=2)
    write_artifact(place / "killed", prelude=prelude, steps=STEPS, every=1)
    crew = start(lives, place, "lost", 2, artifact="killed", peer=PATIENT)
    crew.until(lambda: steps(place / "lost" / "checkpoints") == [1])
    crew[1].send(signal.SIGKILL)
    moment = time.monotonic()
    assert crew.wait() == [75, -9]
    assert time.monotonic() - moment < 30
    (error,) = crew.errors()[0]
    assert error.endswith(f"pid {crew[1].pid}) is gone: it ended without a word"), error
    assert "Traceback" not in crew.said()
    state = json.loads((place / "lost" / "checkpoints" / "state.json").read_text())
    assert state["state"] == "failed" and "process 1 of 2" in state["reason"]
    assert train(lives, place, "lost", "--resume", artifact="killed").status == 0
    assert losses(place / "lost" / "checkpoints") == losses(place / "one" / "checkpoints")
    assert_equal(place, "one", "lost", STEPS)


def test_a_signal_to_one_stops_all_after_the_same_step(place: Path, lives: Lives) -> None:
    """No checkpoint is due at that step. The run goes on as two processes, to the same end."""
    prelude = light({"fsdp": 2, "tp": 1}, more=DUMPED) + SLOW.format(seconds=2)
    write_artifact(place / "told", prelude=prelude, steps=STEPS, every=100)
    crew = start(lives, place, "told-out", 2, artifact="told", peer=PATIENT)
    crew.until(lambda: begun(place, "told-out", 1))
    crew[1].send(signal.SIGTERM)
    assert crew.wait() == [143, 143], crew.said()
    assert crew.errors() == [[], []] and "Traceback" not in crew.said()
    (step,) = steps(place / "told-out" / "checkpoints")
    assert 0 < step < STEPS
    log = (place / "told-out" / "logs" / "process-0.log").read_text()
    assert f"stops after step {step}, as process 1 of 2" in log
    again = start(lives, place, "told-out", 2, "--resume", artifact="told", port=crew.port, peer=PATIENT)
    assert again.wait() == [0, 0], again.said()
    assert losses(place / "told-out" / "checkpoints") == losses(place / "one" / "checkpoints")
    assert_equal(place, "one", "told-out", STEPS)
