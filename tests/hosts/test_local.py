"""Tests of runtime/hosts/local.py: a script as several processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.hosts import local
from recipec.runtime.hosts.discovery import discover
from tests.waiting import until

SCRIPT = Path(local.__file__)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Write a script that records its variables and a signal in files, and waits or ends as its words say."""
    path = tmp_path / "script.py"
    path.write_text(
        "import os, pathlib, signal, sys, time\n"
        "names = ('JAX_COORDINATOR_ADDRESS', 'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')\n"
        "def leave(signum, frame):\n"
        "    pathlib.Path(__file__).with_name(number + '.signal').write_text(str(signum))\n"
        "    sys.exit(128 + signum)\n"
        "number = os.environ['JAX_PROCESS_ID']\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "text = '\\n'.join([*(os.environ[name] for name in names), *sys.argv[1:]])\n"
        "pathlib.Path(__file__).with_name(number).write_text(text)\n"
        # Python would handle a signal just before a long sleep only after it.
        "for _ in range(600 if 'wait' in sys.argv else 0): time.sleep(0.1)\n"
    )
    return path


def test_each_process_gets_its_number_and_the_arguments(script: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, "3", script, "--resume", "--steps", "4"], timeout=60)
    assert done.returncode == 0
    told = [(script.parent / str(number)).read_text().split("\n") for number in range(3)]
    assert len({lines[0] for lines in told}) == 1
    for number, lines in enumerate(told):
        names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
        place = discover(1, dict(zip(names, lines[:3], strict=True)))
        assert place is not None and (place.count, place.number) == (3, number)
        assert lines[3:] == ["--resume", "--steps", "4"]


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the handlers that `main` sets."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.usefixtures("handlers")
def test_signal_during_startup_reaches_every_process(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, begun = subprocess.Popen, []

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        begun.append(begin(*arguments, **options))
        until((script.parent / str(len(begun) - 1)).exists)
        if len(begun) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    assert local.main(["2", str(script), "wait"]) == 128 + signal.SIGTERM
    assert [process.returncode for process in begun] == [128 + signal.SIGTERM] * 2


@pytest.mark.parametrize("argv", [[], ["2"], ["two", "train.py"], ["0", "train.py"]])
def test_wrong_arguments_show_the_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert local.main(argv) == 2
    assert capsys.readouterr().err == f"{local.USAGE}\n"
