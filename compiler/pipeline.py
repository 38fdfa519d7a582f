"""Runs an artifact's scripts one after the other: train, kill, resume, merge, verify.

Rehearsal and quickstart are lists of these steps. Each step is timed and gives one figure; the first
that fails ends the run, with the tail of what its script printed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.artifact import ArtifactError
from compiler.terminal import manner
from compiler.wording import plural
from runtime.cache import FOLDER as COMPILED
from runtime.progress import FORESEEABLE, duration

if TYPE_CHECKING:
    from rich.console import Console

TAIL = 25
"""Lines of a failed script's output that are shown."""

POLL_SECONDS = 0.02

QUICK_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
"""XLA's flags for programs that run for a moment on a CPU: without LLVM's passes and MLIR's kernels. The
second is one of jax 0.10's; XLA ends a process whose flags it does not know."""

MARKER = ".recipec-run"
"""An empty file that says that a folder is a run's own."""

CACHE = "jax-cache"
"""Folder of compiled functions."""


PACKAGES = ("jax", "tunix", "qwix", "orbax", "grain", "safetensors", "tokenizers", "transformers")
"""What the scripts import, and the miniature is written with."""


class StepFailed(Exception):
    """A step that did not do what it should.

    Attributes:
        tail: the last lines that its script printed, "" when no script ran.
    """

    def __init__(self, message: str, tail: str = "") -> None:
        super().__init__(message)
        self.tail = tail


@dataclass(frozen=True)
class Result:
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
    results: list[Result] = field(default_factory=list)
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
            self._record(Result(name, False, time.monotonic() - start, str(error)))
            raise
        self._record(Result(name, True, time.monotonic() - start, figure))

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
            raise StepFailed(f"{name} {how}; see {path}", _tail(text))
        if until is not None:
            raise StepFailed(f"{name} ended before it could be killed", _tail(text))
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

    def _record(self, result: Result) -> None:
        self.results.append(result)
        word = "ok" if result.ok else "failed"
        line = f"{result.step:<12} {word:<6} {result.seconds:6.1f} s  {result.figure}"
        (tell if result.ok else say)(self.console, line, "" if result.ok else "red")


@dataclass(frozen=True)
class Run:
    """An artifact, what it is run on, and where its output goes.

    Attributes:
        pipeline: what runs the scripts.
        artifact: folder with train.py and merge.py.
        model: the checkpoint's directory.
        data: what the recipe's data paths are relative to.
        work: folder for what the scripts write.
        checkpoints: the recipe's checkpoint.directory, below an output folder.
        merged: the recipe's merge.output, below an output folder.
        cache: the recipe's cache.directory; None for none.
        processes: that train together.
    """

    pipeline: Pipeline
    artifact: Path
    model: Path
    data: Path
    work: Path
    checkpoints: str
    merged: str
    cache: str | None = None
    processes: int = 1

    @property
    def whole(self) -> Path:
        """Output folder of the run that is not interrupted."""
        return self.work / "whole"

    @property
    def resumed(self) -> Path:
        """Output folder of the run that is killed and resumed."""
        return self.work / "resumed"

    def train(self) -> str:
        """Trains without interruption; the figure is the loss and its fall."""
        text = self._train(self.whole, "train")
        summary = done_line(text)
        losses = self.losses(self.whole)
        if not losses:
            raise StepFailed("train.py wrote no losses to metrics.jsonl", _tail(text))
        if any(loss != loss or abs(loss) == float("inf") for loss in losses):
            raise StepFailed("the loss is not finite", _tail(text))
        speed = f", {summary['tokens/s']} tokens/s" if "tokens/s" in summary else ""
        return f"{summary.get('steps', len(losses))} steps, loss {losses[0]:.2f} to {losses[-1]:.2f}{speed}"

    def kill(self) -> str:
        """Trains again into another folder and kills it once a checkpoint is there.

        What the first run compiled is taken along; what it tokenised is not.
        """
        compiled, again = (folder / (self.cache or "") / COMPILED for folder in (self.whole, self.resumed))
        if self.cache is not None and compiled.is_dir() and not again.exists():
            shutil.copytree(compiled, again)
        self._train(self.resumed, "kill", until=lambda: bool(self.saved_steps(self.resumed)))
        saved = self.saved_steps(self.resumed)
        reached = self.last_step(self.resumed)
        return f"SIGKILL at step {max(reached, saved[-1])}, checkpoint of step {saved[-1]} is there"

    def resume(self) -> str:
        """Resumes the killed run and lets it end."""
        before = self.saved_steps(self.resumed)[-1]
        summary = done_line(self._train(self.resumed, "resume", resume=True))
        return f"from step {before} to {summary.get('steps', self.saved_steps(self.resumed)[-1])}"

    def compare(self) -> str:
        """Holds the resumed run's parameters against the uninterrupted run's, bit by bit."""
        folders = [str(output / self.checkpoints) for output in (self.whole, self.resumed)]
        return _last(self._script(["-P", "-m", "compiler.same_parameters", *folders], "compare"))

    def merge(self) -> str:
        """Merges the resumed run's adapters into the base."""
        self._script([str(self.artifact / "merge.py"), *self._merge_paths()], "merge")
        files = sorted((self.resumed / self.merged).glob("*.safetensors"))
        if not files:
            raise StepFailed(f"merge.py wrote no safetensors to {self.resumed / self.merged}")
        size = sum(file.stat().st_size for file in files)
        return f"{plural(len(files), 'file')}, {size / 1e6:.1f} MB"

    def verify(self) -> str:
        """Holds base + adapter in Tunix against the merged checkpoint, by their logits."""
        command = [str(self.artifact / "merge.py"), *self._merge_paths(), "--verify"]
        return _last(self._script(command, "verify"))

    def losses(self, output: Path) -> list[float]:
        """Training losses of a run in order of steps."""
        return [float(row["loss"]) for row in self._metrics(output) if "loss" in row]

    def evaluation_losses(self, output: Path) -> list[float]:
        """Evaluation losses of a run in order of steps; none without evaluation data."""
        return [float(row["eval_loss"]) for row in self._metrics(output) if "eval_loss" in row]

    def last_step(self, output: Path) -> int:
        """The last step that a run has logged, 0 for none."""
        return max((int(row["step"]) for row in self._metrics(output) if "step" in row), default=0)

    def saved_steps(self, output: Path) -> list[int]:
        """Steps whose checkpoint is complete."""
        folder = output / self.checkpoints
        if not folder.is_dir():
            return []
        return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit())

    def environment(self) -> dict[str, str]:
        """Of the scripts, as `script_environment` has it."""
        return script_environment(self.work)

    def _train(
        self, output: Path, log: str, resume: bool = False, until: Callable[[], bool] | None = None
    ) -> str:
        command = [str(self.artifact / "train.py"), "--model", str(self.model)]
        if self.processes > 1:
            several = self.artifact.parent / "runtime" / "hosts" / "local.py"
            command = [str(several), str(self.processes), *command]
        command += ["--data-dir", str(self.data), "--output", str(output)]
        return self._script(command + ["--resume"] * resume, log, until)

    def _merge_paths(self) -> list[str]:
        return [
            *("--checkpoint", str(self.resumed / self.checkpoints)),
            *("--model", str(self.model)),
            *("--output", str(self.resumed)),
        ]

    def _script(self, command: list[str], log: str, until: Callable[[], bool] | None = None) -> str:
        return self.pipeline.script([sys.executable, *command], log, self.environment(), until)

    def _metrics(self, output: Path) -> list[dict[str, Any]]:
        path = output / self.checkpoints / "metrics.jsonl"
        if not path.is_file():
            return []
        rows = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                # The last line of a process that was killed while it wrote.
                continue
        return rows


def script_environment(work: Path) -> dict[str, str]:
    """Of scripts that run in miniature: CPU, no network, compiled functions kept from one to the next.

    They run for a moment, so optimisations of them would take more time than they save.
    """
    return dict(os.environ) | {
        # For the comparison; the scripts put their own folder's runtime first.
        "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK_TO_COMPILE,
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(work / CACHE)),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # A cache of GPUs, whose path would be a part of each key: a copied folder would be of no use.
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def claim(folder: Path) -> Path:
    """A folder to work in: a new or empty one, or one of an earlier run, cleared but for its cache.

    Raises:
        ArtifactError: when it holds something else.
    """
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder", "give a new folder")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / MARKER).is_file():
            raise ArtifactError(f"{folder} holds other files than an earlier run's", "give a new folder")
        for entry in folder.iterdir():
            if entry.is_dir() and entry.name != CACHE:
                shutil.rmtree(entry)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    return folder


def require_packages(what: str) -> None:
    """Checks that what trains and merges is installed, without importing it.

    Raises:
        ArtifactError: naming what is missing.
    """
    missing = missing_packages(PACKAGES)
    if missing:
        raise ArtifactError(
            f"{what} needs the packages that train: {', '.join(missing)} cannot be imported",
            "pip install 'recipec[train]'",
        )


def missing_packages(names: Iterable[str]) -> list[str]:
    """Those that cannot be imported, found without importing them."""
    return [name for name in names if find_spec(name) is None]


def done_line(text: str) -> dict[str, str]:
    """The figures of train.py's last line, "done: steps=40 loss=1.2"; {} without such a line."""
    for line in reversed(text.splitlines()):
        if line.startswith("done:"):
            return dict(item.split("=", 1) for item in line.split()[1:] if "=" in item)
    return {}


def new_console(stream: Any = None) -> Console:
    """A console that is wide enough for the table when it is piped."""
    from compiler.terminal import console

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


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _tail(text: str) -> str:
    lines = [line for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return "\n".join(lines[-TAIL:])
