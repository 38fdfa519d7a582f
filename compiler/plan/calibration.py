"""Correct estimates by the step times that probes measured on TPUs.

The measurements are in one file of the plans' cache folder, `calibration.json`. Each generation has one
factor for training adapters and one for training all weights. A factor is the geometric mean of measured over
planned seconds, and multiplies the estimates.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipec.compiler import store
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.libtpu import flags
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.recorded import to_record
from recipec.compiler.pages.numbers import gib_number, milliseconds
from recipec.compiler.plan import rates
from recipec.compiler.plan.results import Estimate, Interval, Plan
from recipec.compiler.wording import plural
from recipec.compiler.writing import write_text

FILE = "calibration.json"
PARTS = ("products", "other", "kernels", "collectives", "copies")
"""The keys of `Timeline.parts` in probe.json. Plans are multiplied by the factor of the whole step; the parts
only explain it."""
VERSION = 1
"""Version of the format of probe.json."""


@dataclass(frozen=True)
class Measured:
    """A step that a probe measured.

    Attributes:
        recipe: a digest of the resolved recipe; a later probe of the same recipe replaces this one.
        generation: the machine's TPU generation.
        lora: whether adapters are trained.
        planned, measured: seconds of a micro-batch, as planned without calibration, and as measured.
        date: date of the probe.
    """

    recipe: str
    generation: str
    lora: bool
    planned: float
    measured: float
    date: str


KEYS = {"found": "measured"}
"""Keys of calibration.json whose field has another name."""


def path() -> Path:
    """Return the path of calibration.json."""
    return store.folder() / FILE


def kept() -> list[Measured]:
    """Return the measurements kept so far; none where the file cannot be read."""
    try:
        rows = json.loads(path().read_text(encoding="utf-8"))
        return [Measured(**{KEYS.get(key, key): value for key, value in row.items()}) for row in rows]
    except (OSError, ValueError, TypeError, AttributeError):
        return []


def keep(rows: Sequence[Measured]) -> None:
    """Add measured steps to the file.

    Raises:
        ArtifactError: when the file cannot be written.
    """
    every = {row.recipe: row for row in (*kept(), *rows)}
    path().parent.mkdir(parents=True, exist_ok=True)
    names = {field: key for key, field in KEYS.items()}
    written = [{names.get(key, key): value for key, value in asdict(row).items()} for row in every.values()]
    write_text(path(), json.dumps(written, indent=1) + "\n")


def known(generation: str, lora: bool) -> tuple[float, Interval]:
    """Return the factor of a generation's estimates, and their interval; 1 without a probe of it."""
    published = rates.interval(generation, lora)
    rows = [row for row in kept() if (row.generation, row.lora) == (generation, lora)]
    if not rows:
        return 1.0, published
    factor = math.exp(sum(math.log(row.measured / row.planned) for row in rows) / len(rows))
    basis = f"{plural(len(rows), 'probe')} on {generation} took {factor:.3g} times the estimate: {path()}."
    return factor, Interval(published.low, published.high, f"{basis} {published.basis}")


def digest(program: Program) -> str:
    """Return the digest of the resolved recipe, as probe.json has it."""
    text = json.dumps(to_record(program.recipe), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read(file: Path) -> dict[str, Any]:
    """Read a probe.json.

    Raises:
        ArtifactError: when the file is no probe.json, or its measurements cannot be used.
    """
    origin = "an artifact's probe.py writes it; launch/tpu-vm.sh probe copies it here"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["probe"] != VERSION:
            raise ArtifactError(f"{file}: a probe of version {content['probe']}", "probe again")
        platform, problems, times = (
            content["machine"]["platform"],
            content["problems"],
            content.get("time", {}),
        )
        parts = dict(times.get("parts") or {})
    except OSError as error:
        raise ArtifactError(f"{file}: {error.strerror or error}", origin) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ArtifactError(f"{file}: is not the file of a probe", origin) from None
    if platform != "tpu":
        raise ArtifactError(
            f"{file}: is from a {platform}, but plans are for TPUs", "probe on the recipe's machine"
        )
    if problems:
        raise ArtifactError(f"{file}: {problems[0]}", "times of a machine with wrong numbers are not used")
    if not all(map(_finite, parts.values())):
        raise ArtifactError(f"{file}: parts of a step are not times", origin)
    seconds = times.get("micro_batch_seconds")
    if not _finite(seconds) or not seconds:
        raise ArtifactError(f"{file}: has no time of the step", "probe again, and wait until it ends")
    return dict(content)


def _finite(seconds: Any) -> bool:
    return isinstance(seconds, int | float) and 0 <= seconds < math.inf


def measured(program: Program, probe: Mapping[str, Any], plan: Plan) -> Measured:
    """Combine a probe's measurement with the plan of its recipe."""
    return Measured(
        probe["recipe"],
        program.accelerator.generation,
        program.lora is not None,
        plan.estimate.timeline.seconds,
        probe["time"]["micro_batch_seconds"],
        str(probe["date"]),
    )


def compared(program: Program, probe: Mapping[str, Any], plan: Plan, row: Measured) -> Iterator[str]:
    """Compare measured with planned figures, one line each, with a cause if the time is off the interval."""
    interval, ratio = rates.interval(row.generation, row.lora), row.measured / row.planned
    inside = interval.low <= ratio <= interval.high
    yield (
        f"a micro-batch took {milliseconds(row.measured)}, {ratio:.3f} times the planned "
        f"{milliseconds(row.planned)}; the interval is {interval.low:.3f} to {interval.high:.3f}"
    )
    yield from (
        f"  {words} {milliseconds(measured)}, planned {milliseconds(planned)}"
        for words, measured, planned in _parts(probe, plan)
        if measured or planned
    )
    used, peak = plan.estimate.memory.used, probe["time"].get("peak_bytes")
    if peak is not None:
        yield f"HBM at its peak: {gib_number(peak)} GiB, planned {gib_number(used)}"
    if not inside:
        causes = [cause for cause in _causes(program, probe, plan, row) if cause]
        yield f"outside the interval; a likely cause: {causes[0] if causes else 'none that the files show'}"


def _causes(program: Program, probe: Mapping[str, Any], plan: Plan, row: Measured) -> Iterator[str]:
    """Yield possible causes of the difference, the likeliest first."""
    there = probe.get("versions", {})
    other = [
        name for name, version in plan.versions.items() if version and there.get(name, version) != version
    ]
    if other:
        name = other[0]
        yield f"the probe ran {name} {there[name]}, and the plan was compiled with {plan.versions[name]}"
    wanted, had = set(flags(program)), set(probe["machine"].get("flags", ()))
    if wanted != had:
        yield f"the probe ran with other flags of libtpu: {', '.join(sorted(wanted ^ had)[:3])}"
    yield from probe.get("product", {}).get("slow", ()) if row.measured > row.planned else ()
    yield from _differing(probe, plan, row)
    yield from _hidden(plan.estimate, row)
    if row.measured < row.planned:
        yield f"products or kernels of this shape reach more than those of published runs on {row.generation}"


def _parts(probe: Mapping[str, Any], plan: Plan) -> list[tuple[str, float, float]]:
    """Return each part's name, measured seconds and planned seconds; [] where the probe traced no parts."""
    parts = probe["time"].get("parts") or {}
    planned = plan.estimate.timeline.parts.items()
    rows = [
        (words, parts.get(key, 0.0), seconds) for key, (words, seconds) in zip(PARTS, planned, strict=True)
    ]
    return [*rows, ("no operation", parts.get("idle", 0.0), 0.0)] if parts else []


def _differing(probe: Mapping[str, Any], plan: Plan, row: Measured) -> Iterator[str]:
    """Yield the parts that each explain at least half of the difference."""
    apart = row.measured - row.planned
    for words, measured, planned in _parts(probe, plan):
        if (measured - planned) * apart > 0 and 2 * abs(measured - planned) >= abs(apart):
            yield f"{words} took {milliseconds(measured)}, and {milliseconds(planned)} were planned"


def _hidden(estimate: Estimate, row: Measured) -> Iterator[str]:
    hidden = sum(transfer.seconds - transfer.exposed for transfer in estimate.timeline.transfers)
    if 0 < row.measured - row.planned <= hidden:
        yield f"transfers that the plan runs in parallel with products, {milliseconds(hidden)} in all, wait"
