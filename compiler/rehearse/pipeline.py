"""Steps that run one after the other, mostly scripts. Rehearsal, quickstart and parity are lists of them.

Each step is timed and gives one figure. The first step that fails ends the run, and the last lines of its
script's output are shown.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.pages import text
from recipec.compiler.pages.document import Document, Table, sheet
from recipec.compiler.terminal import console, manner
from recipec.runtime.progress import FORESEEABLE, duration

if TYPE_CHECKING:
    from rich.console import Console

TAIL = 25
"""Number of last lines of a failed script's output that are shown."""

POLL_SECONDS = 0.02


class StepFailed(Exception):
    """A step failed.

    Attributes:
        tail: the last lines that its script printed; "" if no script ran.
    """

    def __init__(self, message: str, tail: str = "") -> None:
        super().__init__(message)
        self.tail = tail


@dataclass(frozen=True)
class StepResult:
    """The result of a step. `figure` is its measurement, in a few words."""

    step: str
    ok: bool
    seconds: float
    figure: str


@dataclass
class Pipeline:
    """Steps that have run, and where their scripts' output is.

    Attributes:
        console: where progress is shown; as plain lines if it is not a terminal.
        logs: folder with one text file per script.
        show_commands: whether each script's command line is printed.
        expected: relative duration of each step, by name; without it no remaining time is shown.
    """

    console: Console
    logs: Path
    show_commands: bool = False
    expected: Mapping[str, float] = field(default_factory=dict)
    results: list[StepResult] = field(default_factory=list)
    _say: Callable[[str], None] = lambda text: None

    def step(self, name: str, action: Callable[[], str]) -> None:
        """Run one step; `action` returns its figure.

        Raises:
            StepFailed: when it fails; the result is recorded anyway.
        """
        start = time.monotonic()
        try:
            with self._progress(name):
                figure = action()
        except StepFailed as error:
            self._record(StepResult(name, False, time.monotonic() - start, str(error)))
            raise
        self._record(StepResult(name, True, time.monotonic() - start, figure))

    def script(
        self,
        command: list[str],
        log: str,
        environment: Mapping[str, str],
        until: Callable[[], bool] | None = None,
    ) -> str:
        """Run a script to its end and return its output.

        Args:
            command: the command line; its first word is the interpreter.
            log: name of the text file for its output.
            environment: of the process.
            until: called repeatedly; once it returns true, the process is killed with SIGKILL.

        Raises:
            StepFailed: when the script's exit status is not 0, or it ends before `until` returned true.
        """
        self.say_command(command)
        self.logs.mkdir(parents=True, exist_ok=True)
        path = self.logs / f"{log}.txt"
        killed = False
        with path.open("wb") as output:
            # Run it in its own session, so that its children can be ended with it.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
            try:
                shown = 0.0
                while process.poll() is None:
                    if until is not None and until():
                        _signal(process, signal.SIGKILL)
                        killed = True
                        break
                    if time.monotonic() - shown > 0.5:
                        shown = time.monotonic()
                        self._say(_last_line(path))
                    time.sleep(POLL_SECONDS)
                status = process.wait()
            except BaseException:
                _end(process)
                raise
        text = path.read_text(encoding="utf-8", errors="replace")
        name = command[3] if command[1:3] == ["-P", "-m"] else Path(command[1]).name
        if killed:
            return text
        if status != 0:
            how = f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"
            raise StepFailed(f"{name} {how}; see {path}", last_lines(text))
        if until is not None:
            raise StepFailed(f"{name} ended before it could be killed", last_lines(text))
        return text

    def say_command(self, command: list[str]) -> None:
        """Print a command line as a reader would type it, if commands are shown."""
        if self.show_commands:
            tell(self.console, f"$ {readable(command)}", "dim")

    @property
    def ok(self) -> bool:
        return all(result.ok for result in self.results)

    def document(self, title: str) -> Document:
        """Return a table of the steps that have run, and their total time."""
        rows = [
            (result.step, "ok" if result.ok else "failed", f"{result.seconds:.1f}", result.figure)
            for result in self.results
        ]
        seconds = sum(result.seconds for result in self.results)
        rows.append(("total", "ok" if self.ok else "failed", f"{seconds:.1f}", ""))
        bad = tuple(index for index, row in enumerate(rows) if row[1] == "failed")
        return sheet(title, [Table(("step", "result", "seconds", "figure"), rows, words=(1, 3), bad=bad)])

    def print_table(self, title: str) -> None:
        """Print the table; --quiet leaves it out when all went well."""
        if not (manner.quiet and self.ok):
            text.show(self.document(title), stream=self.console.file)

    @contextmanager
    def _progress(self, name: str) -> Iterator[None]:
        if not self.console.is_terminal or manner.quiet:
            yield
            return
        from rich.text import Text

        start = time.monotonic()
        with self.console.status(name) as status:

            def show(text: str) -> None:
                passed = time.monotonic() - start
                line = Text(f"{name}, {passed:.0f} s{self._left(name, passed)}  {text}")
                line.truncate(self.console.width - 4)
                status.update(line)

            self._say = show
            try:
                yield
            finally:
                self._say = lambda text: None

    def _left(self, name: str, passed: float) -> str:
        """Estimate the remaining time, at the pace of the finished steps: ", 40 s left"."""
        done = sum(self.expected.get(result.step, 0.0) for result in self.results)
        if done <= FORESEEABLE * sum(self.expected.values()) or name not in self.expected:
            return ""
        pace = sum(result.seconds for result in self.results) / done
        present = max(0.0, self.expected[name] * pace - passed)
        names = {name, *(result.step for result in self.results)}
        rest = sum(share for step, share in self.expected.items() if step not in names)
        return f", {duration(present + rest * pace)} left"

    def _record(self, result: StepResult) -> None:
        self.results.append(result)
        word = "ok" if result.ok else "failed"
        line = f"{result.step:<12} {word:<6} {result.seconds:6.1f} s  {result.figure}"
        (tell if result.ok else say)(self.console, line, "" if result.ok else "red")


def new_console(stream: Any = None) -> Console:
    """Create a console that is wide enough for the table even if its output is piped."""
    return console(stream, width=120)


def readable(command: list[str]) -> str:
    """Return a command line as a reader would type it, with paths below the working folder shortened."""
    here = f"{Path.cwd()}{os.sep}"
    return shlex.join(word.removeprefix(here) for word in command)


def carry_out(pipeline: Pipeline, work: Path, run: Callable[[], None]) -> None:
    """Run steps. Print the last lines of a failed step's script, or on Ctrl-C the folder that is kept."""
    try:
        run()
    except StepFailed as error:
        if error.tail:
            say(pipeline.console, "its last lines:")
            say(pipeline.console, error.tail)
    except KeyboardInterrupt:
        say(pipeline.console, f"\ninterrupted; its scripts have been ended. Kept: {work}")
        raise


def clear_up(console: Console, work: Path, ok: bool, keep: bool) -> None:
    """Remove the folder of a run that was all right, unless the user keeps it; else print its path."""
    if ok and not keep:
        shutil.rmtree(work, ignore_errors=True)
    else:
        (tell if ok else say)(console, f"kept: {work}")


def say(console: Console, text: str, style: str = "") -> None:
    """Print text unchanged: without markup, and without wrapping lines."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def tell(console: Console, text: str, style: str = "") -> None:
    """Print optional information in the same way; --quiet leaves it out."""
    if not manner.quiet:
        say(console, text, style)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a script and its children: SIGTERM first, SIGKILL after 3 s."""
    _signal(process, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    _signal(process, signal.SIGKILL)
    process.wait()


def _last_line(path: Path) -> str:
    """Return the last line of a growing text file; a carriage return of a progress bar also starts a line."""
    with path.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - 2000))
        text = stream.read().decode("utf-8", errors="replace")
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def last_lines(text: str) -> str:
    """Return the part of a script's output that is shown when it fails."""
    lines = [line for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return "\n".join(lines[-TAIL:])
