"""Tests of a run's numbers during training: metrics.jsonl, TensorBoard, Weights & Biases, and its state."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipec.runtime.backends.trl.step_report import BackendReport
from recipec.runtime.errors import UserError
from recipec.runtime.interrupts import Interrupted
from recipec.runtime.metrics import services
from recipec.runtime.metrics.loggers import FILE, GENERATIONS, Metrics, done_line, download, last, publisher
from recipec.runtime.metrics.run_state import recorded
from recipec.runtime.training.session import Session
from tests.runtime.logged import IN_SINGLE, assert_same, of_lines, of_tensorboard, of_wandb, records

LOCK = {"compiler": "recipec 0", "recipe": {"name": "tiny", "lora": {"rank": 4}, "train": {"steps": 8}}}


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """Make a script's folder with the files that logging needs."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "recipe.lock.json").write_text(json.dumps(LOCK))
    return folder


def numbers(step: int) -> dict[str, float]:
    loss = math.nan if step == 5 else 2.0 / step
    return {"loss": loss, "grad_norm": math.inf if step == 5 else 0.1 * step, "tokens": 100 + step}


def by_metrics(folder: Path, start: int, until: int, wandb: Any = None) -> None:
    """Log as train.py and train_torchax.py do."""
    metrics = Metrics(folder, start or None, True, [wandb] if wandb else [])
    _log(metrics.log, start, until)
    metrics.ends(0)
    metrics.close()


def _log(log: Callable[[str, int, dict[str, float]], None], start: int, until: int) -> None:
    if not start:
        log("eval", 0, {"loss": 3.0})
    for step in range(start + 1, until + 1):
        log("train", step, numbers(step))
        if step % 2 == 0:
            log("eval", step, {"loss": 2.5 / step, "chat": 3.5 / step})


def by_other(folder: Path, start: int, until: int) -> None:
    """Log as train_trl.py does."""
    report = BackendReport(folder, start, until, 10, True, lambda: 1 << 20)
    if not start:
        report.evaluation(0, {"loss": 3.0})
    for step in range(start + 1, until + 1):
        if step != 5:
            report.step(step, 2.0 / step, 1e-4, 0.1 * step, 100 + step, {"rewards_margin": 0.5})
        if step % 2 == 0:
            report.evaluation(step, {"loss": 2.5 / step, "chat": 3.5 / step})
    report.close()


LOGGERS = pytest.mark.parametrize("log", [by_metrics, by_other])


@LOGGERS
def test_tensorboard_matches_metrics_jsonl(log: Callable[..., None], tmp_path: Path) -> None:
    log(tmp_path, 0, 6)
    first = of_lines(tmp_path)
    assert ("eval/loss", 0) in first and ("train/tokens", 6) in first
    assert_same(of_tensorboard(tmp_path), first, IN_SINGLE)
    log(tmp_path, 4, 8)
    both = of_lines(tmp_path)
    assert (
        max(step for _, step in both) == 8
        and {key: first[key] for key in first if key[1] <= 4}.items() <= both.items()
    )
    assert_same(of_tensorboard(tmp_path), both, IN_SINGLE)
    log(tmp_path, 0, 2)
    assert_same(of_tensorboard(tmp_path), of_lines(tmp_path), IN_SINGLE)
    assert max(step for _, step in of_lines(tmp_path)) == 2, "begun anew"


def test_last_line_of_a_run_tells_a_loss_that_is_no_number(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, None, False)
    metrics.log("eval", 2, {"loss": math.nan})
    metrics.close()
    found = last(metrics.path, "eval_loss")
    assert "eval_loss=nan" in done_line(2, None, None, found, 0)


def test_run_stopped_before_its_restored_step_says_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session: Any = SimpleNamespace(until=5, total=100)  # --resume --steps 5, at step 10
    outcome: Any = SimpleNamespace(
        early=None, step=10, loss=1.0, eval_loss=1.0, eval_reward=None, tokens_per_second=None
    )
    Session.conclude(session, outcome, tmp_path / FILE)
    assert "stopped after step 10 of 100, as --steps says" in capsys.readouterr().err


def test_resumed_run_keeps_answers_with_any_line_break_and_drops_a_cut_one(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, None, False)
    for step in (2, 4):
        metrics.samples(step, [{"prompt": "p", "answer": "one\u2028two\u0085é"}])
    metrics.close()
    path = tmp_path / GENERATIONS
    kept = path.read_bytes().partition(b"\n")[0] + b"\n"
    path.write_bytes(path.read_bytes()[: -len('é"}\n'.encode()) + 1])  # a kill cuts within a character
    Metrics(tmp_path, 3, False).close()
    assert path.read_bytes() == kept


def test_state_json_records_run_state_and_end_reason(tmp_path: Path) -> None:
    folder, told = tmp_path / "run", []

    def state() -> dict[str, Any]:
        return dict(json.loads((folder / "state.json").read_text()))

    with recorded(folder, 10, 10, lambda path: told.append(path.read_text())):
        assert (state()["state"], state()["total"], state()["pid"]) == ("training", 10, os.getpid())
    assert state()["state"] == "done" and state()["reason"] is None
    assert [json.loads(text)["state"] for text in told] == ["training", "done"]
    with recorded(folder, 10, 4):
        assert (state()["total"], state()["until"]) == (10, 4)
    assert (state()["state"], state()["reason"]) == ("stopped", "--steps 4")
    for error, how, reason in (
        (Interrupted(signal.SIGTERM), "stopped", "SIGTERM"),
        (UserError("the loss is nan", "help"), "failed", "the loss is nan"),
        (ZeroDivisionError(), "failed", "ZeroDivisionError"),
    ):
        with pytest.raises(type(error)), recorded(folder, 10, 10):
            raise error
        assert (state()["state"], state()["reason"]) == (how, reason)
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError), recorded(folder, 10, 10) as ending:
        ending.failed("process 2 of 4 is gone")
        raise RuntimeError("a collective failed")
    assert state()["reason"] == "process 2 of 4 is gone"
    with recorded(tmp_path / "file" / "run", 10, 10):
        pass  # nothing can be written there, and nothing needs it


def test_metrics_are_published_to_and_fetched_from_checkpoint_folder(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    metrics = Metrics(here, None, False, publish=publisher(str(there)))
    for step in (1, 2):
        metrics.log("train", step, {"loss": 1.0})
    assert not (there / FILE).exists()
    metrics.flush()
    assert (there / FILE).read_text() == (here / FILE).read_text() != ""
    metrics.close()
    publisher("/dev/null/folder")(here / FILE)  # fails, and the run continues
    other = tmp_path / "other" / FILE
    download(other, str(there))
    assert other.read_text() == (there / FILE).read_text(), "another machine goes on"
    with other.open("a") as file:
        file.write('{"step": 3, "loss": 1.0}\n')
    download(other, str(there))
    assert len(other.read_text().splitlines()) == 3, "what is here is more"
    download(tmp_path / "none" / FILE, str(tmp_path / "nothing"))


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let wandb write to this disk, without a user's settings."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.mark.e2e
def test_wandb_matches_metrics_jsonl(
    artifact: Path, tmp_path: Path, offline: None, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    logger = services.open_wandb("mine", services.RunFiles(folder, folder, artifact, False, 0))
    assert logger is not None
    by_metrics(folder, 0, 6, logger)
    found = records(folder)
    assert_same(of_wandb(found), of_lines(folder))
    (run,) = (record["run"] for record in found if record["type"] == "run")
    assert run["run_id"] == json.loads((folder / "wandb.json").read_text())["id"]
    assert run["project"] == "mine" and run["display_name"] == "tiny"
    config = run["config"]["update"]
    assert {name: config[name] for name in LOCK["recipe"]} == LOCK["recipe"]
    assert config["recipec"] == "recipec 0"
    ends = [record["exit"].get("exit_code", 0) for record in found if record["type"] == "exit"]
    assert ends == [0]
    printed = capfd.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("note: Weights & Biases: recorded in ")


class Fake:
    """A fake wandb module with the parts that the runtime uses.

    Args:
        fails: exceptions by the call that raises them: "setup", "init", "log", "finish".
    """

    def __init__(self, key: bool = True, **fails: Exception) -> None:
        self.errors = SimpleNamespace(CommError=ConnectionError)
        self.key, self.fails = key, fails
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended: list[Any] = []
        self.torn = 0
        self.Settings = lambda **given: SimpleNamespace(**given)

    def setup(self) -> Any:
        self._fail("setup")
        names = {
            "mode": "MODE",
            "entity": "ENTITY",
            "project": "PROJECT",
            "run_id": "RUN_ID",
            "run_name": "NAME",
        }
        found = {name: os.environ.get(f"WANDB_{variable}") for name, variable in names.items()}
        return SimpleNamespace(settings=SimpleNamespace(**found | {"mode": found["mode"] or "online"}))

    def login(self, prompt: bool, verify: bool) -> bool:
        assert not prompt and not verify
        return self.key

    def init(self, **given: Any) -> Any:
        self.begun.append(given)
        if given.get("mode") != "offline":
            self._fail("init")
        settings = SimpleNamespace(sync_dir=given["dir"] or "/tmp", mode=given.get("mode") or "online")
        return SimpleNamespace(
            settings=settings, url=None, log=self.log, finish=self.finish, mark_preempting=self.mark
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self._fail("log")
        self.logged.append((step, values))

    def mark(self) -> None:
        self.ended.append("preempting")

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)
        self._fail("finish")

    def teardown(self) -> None:
        self.torn += 1

    def _fail(self, where: str) -> None:
        if where in self.fails:
            raise self.fails[where]


@pytest.fixture
def log_with(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., list[str]]]:
    """Return a function that logs two steps with a fake wandb, and returns the printed lines."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_SILENT", "true")

    def log(fake: Any, resume: bool = False, restored: int = 0, project: str = "mine", **ends: Any) -> None:
        monkeypatch.setitem(sys.modules, "wandb", fake)
        folder = tmp_path / "run"
        files = services.RunFiles(folder, folder, artifact, resume, restored)
        logger = services.open_wandb(project, files)
        metrics = Metrics(folder, restored or None, False, [logger] if logger else [])
        for step in (restored + 1, restored + 2):
            metrics.log("train", step, {"loss": 1.0 / step})
        metrics.ends(**{"status": 0} | ends)
        metrics.close()
        assert of_lines(folder)["train/loss", restored + 2] == 1.0 / (restored + 2), "whatever wandb is at"

    yield log


REST = "metrics.jsonl has all values"


@pytest.mark.parametrize(
    ("fake", "told"),
    [
        (Fake(), []),
        (None, [f"the package wandb is not installed; nothing is logged there; {REST}"]),
        (
            Fake(key=False),
            ["no key (`wandb login`, or WANDB_API_KEY); the run is recorded on this disk", "recorded in "],
        ),
        (
            Fake(init=ConnectionError("no route\nto it")),
            ["no route; the run is recorded on this disk", "recorded in "],
        ),
        (Fake(init=ValueError("permission denied")), [f"permission denied; nothing is logged there; {REST}"]),
        (
            Fake(log=BrokenPipeError("Connection lost")),
            [f"Connection lost; the rest of the run is not logged there; {REST}"],
        ),
        (Fake(finish=TimeoutError("60 s are over")), ["60 s are over; `wandb sync "]),
    ],
)
def test_wandb_failures_do_not_end_run(
    log_with: Callable[..., None], capsys: pytest.CaptureFixture[str], fake: Any, told: list[str]
) -> None:
    log_with(fake)
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert len(lines) == len(told) and printed.out == ""
    for line, start in zip(lines, told, strict=True):
        assert line.startswith(f"note: Weights & Biases: {start}")
    if fake is not None and fake.begun and "init" not in fake.fails:
        assert fake.torn == 1


def test_wandb_environment_variables_are_respected(
    log_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "PROJECT": "theirs",
        "ENTITY": "team",
        "NAME": "mine",
        "RUN_ID": "abc",
        "DIR": "/tmp",
        "INIT_TIMEOUT": "5",
    }
    for name, value in values.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    fake = Fake()
    log_with(fake)
    (given,) = fake.begun
    assert (given["project"], given["entity"], given["name"], given["id"]) == (
        "theirs",
        "team",
        "mine",
        "abc",
    )
    assert (
        given["dir"] is None
        and given["settings"].init_timeout == 5
        and given["settings"].finish_timeout == 60
    )
    monkeypatch.setenv("WANDB_MODE", "disabled")
    disabled = Fake()
    log_with(disabled)
    assert not disabled.begun


def test_resumed_run_continues_same_wandb_run(log_with: Callable[..., None]) -> None:
    first, again, other, anew = Fake(), Fake(), Fake(), Fake()
    log_with(first)
    log_with(again, resume=True, restored=1, status=143, stopped=True)
    assert again.begun[0]["id"] == first.begun[0]["id"]
    assert again.logged == [(3, {"train/loss": 1.0 / 3})], "step 2 was logged by the first process"
    assert (first.ended, again.ended) == ([0], ["preempting", 143])
    log_with(other, resume=True, restored=2, project="other")
    assert other.begun[0]["id"] != first.begun[0]["id"], "another project has not seen it"
    assert other.logged == [(step, {"train/loss": 1.0 / step}) for step in (1, 2, 3, 4)], "from the beginning"
    log_with(anew)
    assert anew.begun[0]["id"] != other.begun[0]["id"] and [step for step, _ in anew.logged] == [1, 2]
