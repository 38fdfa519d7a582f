"""A run, as read from its folder."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.artifacts.artifact import LOCK
from recipec.compiler.errors import ArtifactError
from recipec.compiler.report import samples
from recipec.compiler.report.metrics import Metrics, parse
from recipec.compiler.report.place import Place, existing_place
from recipec.compiler.wording import plural
from recipec.runtime.progress import Progress

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.spec.language import Recipe
    from recipec.spec.load import Loaded

METRICS, FACTS, STATE, MERGES = "metrics.jsonl", "run.json", "state.json", "merges.json"
RECIPE = "recipe.yaml"


@dataclass
class Run:
    """What is known about a run.

    Attributes:
        place: its folder.
        label: its name next to other runs.
        metrics: as logged.
        written: when the metrics were last written; None if not known.
        facts: content of run.json; {} without one.
        ended: content of state.json, which says how the run ended or that it has not; {} without one.
        lock: content of recipe.lock.json; {} without one.
        recipe: resolved, from the lock; None without a lock that this version can read.
        program: of the recipe; None if this version cannot build one.
        loaded: the recipe with the positions of its values; None if its file is not known.
        merges: content of merges.json.
        samples: lines of samples.jsonl.
        notes: sentences on what is missing or was left out.
    """

    place: Place
    label: str
    metrics: Metrics
    written: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    ended: Mapping[str, Any] = field(default_factory=dict)
    lock: Mapping[str, Any] = field(default_factory=dict)
    recipe: Recipe | None = None
    program: Program | None = None
    loaded: Loaded | None = None
    merges: Sequence[Mapping[str, Any]] = ()
    samples: Sequence[Mapping[str, Any]] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The recipe's name, or the folder's."""
        return str(self.facts.get("name") or self.lock.get("name") or self.label)

    @property
    def steps_total(self) -> int | None:
        """Optimizer steps of the whole run; None if not known."""
        data = self.facts.get("data")
        for total in (self.ended.get("total"), data.get("total_steps") if isinstance(data, dict) else None):
            if isinstance(total, int):
                return total
        return self.recipe.train.steps if self.recipe else None

    @property
    def early(self) -> str | None:
        """Why the run finished before its last step; None if it did not."""
        return str(self.ended.get("reason") or "") or None if self.ended.get("state") == "done" else None

    @property
    def starts(self) -> list[Mapping[str, Any]]:
        starts = self.facts.get("starts")
        return [one for one in starts if isinstance(one, dict)] if isinstance(starts, list) else []

    @property
    def resumed_after(self) -> list[int]:
        """Steps from which the run was resumed."""
        return [one["after"] for one in self.starts if isinstance(one.get("after"), int) and one["after"] > 0]

    @property
    def devices(self) -> Mapping[str, Any]:
        found = self.facts.get("devices")
        return found if isinstance(found, dict) else {}

    @property
    def on_cpu(self) -> bool | None:
        """Whether it ran on CPUs; None if not known."""
        platform = self.devices.get("platform")
        if platform is not None:
            return bool(platform == "cpu")
        accelerator = self.recipe.mesh.accelerator if self.recipe else None
        return True if accelerator is not None and accelerator.startswith("cpu") else None

    @property
    def state(self) -> str:
        """The run's state in a phrase, for the badge."""
        last, total = self.metrics.last_step, self.steps_total
        if not self.metrics.series:
            return "no step yet"
        if total is None:
            return f"{plural(last, 'step')} logged"
        if last >= total:
            return f"done: {plural(total, 'step')}"
        if self.early:
            return f"stopped early after {last:,} of {plural(total, 'step')}"
        words = {"stopped": "stopped after", "failed": "failed after"}
        how = words.get(str(self.ended.get("state")), "not finished:")
        return f"{how} {last:,} of {plural(total, 'step')}"

    @property
    def steady(self) -> list[tuple[int, float]]:
        """(step, seconds) pairs, without the first step after each start, whose time includes compilation."""
        first = {after + 1 for after in (0, *self.resumed_after)}
        timed = self.metrics.get("step_seconds").finite
        return [pair for pair in timed if pair[0] not in first] or timed

    @property
    def step_seconds(self) -> float | None:
        """The median time of a steady step."""
        return statistics.median(seconds for _, seconds in self.steady) if self.steady else None

    @property
    def tokens_per_second(self) -> float | None:
        """Real tokens of the steady steps, divided by the steps' time."""
        tokens = dict(self.metrics.get("tokens").finite)
        both = [(tokens[step], seconds) for step, seconds in self.steady if step in tokens]
        seconds = sum(second for _, second in both)
        return sum(count for count, _ in both) / seconds if seconds > 0 else None

    @property
    def hours(self) -> float | None:
        """Hours of all steps, without loading, evaluating and saving."""
        timed = self.metrics.get("step_seconds").finite
        return sum(seconds for _, seconds in timed) / 3600 if timed else None

    @property
    def peak_memory(self) -> float | None:
        """Peak memory in bytes."""
        return max((value for _, value in self.metrics.get("peak_memory_bytes").finite), default=None)


def inside(place: Place) -> list[Place]:
    """Return the folder, or its subfolders that hold runs if it holds none, as `recipe watch` does."""
    if METRICS in place.names():
        return [place]
    inner = [one for one in map(place.below, place.names()) if one.is_folder()]
    return [one for one in inner if METRICS in one.names()] or [place]


def read_runs(names: Sequence[str], recipe: Path | None = None) -> list[Run]:
    """Read runs from their folders.

    Args:
        recipe: file of the first run's recipe, for the positions of its values.

    Raises:
        ArtifactError: when a folder does not exist, or holds no run.
    """
    places = [existing_place(name) for name in names]
    called = labels([place.path for place in places])
    runs: list[Run] = []
    with Progress("reading the runs", len(places)) as progress:
        for place, label in zip(places, called, strict=True):
            run = _read(place, label)
            _find_recipe(run, None if runs else recipe)
            runs.append(run)
            progress.advance(1)
    return runs


def _read(place: Place, label: str) -> Run:
    text = place.text(METRICS)
    lock, facts, ended = place.value(LOCK), place.value(FACTS), place.value(STATE)
    if text is None and lock is None and facts is None:
        raise ArtifactError(
            f"{place.name} holds no run: there is no {METRICS}, no {LOCK} and no {FACTS} in it",
            "give the folder of the run's checkpoints: checkpoint.directory of the recipe, below --output",
        )
    run = Run(place, label, parse(text or ""), place.written(METRICS))
    run.facts = facts if isinstance(facts, dict) else {}
    run.ended = ended if isinstance(ended, dict) else {}
    run.lock = lock if isinstance(lock, dict) else {}
    merges = place.value(MERGES)
    run.merges = [one for one in merges if isinstance(one, dict)] if isinstance(merges, list) else []
    run.samples = samples.parse(place.text(samples.SAMPLES) or "")
    if text is None:
        run.notes.append(f"There is no {METRICS}: nothing was logged yet, or the file was removed.")
    if not run.lock:
        run.notes.append(f"There is no {LOCK} that can be read: the recipe is not known.")
    if not run.facts:
        run.notes.append(
            f"There is no {FACTS} that can be read, as of a run by an earlier version: the data, "
            "the devices and the times at which the run was resumed are not known."
        )
    if run.metrics.unreadable:
        lines = plural(run.metrics.unreadable, "line")
        run.notes.append(f"{lines} of {METRICS} cannot be read, and are left out.")
    if run.metrics.cut:
        run.notes.append(f"The last line of {METRICS} is cut off, and left out.")
    if run.metrics.twice:
        steps = plural(len(run.metrics.twice), "step")
        run.notes.append(f"{steps} were logged more than once; the last values are shown.")
    return run


def _find_recipe(run: Run, given: Path | None) -> None:
    """Read the recipe from the lock, and from its file if one gives the same values."""
    from recipec.compiler.report.recipe import matching, resolved

    if given is not None and not given.is_file():
        raise ArtifactError(f"there is no {given}", "--recipe needs the recipe's YAML file")
    resolved_recipe = run.lock.get("recipe")
    if not isinstance(resolved_recipe, dict):
        return
    found = resolved(resolved_recipe, run.place.path)
    run.recipe, run.program = found.recipe, found.program
    if found.problem:
        run.notes.append(found.problem)
    text = None if given else run.place.text(RECIPE)
    if run.recipe is None or (given is None and text is None):
        return
    run.loaded = matching(run.recipe, given or Path(RECIPE), text)
    if run.loaded is None:
        name = given or f"{run.place.name}/{RECIPE}"
        run.notes.append(f"{name} is not the recipe of this run: its values are not those of {LOCK}.")


def labels(paths: Sequence[str]) -> list[str]:
    """Return the parts of paths in which they differ."""
    parts = [[part for part in path.split("/") if part] for path in paths]
    if len(parts) < 2:
        return [parts[0][-1] if parts and parts[0] else paths[0]] if parts else []
    while all(len(one) > 1 for one in parts) and len({one[-1] for one in parts}) == 1:
        parts = [one[:-1] for one in parts]
    while all(len(one) > 1 for one in parts) and len({one[0] for one in parts}) == 1:
        parts = [one[1:] for one in parts]
    joined = ["/".join(one) or "/" for one in parts]
    return [
        label if joined.count(label) == 1 else f"{label} ({joined[: index + 1].count(label)})"
        for index, label in enumerate(joined)
    ]
