"""Tests of rollouts by a server: what it is asked, what it has to have, and what happens when it ends."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipec.runtime.errors import UserError
from recipec.runtime.interrupts import Interrupted
from recipec.runtime.model.decode import Generation, right_padded
from recipec.runtime.model.sampling import GREEDY, Sampling
from recipec.runtime.training.rollout_server import NEUTRAL, RolloutServer
from recipec.runtime.training.server_rollouts import ServerGenerator
from tests.runtime.artifacts import assert_equal, error_of, steps, train
from tests.runtime.lives import Lives
from tests.runtime.reinforced import write_reinforced
from tests.runtime.rollout_stand_in import StandIn
from tests.runtime.test_grpo_run import completions, metrics

ENDS = (3, 7)
MOST = 5


@dataclass
class Folder:
    """The adapters' folder, with files that only have a rank."""

    folder: Path
    rank: int = 8
    model: Any = field(default_factory=lambda: type("Model", (), {"id": "recipec/tiny-gemma4"}))

    @property
    def seen(self) -> str:
        return str(self.folder)

    def write(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        (self.folder / name).mkdir(parents=True)
        (self.folder / name / "adapter_config.json").write_text(json.dumps({"r": self.rank}))
        (self.folder / name / "adapter_model.safetensors").write_bytes(arrays["a"].tobytes())

    def remove(self, name: str) -> None:
        shutil.rmtree(self.folder / name)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*"))


class Arrays:
    """A trainer with one array, which a test changes."""

    def __init__(self) -> None:
        self.step()

    def step(self, value: float = 0.0) -> None:
        self.trained = type("State", (), {"flat_state": lambda _: [(("a",), np.float32([value]))]})()

    def current(self) -> tuple[Any, Any, Any]:
        return None, None, self.trained


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn(vocabulary=20) as stand_in:
        yield stand_in


@dataclass
class Made:
    """A generator, and what it works with."""

    generator: ServerGenerator
    arrays: Arrays
    folder: Folder
    asked: list[int]


def make(server: StandIn, place: Path, wait: float = 20.0, temperature: float = 1.0) -> Made:
    arrays, folder = Arrays(), Folder(place / "adapters")
    asked: list[int] = []
    client = RolloutServer(server.url, wait, 4, lambda: asked[0] if asked else None)
    generation = Generation(MOST, ENDS, Sampling(temperature), 12)
    made: Any = folder
    return Made(ServerGenerator(arrays, client, made, generation, True), arrays, folder, asked)


def prompts() -> dict[str, np.ndarray]:
    """Return two prompts, the first three times and the second twice."""
    tokens = np.array([[1, 2, 4]] * 3 + [[5, 0, 0]] * 2)
    return right_padded(tokens, [3, 3, 3, 1, 1])


def test_completions_are_asked_by_token_ids_and_without_the_models_own_sampling(
    server: StandIn, tmp_path: Path
) -> None:
    made = make(server, tmp_path, temperature=0.7)
    done = made.generator.generate(prompts())
    bodies = sorted(server.bodies, key=lambda body: body["n"])
    assert [(body["prompt"], body["n"]) for body in bodies] == [([5], 2), ([1, 2, 4], 3)]
    for body in bodies:
        assert body["stop_token_ids"] == [*ENDS] and body["ignore_eos"] is True
        assert body["max_tokens"] == MOST and body["temperature"] == 0.7 and "seed" not in body
        assert {name: body[name] for name in NEUTRAL} == NEUTRAL
    for tokens, length, logps, ended in zip(*map(np.asarray, done), strict=True):
        assert ended == (tokens[length - 1] in ENDS)
        assert ended or length == MOST
        assert not tokens[length:].any() and not logps[length:].any()
        assert logps[:length] == pytest.approx(-np.log(20))
    server.bodies.clear()
    made.generator.generate(prompts(), GREEDY)  # vLLM refuses several of them
    assert [body["n"] for body in server.bodies] == [1] * 5
    assert {body["temperature"] for body in server.bodies} == {0.0}


def test_each_step_has_an_adapter_of_its_own_name(server: StandIn, tmp_path: Path) -> None:
    made = make(server, tmp_path)
    made.generator.generate(prompts())
    first = made.generator.identity()
    made.generator.generate(prompts())  # of the same weights
    assert len(server.loaded) == 1
    made.arrays.step(1.0)
    made.generator.generate(prompts())
    assert made.generator.identity() != first
    assert [np.frombuffer(content, np.float32)[0] for content in server.loaded.values()] == [0.0, 1.0]
    (name,) = server.adapters
    assert made.folder.names() == [name] and name != next(iter(server.loaded))
    again = make(server, tmp_path)  # another process of the run
    again.generator.generate(prompts())
    assert made.folder.names() == [*server.adapters] and len(server.adapters) == 1
    assert name not in server.adapters


@pytest.mark.parametrize(
    ("change", "says", "help"),
    [
        (
            {"runtime_adapters": False},
            "cannot load adapters while it runs",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
        ),
        ({"lora": False}, "takes no adapters", "--enable-lora"),
        ({"max_rank": 4}, "takes no adapters of rank 5", "--max-lora-rank 8"),
        ({"sees": False}, "does not see the folder", "rollout.server_adapter_path"),
        ({"processed": False}, "without the temperature", "--logprobs-mode processed_logprobs"),
        ({"max_model_len": 11}, "takes 11 tokens, and a prompt with its completion has up to 12", "-len 12"),
        (
            {"model": "Qwen/Qwen3-8B"},
            "serves Qwen/Qwen3-8B, and the recipe trains recipec/tiny-gemma4",
            "start",
        ),
    ],
)
def test_what_the_server_lacks_is_said_before_anything_is_generated(
    change: dict[str, Any], says: str, help: str, server: StandIn, tmp_path: Path
) -> None:
    for name, value in change.items():
        setattr(server, name, value)
    made = make(server, tmp_path)
    made.folder.rank = 5
    with pytest.raises(UserError) as caught:
        made.generator.generate(prompts())
    assert f"the rollout server at {server.url} " in caught.value.message and says in caught.value.message
    assert help in (caught.value.help or "")
    assert not server.bodies


def test_step_is_done_again_by_a_server_that_restarted(
    server: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Let the server end while it answers, and start again without its adapters."""
    made = make(server, tmp_path)
    made.generator.generate(prompts())
    server.bodies.clear()

    def restart() -> None:
        time.sleep(0.5)
        server.stop()
        time.sleep(0.5)
        server.start()

    ending = threading.Thread(target=restart)

    def dies(number: int) -> int | None:
        if number == 2:
            ending.start()
            return -1
        return None

    server.faults = dies
    done = made.generator.generate(prompts())
    ending.join()
    assert len(server.bodies) >= 4  # both prompts again, not only the one that failed
    assert np.asarray(done.lengths).min() > 0
    (name,) = server.adapters
    assert [*server.loaded] == [name]
    assert "waiting for the rollout server, for up to 20 s: the connection to " in capsys.readouterr().err


def test_run_ends_when_the_server_stays_away(server: StandIn, tmp_path: Path) -> None:
    made = make(server, tmp_path, wait=1.5)
    made.generator.generate(prompts())
    server.stop()
    began = time.monotonic()
    with pytest.raises(UserError, match=r"does not answer for 2 s: nothing listens") as caught:
        made.generator.generate(prompts())
    assert time.monotonic() - began >= 1.5
    assert "continue with --resume" in (caught.value.help or "")


def test_signal_ends_the_wait(server: StandIn, tmp_path: Path) -> None:
    made = make(server, tmp_path, wait=600.0)
    made.generator.generate(prompts())
    server.stop()
    threading.Timer(0.5, lambda: made.asked.append(signal.SIGTERM)).start()
    with pytest.raises(Interrupted) as caught:
        made.generator.generate(prompts())
    assert caught.value.signum == signal.SIGTERM


def test_refused_prompt_and_foreign_end_are_errors(server: StandIn, tmp_path: Path) -> None:
    made = make(server, tmp_path)
    server.faults = lambda number: 400
    with pytest.raises(UserError, match=r"answers 400 .*: the engine is dead"):
        made.generator.generate(prompts())
    server.faults = lambda number: None
    server._choice = lambda body, number: {  # type: ignore[method-assign]
        **{"index": number, "token_ids": [9], "finish_reason": "length"},
        "logprobs": {"token_logprobs": [None]},
    }
    with pytest.raises(UserError, match="ended a completion after 1 tokens, at none of the tokens that end"):
        made.generator.generate(prompts())


ROLLOUT = "engine='vllm', url='{url}', wait_seconds=20, {more}"


def test_resumed_run_trains_on_the_stored_completions(place: Path, lives: Lives) -> None:
    """Go back to step 2 of a run of 4, as if it was killed before step 4 was saved. The server is gone, and
    would draw other completions."""
    with StandIn(vocabulary=500) as server:
        rollout = ROLLOUT.format(url=server.url, more="importance_sampling_mode='token_truncate'")
        write_reinforced(place, "rl", rollout=rollout, steps=4, every=2, rate=2e-2)
        whole = train(lives, place, "whole", artifact="rl")
        assert whole.status == 0, whole.stderr
        assert len({*server.loaded.values()}) == 4 and len(server.adapters) == 1
        (body, *_) = server.bodies
        assert body["n"] == 4 and body["max_tokens"] == 16 and body["temperature"] == 5.0
    folder = place / "out" / "checkpoints"
    shutil.copytree(place / "whole", place / "out")
    shutil.rmtree(folder / "4")
    assert sorted(path.name for path in folder.glob("rollouts-*")) == ["rollouts-2.npz", "rollouts-3.npz"]
    lines = metrics(place, "whole")
    for entry in lines:
        assert 0 < entry["sampling_logp_difference"] < entry["sampling_logp_difference_max"] < 5
        assert entry["importance_sampling_ratio_min"] < 1 < entry["importance_sampling_ratio_max"] <= 3
        assert entry["ratio"] == pytest.approx(1.0, abs=1e-5)
    resumed = train(lives, place, "out", "--resume", artifact="rl")
    assert resumed.status == 0 and "continuing after step 2 of 4" in resumed.stderr, resumed.stderr
    assert_equal(place, "whole", "out", 4)
    assert metrics(place, "out") == lines
    assert completions(place, "out") == completions(place, "whole")


def test_server_of_another_model_ends_the_run_before_its_update(place: Path, lives: Lives) -> None:
    with StandIn(vocabulary=500, logp=-12.0) as server:
        write_reinforced(place, "rl", rollout=ROLLOUT.format(url=server.url, more=""), steps=2)
        found = train(lives, place, "out", artifact="rl")
    assert found.status == 1
    error, help = error_of(found, place, "out")
    assert error.startswith("error: the rollout server's log-probabilities differ by ")
    assert error.endswith("it does not serve the model that is trained")
    assert "the recipe's model and revision" in help
    assert steps(place / "out" / "checkpoints") == []
