"""What the commands that compile a step share: refusals, and the line of progress."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from recipec.compiler import store
from recipec.compiler.checks.backends import diagnosed
from recipec.compiler.cli.arguments.shared_arguments import Format
from recipec.compiler.cli.printing import fail
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.planner import CompileError, check_target
from recipec.compiler.plan.pool import Progress
from recipec.compiler.terminal import on_ctrl_c
from recipec.compiler.wording import plural
from recipec.runtime.progress import Progress as Line
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic, has_errors
from recipec.spec.load import Loaded, locate


def refuse_backend(loaded: Loaded, program: Program, backend: Backend, format: Format) -> None:
    """End the command if nothing can be compiled, or if the backend cannot train the recipe."""
    check_target(program, backend)
    refusals = locate(diagnosed(program, (backend,)), loaded.sources)
    if has_errors(refusals):
        fail(refusals, format)


E1008 = Code(
    "E1008",
    "flag value that libtpu refuses",
    cause="libtpu has the flag, but the value has another type. libtpu reports this when it is loaded.",
    cure="Use a value of the flag's type.",
)


@contextmanager
def refused_flags(loaded: Loaded, format: Format) -> Iterator[None]:
    """Report a value of the recipe's `xla` that libtpu refused, at its line in the recipe."""
    try:
        yield
    except CompileError as error:
        path = f"xla.flags.{error.failed.flag}"
        if not error.failed.flag or loaded.sources.origin(path).kind == "default":
            raise
        fail(locate([Diagnostic(E1008, str(error), path, error.help or "")], loaded.sources), format)


@contextmanager
def progress_line(label: str) -> Iterator[Progress]:
    """Show the progress of the compiles in a line on stderr."""
    on_ctrl_c(kept)
    with Line(label, 1.0, foreseen=False) as line:

        def show(share: float, what: str) -> None:
            line.label = f"{label}, {what}"
            if share < line.done:  # what comes next: a search after the plan
                line.done, line.started = 0.0, time.monotonic()
            line.advance(share - line.done)

        yield show


def kept() -> str:
    """Say which results Ctrl-C keeps."""
    count = len(store.put_now)
    kept = f"{plural(count, 'result')} of this command" if count else "what was compiled before"
    return f"{kept} {'are' if count > 1 else 'is'} kept, and the same command continues from there"
