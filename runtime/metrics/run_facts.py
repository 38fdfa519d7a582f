"""What a run tells of itself beside its metrics, for `recipe report` and `recipe watch`.

run.json, which the script that trains writes:

    run            version of this file, 1
    name, script   of the artifact, and which of its scripts trained
    accumulation   micro-batches of each
    data           what became of the data, as `runtime.data.report.DataReport.to_dict` has it
    lengths        of the training samples: a histogram in tokens, and percentiles
    devices        platform, kind, count, processes, memory_bytes of each (null where it is not told)
    starts         each begin of the script: at (UTC), after (the step that it went on from), until, and the
                   devices of it, which need not be those that the run began with

merges.json, which merge.py writes: a list, one entry for each step and folder: at, step, folder, adapter (its
folder, or null), dtype, quantization, bytes, tensors, kept, quantized, and verified: null before --verify, or
what `runtime.merging.verify` found.

recipe.yaml is the artifact's, as it was when the run began. Nothing needs these files to go on: where one
cannot be written, a note says so.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..addresses import path_of, write_whole
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
    """Writes the facts of a run that begins, or goes on.

    Args:
        directory: of the checkpoints, local or gs://.
        artifact: folder of the script; its recipe.yaml, which says where each value comes from, is copied.
        script: "train.py" and the like.
        devices: as above.
        after: the step that it goes on from, 0 at the beginning; then what an earlier run left is dropped.
        until: the step to stop after.
    """
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
    _write(directory, FILE, _json(facts))
    if not after and (artifact / RECIPE).is_file():
        _write(directory, RECIPE, (artifact / RECIPE).read_bytes())


def merged(directory: str | Path, entry: Mapping[str, Any]) -> None:
    """Notes a merge of a run's checkpoint, in place of an earlier one of the same step and folder.

    Args:
        entry: without `at`. What was found of the same merge before stays where `verified` is None.
    """
    found = _read(directory, MERGES)
    entries = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    key = ("step", "folder")
    before = next((one for one in entries if all(one.get(name) == entry[name] for name in key)), None)
    now = {"at": _now(), **entry}
    if before is not None:
        entries.remove(before)
        if entry["verified"] is None and all(before.get(k) == v for k, v in entry.items() if k != "verified"):
            now = before
    _write(directory, MERGES, _json([*entries, now]))


def jax_devices() -> dict[str, Any]:
    """The devices that jax has."""
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
    """How long samples are.

    Args:
        tokens: int64[n] of each.

    Returns:
        "edges" in tokens, one more than "counts", of which each bar holds edge <= length < next edge; and
        "percentiles" by their number. Empty without samples.
    """
    if not len(tokens):
        return {"edges": [], "counts": [], "percentiles": {}}
    low, high = int(tokens.min()), int(tokens.max()) + 1
    width = max(1, -(-(high - low) // BARS))
    edges = np.arange(low, high + width, width)
    counts, _ = np.histogram(tokens, edges)
    found = np.percentile(tokens, PERCENTILES)
    return {
        "edges": edges.tolist(),
        "counts": counts.tolist(),
        "percentiles": {str(name): float(value) for name, value in zip(PERCENTILES, found, strict=True)},
    }


def _read(directory: str | Path, name: str) -> Any:
    """A file's value; None where it is not there, or cannot be read."""
    try:
        return json.loads((path_of(directory) / name).read_text())
    except Exception:  # a bucket's library has errors of its own
        return None


def _json(value: Any) -> bytes:
    """JSON; counts of data that was tokenized before are numpy's."""
    return (json.dumps(value, indent=1, default=lambda one: one.item()) + "\n").encode()


def _write(directory: str | Path, name: str, content: bytes) -> None:
    try:
        write_whole(directory, name, content)
    except UserError as error:
        print(f"note: {directory}/{name}: {error.message}", file=sys.stderr)
    except Exception as error:
        reason = getattr(error, "strerror", None) or error
        print(f"note: {directory}/{name} cannot be written: {reason}", file=sys.stderr)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
