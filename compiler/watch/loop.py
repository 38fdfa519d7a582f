"""Watching: runs are looked at again and again, until all of them have ended."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compiler.errors import ArtifactError
from compiler.watch import words
from compiler.watch.places import Place, open_place
from compiler.watch.run import METRICS, WAITING, Run

if TYPE_CHECKING:
    from rich.console import Console

LOCAL, ELSEWHERE = 2.0, 15.0
"""Seconds between two looks at a folder on this machine, and at an address."""
REDRAWN = 0.25
"""Seconds between two drawings of the screen, which a change of its size waits for."""


class Watch:
    """Runs, found in the folders that were given.

    Args:
        folders: paths or addresses: of checkpoints, or a folder that holds such folders.

    Raises:
        ArtifactError: for a path that is a file.
        UserError: when an address cannot be opened.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        for folder in folders:
            if "://" not in folder and Path(folder).expanduser().is_file():
                raise ArtifactError(
                    f"{folder}: a file, not a folder", "give the folder of checkpoints that train.py writes"
                )
        self._places = [open_place(folder) for folder in folders]
        self._found: dict[str, Run] = {}
        self.runs: list[Run] = []

    @property
    def here(self) -> bool:
        """Whether all of it is on this machine."""
        return all(place.here for place in self._places)

    def update(self) -> bool:
        """Looks at all of them; whether there was anything new.

        Raises:
            UserError: when a place cannot be read.
        """
        self.runs = [self._run(name, place) for given in self._places for name, place in _runs_of(given)]
        return any([run.update() for run in self.runs])

    def _run(self, name: str, place: Place) -> Run:
        return self._found.setdefault(name, Run(place))

    @property
    def ended(self) -> bool:
        """Whether none of them goes on."""
        return bool(self.runs) and all(run.ended for run in self.runs)

    @property
    def well(self) -> bool:
        """Whether each goes, or ended as it was asked to."""
        return all(run.well for run in self.runs)


def _runs_of(place: Place) -> list[tuple[str, Place]]:
    """The folder itself when it holds a run, or else those in it that do, or itself again, to wait for."""
    if place.status(METRICS) is None:
        inner = [open_place(f"{place.name.rstrip('/')}/{name}") for name in sorted(place.folders())]
        found = [(one.name, one) for one in inner if one.status(METRICS) is not None]
        if found:
            return found
    return [(place.name, place)]


def watch_once(watch: Watch, as_json: bool, console: Console) -> bool:
    """Shows how the runs stand; whether all of them are well.

    Raises:
        ArtifactError: when there is none in a folder.
    """
    watch.update()
    for run in watch.runs:
        if run.outcome == WAITING and not run.place.exists():
            raise ArtifactError(
                f"{run.place.name}: there is no such folder",
                "give the folder of checkpoints that train.py writes; without --once it is waited for",
            )
    if as_json:
        print(json.dumps([words.as_json(run) for run in watch.runs], indent=2, ensure_ascii=False))
    elif console.is_terminal:
        from compiler.watch.screen import Screen

        console.print(Screen(watch.runs, whole=False))
    else:
        for run in watch.runs:
            print(words.line(run), flush=True)
            _warn(run, ())
    return watch.well


def watch_lines(watch: Watch, interval: float, as_json: bool) -> bool:
    """Prints a line whenever there is something new, until all runs have ended; whether they did well."""
    told: dict[str, tuple[object, ...]] = {}
    warned: dict[str, list[str]] = {}
    while True:
        watch.update()
        for run in watch.runs:
            name = run.place.name
            if told.get(name) != run.told:
                told[name] = run.told
                line = json.dumps(words.as_json(run), ensure_ascii=False) if as_json else words.line(run)
                print(line, flush=True)
            if not as_json:
                _warn(run, warned.get(name, []))
            warned[name] = run.warnings
        if watch.ended:
            return watch.well
        time.sleep(interval)


def watch_screen(watch: Watch, interval: float, console: Console) -> bool:
    """Draws the runs on the terminal until all have ended; whether they did well.

    However it ends, how they stood last stays on the terminal.
    """
    from rich.live import Live

    from compiler.watch.screen import Screen, footer

    watch.update()
    screen = Screen(watch.runs, footer(interval))
    try:
        with Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:
            looked = time.monotonic()
            while not watch.ended:
                if time.monotonic() - looked >= interval:
                    watch.update()
                    looked = time.monotonic()
                screen.runs = watch.runs
                live.update(screen, refresh=True)
                time.sleep(min(REDRAWN, interval))
    finally:
        console.print(Screen(watch.runs, whole=False))
    return watch.well


def _warn(run: Run, told: Sequence[str]) -> None:
    """Prints the warnings that are new; one whose times have changed is not."""
    before = {_kind(text) for text in told}
    for text in run.warnings:
        if _kind(text) not in before:
            print(f"{run.name}: warning: {text}", flush=True)


def _kind(warning: str) -> str:
    return "silent" if warning.startswith("no line for") else warning


def prepare_stdout() -> None:
    """Names and models may hold what the terminal's encoding has not."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
