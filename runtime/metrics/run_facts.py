"""Record facts of a run other than its metrics, for `recipe report` and `recipe watch`.

run.json, written by the training script:

    run            version of this file, 1
    name, script   name of the artifact, and which of its scripts trained
    accumulation   micro-batches of an optimizer step
    data           the data's report, from `runtime.data.row_counts.DataReport.to_dict`
    lengths        of the training samples: a histogram in tokens, and percentiles
    devices        platform, kind, count, processes, memory_bytes of each (null if unknown)
    starts         each start of the script: at (UTC), after (the step that it continued from), until, and
                   its devices, which may differ from those at the run's beginning

merges.json, written by merge.py: a list, one entry for each step and folder: at, step, folder, adapter (its
folder, or null), dtype, quantization, bytes, tensors, kept, quantized, and verified: null before --verify, or
the result of `runtime.merging.verify`.

recipe.yaml is a copy of the artifact's from the beginning of the run, or from the last change of its length
or schedule. A run does not need these files: if one cannot be written, a note says so. merge.py reads from
run.json which tokens end an answer (`ends`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..addresses import path_of, reached, write_whole
from ..errors import UserError

if TYPE_CHECKING:
    from ..data.prepare import PreparedData

FILE = "run.json"
MERGES = "merges.json"
RECIPE = "recipe.yaml"
VERSION = 1
BARS = 16
PERCENTILES = (10, 50, 90, 99)


def begin(
    directory: str | Path,
    artifact: Path,
    script: str,
    prepared: PreparedData,
    devices: Mapping[str, Any],
    after: int,
    until: int,
) -> None:
    """Write the facts of a run that begins or continues.

    Args:
        directory: the checkpoint directory, local or gs://.
        artifact: folder of the script; its recipe.yaml, which gives the origin of each value, is copied.
        script: "train.py" and the like.
        devices: as above.
        after: the step that it continues from; 0 at the beginning, which drops an earlier run's files.
        until: the step to stop after.
    """
    with _noted(directory, FILE):
        before = _read(directory, FILE) if after else None
        starts = before.get("starts") if isinstance(before, dict) else None
        facts = {
            "run": VERSION,
            "name": artifact.name,
            "script": script,
            "accumulation": prepared.accumulation,
            "data": prepared.report.to_dict(),
            "lengths": lengths(prepared.samples.lengths),
            "devices": dict(devices),
            "starts": [
                *(starts if isinstance(starts, list) else []),
                {"at": _now(), "after": int(after), "until": int(until), "devices": dict(devices)},
            ],
        }
        write_whole(directory, FILE, _json(facts))
    if not after:
        copy_recipe(directory, artifact)


def copy_recipe(directory: str | Path, artifact: Path) -> None:
    """Copy the artifact's recipe.yaml, if it has one, next to a run's checkpoints."""
    if (artifact / RECIPE).is_file():
        with _noted(directory, RECIPE):
            write_whole(directory, RECIPE, (artifact / RECIPE).read_bytes())


def merged(directory: str | Path, entry: Mapping[str, Any]) -> None:
    """Record a merge of a run's checkpoint, replacing an earlier one of the same step and folder.

    Args:
        entry: without `at`. If `verified` is None, an earlier result for the same merge is kept.
    """
    with _noted(directory, MERGES):
        recorded = _read(directory, MERGES)
        entries = (
            [known for known in recorded if isinstance(known, dict)] if isinstance(recorded, list) else []
        )
        key = ("step", "folder")
        before = next(
            (known for known in entries if all(known.get(name) == entry[name] for name in key)), None
        )
        now = {"at": _now(), **entry}
        if before is not None:
            entries.remove(before)
            same = all(before.get(name) == value for name, value in entry.items() if name != "verified")
            now = before if same and entry["verified"] is None else now
        write_whole(directory, MERGES, _json([*entries, now]))


def ends(directory: str | Path) -> tuple[int, ...] | None:
    """Return the tokens with which a run's training data ends an answer; None if the run did not record them.

    Raises:
        UserError: the directory cannot be reached.
    """
    with reached(directory):
        facts = _read(directory, FILE)
    try:
        return tuple(sorted(map(int, facts["data"]["train"]["ends"])))
    except (TypeError, KeyError, ValueError):
        return None


def jax_devices() -> dict[str, Any]:
    """Return the devices that jax has."""
    import jax

    devices = jax.devices()
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "processes": jax.process_count(),
        "memory_bytes": min((limit for limit in limits if limit), default=None),
    }


def lengths(tokens: np.ndarray) -> dict[str, Any]:
    """Return a histogram and percentiles of samples' lengths.

    Args:
        tokens: int64[n], tokens of each sample.

    Returns:
        "edges" in tokens, one more than "counts": each bar counts edge <= length < next edge; and
        "percentiles" by their number. Empty if there are no samples.
    """
    if not len(tokens):
        return {"edges": [], "counts": [], "percentiles": {}}
    low, high = int(tokens.min()), int(tokens.max()) + 1
    width = max(1, -(-(high - low) // BARS))
    edges = np.arange(low, high + width, width)
    counts, _ = np.histogram(tokens, edges)
    percentiles = np.percentile(tokens, PERCENTILES)
    return {
        "edges": edges.tolist(),
        "counts": counts.tolist(),
        "percentiles": {
            str(name): float(value) for name, value in zip(PERCENTILES, percentiles, strict=True)
        },
    }


def _read(directory: str | Path, name: str) -> Any:
    """Return a file's value; None if it does not exist or is damaged. Other errors are raised: a file that
    cannot be read at the moment must not be replaced."""
    try:
        return json.loads((path_of(directory) / name).read_text())
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def _json(value: Any) -> bytes:
    """Return JSON; counts of data that was tokenized earlier are NumPy integers."""
    return (json.dumps(value, indent=1, default=lambda scalar: scalar.item()) + "\n").encode()


@contextmanager
def _noted(directory: str | Path, name: str) -> Iterator[None]:
    """Turn a failure to write a file within the block into a note."""
    try:
        yield
    except UserError as error:
        print(f"note: {directory}/{name}: {error.message}", file=sys.stderr)
    except Exception as error:  # a bucket's library has its own errors
        reason = getattr(error, "strerror", None) or error
        print(f"note: {directory}/{name} cannot be written: {reason}", file=sys.stderr)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
