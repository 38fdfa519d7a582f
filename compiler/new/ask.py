"""Ask on a terminal for what the flags of `recipe new` leave open."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path
from typing import Any

import typer

from recipec.compiler import catalog
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.hardware import Accelerator
from recipec.compiler.new.data_source import PLACEHOLDER
from recipec.compiler.new.draft import Probe
from recipec.compiler.new.fetched_models import completed
from recipec.compiler.new.machines import (
    Fit,
    cheapest,
    fit,
    generation_of,
    largest,
    machines,
    named,
    of_generation,
)
from recipec.compiler.pages import text
from recipec.compiler.pages.document import Document, Table, Text, sheet
from recipec.compiler.pages.numbers import memory_size

NO_SERVER = "none"


def possible() -> bool:
    """Return whether a user can be asked."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def model(check: Callable[[str], Probe]) -> str:
    """Ask for a model's id or directory.

    Args:
        check: raises ArtifactError for text that is not a model.
    """
    known = list(catalog.entries())
    print("Which model? A Hugging Face id, or a directory with a checkpoint. Tab completes.")

    def checked(text: str) -> str:
        whole = completed(text.strip())
        _or_again(check, whole)
        return whole

    with _completing(lambda start: [name for name in known if name.lower().startswith(start.lower())]):
        return str(_prompt("Model", checked))


def accelerator(probe: Probe, method: str | None) -> Accelerator:
    """Ask for a machine on which the model fits; list the others as too small."""
    fits = [fit(probe, machine, method) for machine in machines()]
    fitting = {fitted.accelerator.name: fitted for fitted in fits if fitted.method}
    if not fitting:
        raise ArtifactError(
            f"{probe.program.recipe.model.id} fits no machine of one host", "choose a smaller model"
        )
    small = [fitted.accelerator.name for fitted in fits if not fitted.method]
    text.show(_machines(list(fitting.values()), small))

    def machine_of(text: str) -> Accelerator:
        generation = generation_of(text)
        return named(text) if generation is None else of_generation(probe, generation, method)

    def checked(text: str) -> Accelerator:
        machine: Accelerator = _or_again(machine_of, text)
        if fit(probe, machine, method).method is None:
            raise typer.BadParameter(f"{machine.name} is too small: choose one of the table")
        return machine

    with _completing(lambda start: [name for name in fitting if name.startswith(start)]):
        return _prompt("Accelerator", checked, default=cheapest(list(fitting.values())).name)


def data(look: Callable[[str], Any]) -> Any:
    """Ask for the data, and return the result of `look`, which raises ArtifactError for an invalid answer."""
    print("Where is the data? A file (.jsonl, .json, .csv, .parquet, ...), or hf://OWNER/NAME.")
    print(f"Press Enter to use {PLACEHOLDER} and add the file later.")

    def files(start: str) -> list[str]:
        return [f"{name}/" if Path(name).is_dir() else name for name in sorted(glob(f"{start}*"))]

    with _completing(files):
        return _prompt("Data", lambda text: _or_again(look, text.strip()), default=PLACEHOLDER)


def choice(question: str, choices: Sequence[str], label: str, default: str | None = None) -> str:
    """Ask for one of several words."""

    def checked(text: str) -> str:
        if text.strip() not in choices:
            raise typer.BadParameter(f"one of {', '.join(choices)}")
        return text.strip()

    print(f"{question} {', '.join(choices)}.")
    with _completing(lambda start: [word for word in choices if word.startswith(start)]):
        return str(_prompt(label, checked, default=default))


def serve() -> Accelerator | None:
    """Ask for the machine to serve on, None for none."""
    print(f"Serve it with vLLM? On which TPU, such as v6e-8 or v5e-8; or {NO_SERVER}.")
    names = [machine.name for machine in machines() if machine.platform == "tpu"]
    with _completing(lambda start: [name for name in [*names, NO_SERVER] if name.startswith(start)]):
        return _prompt("Serve on", lambda text: _or_again(server, text), default=NO_SERVER)


def server(text: str) -> Accelerator | None:
    """Return the machine named by --serve.

    Raises:
        ArtifactError: when it is not a machine that can serve.
    """
    if text.strip() == NO_SERVER:
        return None
    generation = generation_of(text)
    machine = named(text) if generation is None else largest(generation)
    if machine.platform != "tpu":
        raise ArtifactError(f"vllm-tpu does not serve on {machine.name}", f"name a TPU, or {NO_SERVER}")
    return machine


def confirm(question: str) -> bool:
    """Ask for yes or no; the default is no."""
    try:
        return typer.confirm(question, default=False)
    except typer.Abort:
        raise KeyboardInterrupt from None


def _prompt(label: str, checked: Callable[[str], Any], default: str | None = None) -> Any:
    try:
        return typer.prompt(label, default=default, value_proc=checked)
    except typer.Abort:  # Ctrl-C or Ctrl-D
        raise KeyboardInterrupt from None


def _or_again(check: Callable[[str], Any], text: str) -> Any:
    """Return the result of a check of an answer, or ask again if the check rejects it."""
    try:
        return check(text)
    except ArtifactError as error:
        raise typer.BadParameter(f"{error}; {error.help}" if error.help else str(error)) from None


def _machines(fitting: Sequence[Fit], small: Sequence[str]) -> Document:
    """Return the machines: their chips, each device's memory, their list price and the method that fits."""
    rows = []
    for fitted in fitting:
        machine, price = fitted.accelerator, fitted.accelerator.usd_per_hour
        tpu = machine.platform == "tpu"
        rows.append(
            [
                machine.name,
                str(machine.chips) if tpu else "-",
                memory_size(machine.hbm_bytes_per_device) if tpu else "-",
                f"{price:.2f}" if price is not None else "-",
                fitted.way(),
            ]
        )
    table = Table(("name", "chips", "GiB", "US$/h", "by"), rows, words=(4,))
    sentences = [Text(f"too small: {', '.join(small)}")] if small else []
    return sheet("Machines on which it fits by calculation", [table, *sentences])


@contextmanager
def _completing(words: Callable[[str], list[str]]) -> Iterator[None]:
    """Let Tab complete answers within the block, if this Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    before, delimiters = readline.get_completer(), readline.get_completer_delims()

    def complete(text: str, state: int) -> str | None:
        with suppress(OSError):
            completions = words(text)
            return completions[state] if state < len(completions) else None
        return None

    readline.set_completer(complete)
    readline.set_completer_delims("")
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_completer(before)
        readline.set_completer_delims(delimiters)
