"""A run, as read from its folder."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.json_value import json_value
from recipec.compiler.report.live import DONE, FAILED, STOPPED, LiveRun, positive
from recipec.compiler.report.run_folder import METRICS, Folder, existing_folder
from recipec.compiler.report.run_values import matching, resolved
from recipec.compiler.terminal import each
from recipec.compiler.wording import plural
from recipec.runtime.checkpoints.record import LOCK, renamed
from recipec.runtime.metrics.loggers import CRITERIA, LOSS, Criterion

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.spec.language import Recipe
    from recipec.spec.load import Loaded

FACTS, MERGES, GENERATIONS, RECIPE = "run.json", "merges.json", "generations.jsonl", "recipe.yaml"


class ReportedRun(LiveRun):
    """What is known about a run.

    Args:
        folder: of its checkpoints.
        label: its name next to other runs.
        recipe: file of its recipe, for the positions of its values; None for the one in the folder.

    Attributes:
        facts: content of run.json; {} without one.
        recipe: resolved, from the lock; None without a lock that this version can read.
        program: of the recipe; None if this version cannot build one.
        loaded: the recipe with the positions of its values; None if its file is not known.
        merges: content of merges.json.
        generations: lines of generations.jsonl.
        notes: sentences on what is missing or was left out.

    Raises:
        ArtifactError: when the folder holds no run, or the recipe does not exist.
    """

    recipe: Recipe | None = None
    program: Program | None = None
    loaded: Loaded | None = None

    def __init__(self, folder: Folder, label: str, recipe: Path | None = None) -> None:
        super().__init__(folder)
        self.label = label
        self.update()
        self.facts = folder.object(FACTS)
        if self.logged is None and not self.lock and not self.facts:
            raise ArtifactError(
                f"{folder.name} holds no run: there is no {METRICS}, no {LOCK} and no {FACTS} in it",
                "give the folder of the run's checkpoints: the recipe's checkpoint.directory, below --output",
            )
        merges = folder.value(MERGES)
        self.merges = (
            [merge for merge in merges if isinstance(merge, dict)] if isinstance(merges, list) else []
        )
        lines = (folder.text(GENERATIONS) or "").split("\n")  # splitlines() would cut within an answer
        values = map(json_value, lines)
        self.generations = [
            value for value in values if isinstance(value, dict) and type(value.get("step")) is int
        ]
        self.notes = list(self._missing())
        if recipe is not None and not recipe.is_file():
            raise ArtifactError(f"there is no {recipe}", "--recipe needs the recipe's YAML file")
        if isinstance(self.lock.get("recipe"), dict):
            self._find_recipe(recipe)

    def _missing(self) -> Iterator[str]:
        """Yield sentences on what is missing, or was left out of the metrics."""
        if self.logged is None:
            yield f"There is no {METRICS}: nothing was logged yet, or the file was removed."
        if not self.lock:
            yield f"There is no {LOCK} that can be read: the recipe is not known."
        if not self.facts:
            yield (
                f"There is no {FACTS} that can be read, as of a run by an earlier version: the data, "
                "the devices and the times at which the run was resumed are not known."
            )
        if self.metrics.unreadable:
            lines = plural(self.metrics.unreadable, "line")
            yield f"{lines} of {METRICS} cannot be read, and are left out."
        if self.metrics.rest.strip():
            yield f"The last line of {METRICS} is cut off, and left out."
        if self.metrics.twice:
            steps = plural(len(self.metrics.twice), "step")
            yield f"{steps} were logged more than once; the last values are shown."

    def _find_recipe(self, path: Path | None) -> None:
        """Read the recipe from the lock, and from its file if one gives the same values."""
        self.recipe, self.program, problem = resolved(renamed(self.lock["recipe"]), self.folder.path)
        self.notes += [problem] if problem else []
        text = None if path else self.folder.text(RECIPE)
        if self.recipe is None or (path is None and text is None):
            return
        self.loaded = matching(self.recipe, path or Path(RECIPE), text)
        if self.loaded is None:
            name = path or f"{self.folder.name}/{RECIPE}"
            self.notes.append(f"{name} is not the recipe of this run: its values are not those of {LOCK}.")

    @property
    def name(self) -> str:
        """The recipe's name, or the folder's."""
        return str(self.facts.get("name") or self.lock.get("name") or self.label)

    @property
    def criterion(self) -> Criterion:
        """By what its evaluations are compared."""
        measured = (criterion for criterion in CRITERIA if self.metrics.get(criterion.name).finite)
        return next(measured, LOSS)

    @property
    def evaluated(self) -> Sequence[tuple[int, float]]:
        """The step and the result of each evaluation that has a finite one."""
        return self.metrics.get(self.criterion.name).finite

    @property
    def best(self) -> tuple[int, float] | None:
        """The first of its best evaluations."""
        cost = self.criterion.cost
        return min(self.evaluated, key=lambda pair: (cost(pair[1]), pair[0]), default=None)

    @property
    def total(self) -> int | None:
        """Optimizer steps of the whole run; None if not known."""
        totals = self.state.get("total"), self.data.get("total_steps"), self.recorded("train", "steps")
        return next(filter(None, map(positive, totals)), None)

    @property
    def data(self) -> Mapping[str, Any]:
        """What run.json says about the data; {} for nothing."""
        facts = self.facts.get("data")
        return facts if isinstance(facts, dict) else {}

    @property
    def written(self) -> str | None:
        """When the metrics were last written, in UTC; None at an address, or if it is not known."""
        if self.folder.system or self.logged is None or self.logged.changed is None:
            return None
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.logged.changed))

    @property
    def early(self) -> str | None:
        """Why the run finished before its last step; None if it did not."""
        return self.reason or None if self.state.get("state") == DONE else None

    @property
    def starts(self) -> list[Mapping[str, Any]]:
        starts = self.facts.get("starts")
        return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []

    @property
    def resumed_after(self) -> list[int]:
        """Steps from which the run was resumed."""
        return [
            start["after"]
            for start in self.starts
            if isinstance(start.get("after"), int) and start["after"] > 0
        ]

    @property
    def devices(self) -> Mapping[str, Any]:
        device_facts = self.facts.get("devices")
        return device_facts if isinstance(device_facts, dict) else {}

    @property
    def on_cpu(self) -> bool | None:
        """Whether it ran on CPUs; None if not known."""
        platform = self.devices.get("platform")
        if platform is not None:
            return bool(platform == "cpu")
        accelerator = self.recipe.mesh.accelerator if self.recipe else None
        return True if accelerator is not None and accelerator.startswith("cpu") else None

    @property
    def badge(self) -> str:
        """The run's state in a phrase."""
        last, total = self.metrics.last_step, self.total
        if not self.metrics.series:
            return "no step yet"
        if total is None:
            return f"{plural(last, 'step')} logged"
        if last >= total:
            return f"done: {plural(total, 'step')}"
        if self.early:
            return f"stopped early after {last:,} of {plural(total, 'step')}"
        how = f"{self.outcome} after" if self.outcome in (STOPPED, FAILED) else "not finished:"
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


def read_runs(names: Sequence[str], recipe: Path | None = None) -> list[ReportedRun]:
    """Read runs from their folders.

    Args:
        recipe: file of the first run's recipe, for the positions of its values.

    Raises:
        ArtifactError: when a folder does not exist, or holds no run.
    """
    folders = [existing_folder(name) for name in names]
    pairs = list(zip(folders, labels([folder.path for folder in folders]), strict=True))
    return [
        ReportedRun(*pair, None if number else recipe)
        for number, pair in enumerate(each("reading the runs", pairs))
    ]


def labels(paths: Sequence[str]) -> list[str]:
    """Return the parts of paths in which they differ."""
    parts = [[part for part in path.split("/") if part] for path in paths]
    if len(parts) < 2:
        return [parts[0][-1] if parts and parts[0] else paths[0]] if parts else []
    while all(len(part) > 1 for part in parts) and len({part[-1] for part in parts}) == 1:
        parts = [part[:-1] for part in parts]
    while all(len(part) > 1 for part in parts) and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    joined = ["/".join(part) or "/" for part in parts]
    return [
        label if joined.count(label) == 1 else f"{label} ({joined[: index + 1].count(label)})"
        for index, label in enumerate(joined)
    ]
