"""Tests of `recipe watch` on a real terminal: drawn at its size, and left at the end or by Ctrl-C."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyte
import pytest

from tests.watch.watching import append, entry, lines, state, write_run

ROOT = Path(__file__).resolve().parents[2]


class Terminal:
    """A process on its own terminal, with the terminal's screen."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int, columns: int, rows: int) -> None:
        self.process, self._descriptor = process, descriptor
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""

    def read(self, seconds: float) -> bool:
        """Read the output within a time, and return False if the process has closed the terminal."""
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(self._descriptor, 1 << 16)
        except OSError:
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)

    def until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.text
            assert self.read(0.05) or condition(), self.text

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)
        self.process.send_signal(signal.SIGWINCH)

    def end(self) -> int:
        """Read until the process has ended, and return its status."""
        deadline = time.monotonic() + 60
        while self.read(0.2) and self.process.poll() is None:
            assert time.monotonic() < deadline, self.text
        while self.read(0.05) and select.select([self._descriptor], [], [], 0)[0]:
            pass
        return self.process.wait(30)


@contextmanager
def terminal(
    *arguments: str | Path, columns: int = 80, rows: int = 24, **environment: str
) -> Iterator[Terminal]:
    """Start `recipe watch` on a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "LC_ALL", "LANG", "PYTHONIOENCODING")
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "recipec.compiler.cli.main", "watch", *map(str, arguments)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=clean | {"TERM": "xterm-256color", "LANG": "C.UTF-8"} | environment,
        cwd=ROOT,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours, columns, rows)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_terminal_shows_run_from_before_its_start_to_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with terminal(folder, "--interval", "0.2") as seen:
        seen.until(lambda: "which does not exist yet" in seen.text.replace("\n", " "))
        assert b"\x1b[?1049h" in seen.raw, "drawn on the terminal's other screen"
        write_run(folder, 120)
        seen.until(
            lambda: "step 120/400 (30%)" in seen.text and "Ctrl-C leaves; the run continues" in seen.text
        )
        assert "support-qlora: Qwen/Qwen3-14B, LoRA 16, v5e-8" in seen.text and "━" in seen.text
        assert "loss, ◆ eval_loss" in seen.text
        append(folder, lines(121, 150))
        seen.until(lambda: "step 150/400" in seen.text)
        seen.resize(40, 30)
        seen.until(lambda: "LoRA 16,…" in seen.text and "every 0.2 s" in seen.text)
        assert all(len(line.rstrip()) <= 40 for line in seen.screen.display)
        seen.resize(100, 16)
        seen.until(lambda: "(step 150)  lr 1.00e-04  grad_norm 0.5" in seen.text)
        append(folder, json.dumps(entry(151, loss=30.0)) + "\n")
        seen.until(lambda: "⚠ step 151: the loss jumped to 30" in seen.text)
        append(folder, lines(152, 400))
        state(folder, "done")
        assert seen.end() == 0
        assert b"\x1b[?1049l" in seen.raw and b"\x1b[?25h" in seen.raw, "the screen and the cursor are back"
        last = seen.raw.rpartition(b"\x1b[?1049l")[2].decode()
        assert "step 400/400 (100%)" in last and "done" in last and "Ctrl-C" not in last


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_restores_terminal_and_changes_no_file(tmp_path: Path, signum: signal.Signals) -> None:
    """Check that the terminal is restored, that only the run's state is printed, and that no file changed."""
    folder = write_run(tmp_path / "checkpoints", 120)
    before = {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}
    with terminal(folder, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", NO_COLOR="1") as seen:
        seen.until(lambda: all(each in seen.text for each in ("step 120/400", "-----", "**")))
        assert seen.raw.isascii(), "a terminal without UTF-8"
        seen.process.send_signal(signum)
        assert seen.end() == 128 + signum
        last = seen.raw.rpartition(b"\x1b[?1049l")[2].decode()
        assert "step 120/400" in last and "Traceback" not in last and b"\x1b[36m" not in seen.raw
    assert {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))} == before
