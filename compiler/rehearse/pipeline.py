"""Steps that run one after the other, mostly scripts: rehearsal, quickstart and parity are lists of them.

Each step is timed and gives one figure; the first
that fails ends the run, with the tail of what its script printed.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.terminal import manner
from recipec.runtime.progress import FORESEEABLE, duration

if TYPE_CHECKING:
    from rich.console import Console

TAIL = 25
"""Lines of a failed script's output that are shown."""

POLL_SECONDS = 0.02


class StepFailed(Exception):
    """A step that did not do what it should.

    Attributes:
        tail: the last lines that its script printed, "" when no script ran.
    """

    def __init__(self, message: str, tail: str = "") -> None:
        super().__init__(message)
        self.tail = tail


@dataclass(frozen=True)
class StepResult:
    """How a step went. `figure` is what it measured, in a few words."""

    step: str
    ok: bool
    seconds: float
    figure: str


@dataclass
class Pipeline:
    """Steps that have run, and where their scripts' output went.

    Attributes:
        console: where progress goes; plain lines when it is no terminal.
        logs: folder of one text file per script.
        show_commands: whether each script's command line is printed.
        expected: what each step takes in relation to the others, by name; without it no time left is told.
    """

    console: Console
    logs: Path
    show_commands: bool = False
    expected: Mapping[str, float] = field(default_factory=dict)
    results: list[StepResult] = field(default_factory=list)
    _say: Callable[[str], None] = lambda text: None

    def step(self, name: str, action: Callable[[], str]) -> None:
        """Runs one step; `action` returns its figure.

        Raises:
            StepFailed: when it fails; the result is recorded all the same.
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
        """Runs a script to its end and returns what it printed.

        Args:
            command: its first word is the interpreter.
            log: name of the text file that its output goes to.
            environment: of the process.
            until: asked all the time; when it is true the process is killed with SIGKILL.

        Raises:
            StepFailed: when it exits with another status than 0, or ends before `until` was true.
        """
        self.say_command(command)
        self.logs.mkdir(parents=True, exist_ok=True)
        path = self.logs / f"{log}.txt"
        killed = False
        with path.open("wb") as output:
            # A session of its own, so that its children can be ended with it.
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
        """Prints a command line as a reader would type it, where commands are shown."""
        if self.show_commands:
            tell(self.console, f"$ {readable(command)}", "dim")

    @property
    def ok(self) -> bool:
        return all(result.ok for result in self.results)

    def print_table(self, title: str) -> None:
        """A table of the steps that have run, and their whole time."""
        from rich.table import Table

        if manner.quiet and self.ok:
            return
        table = Table(title=title, title_justify="left", show_footer=True)
        table.add_column("step", "total")
        table.add_column("result", "ok" if self.ok else "failed")
        table.add_column("seconds", f"{sum(result.seconds for result in self.results):.1f}", justify="right")
        table.add_column("figure", overflow="fold")
        for result in self.results:
            word, style = ("ok", "") if result.ok else ("failed", "red")
            table.add_row(result.step, word, f"{result.seconds:.1f}", result.figure, style=style)
        self.console.print(table)

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
        """How long the steps still take, at the pace of those that have ended: ", 40 s left"."""
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
    """A console that is wide enough for the table when it is piped."""
    from recipec.compiler.terminal import console

    return console(stream, width=120)


def readable(command: list[str]) -> str:
    """A command line as a reader would type it: paths below the working folder shortened."""
    here = f"{Path.cwd()}{os.sep}"
    return shlex.join(word.removeprefix(here) for word in command)


def report_failure(console: Console, error: StepFailed) -> None:
    """Prints what a failed step's script said last."""
    if error.tail:
        say(console, "its last lines:")
        say(console, error.tail)


def say(console: Console, text: str, style: str = "") -> None:
    """Prints text as it is: no markup in it, no line broken."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def tell(console: Console, text: str, style: str = "") -> None:
    """The same of what is good to know, which --quiet leaves out."""
    if not manner.quiet:
        say(console, text, style)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a script and its children, kindly at first."""
    _signal(process, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    _signal(process, signal.SIGKILL)
    process.wait()


def _last_line(path: Path) -> str:
    """The last line of a growing text file; a progress bar's line counts from its last return."""
    with path.open("rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(max(0, stream.tell() - 2000))
        text = stream.read().decode("utf-8", errors="replace")
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def last_lines(text: str) -> str:
    """Of what a script printed, those that are shown when it fails."""
    lines = [line for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return "\n".join(lines[-TAIL:])
