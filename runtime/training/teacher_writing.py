"""Write a teacher's log-probabilities once, for runs that learn from them without the teacher."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ..data.batches import BatchShape, chunked, fill
from ..data.epochs import Epochs
from ..data.samples import Samples
from ..data.stored_teacher import DESCRIPTION, EVAL, TRAIN, Writing
from ..errors import UserError, say
from ..model.loading import Built
from ..model.sharding import Rows
from ..progress import Progress
from ..sections import Distill
from ..settings import RunSettings
from .losses import top_logps
from .script_arguments import Arguments
from .session import Session
from .teacher import build_teacher, recorded_teacher


def to_write(arguments: Arguments, settings: RunSettings) -> RunSettings:
    """Return the settings of a run of train.py that writes log-probabilities instead of training; the same
    ones if the recipe reads none, which `write_teacher` refuses."""
    distill = settings.train.distill
    if distill is None or distill.stored is None:
        return settings
    folder = str((arguments.data_dir / distill.stored).resolve())
    return replace(
        settings,
        train=replace(settings.train, distill=replace(distill, stored=None)),
        checkpoint=replace(settings.checkpoint, directory=folder, local=None),
    )


def write_teacher(session: Session, settings: RunSettings) -> int:
    """Compute the teacher at each target of the data, and write the folder; return the exit status.

    Args:
        settings: from `to_write`.

    Raises:
        UserError: the recipe reads none, or as `build_teacher` and `Writing`.
    """
    distill, prepared, folder = settings.train.distill, session.prepared, Path(session.directory)
    if distill is None or settings.checkpoint.directory != session.directory:
        raise UserError(
            "--write-teacher: the recipe reads no stored teacher", "set train.distill.stored to a folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DESCRIPTION).unlink(missing_ok=True)
    parts = {TRAIN: prepared.samples}
    if prepared.held_out is not None:
        parts[EVAL] = prepared.held_out
    with session.mesh:
        teacher = build_teacher(session, settings)
        vocabulary = min(teacher.forward.architecture.vocab_size, session.base.architecture.vocab_size)
        about: dict[str, Any] = {"top_k": distill.top_k, "temperature": distill.temperature}
        if distill.top_k >= vocabulary:
            raise UserError(
                f"train.distill.top_k {distill.top_k:,} leaves no other token of {vocabulary:,}",
                f"top_k: {min(64, vocabulary - 1)}",
            )
        compute = jit_likeliest(teacher, session, distill, vocabulary)
        about["teacher"] = dict(recorded_teacher(session.directory))
        wanted = {name: about[name] for name in ("temperature", "teacher")}
        for split, samples in parts.items():
            about[split] = _write(folder, split, samples, session, settings, compute, wanted)
    if session.hosts.first:
        (folder / DESCRIPTION).write_text(json.dumps(about, indent=2) + "\n", "utf-8")
        count = sum(about[split]["targets"] for split in parts)
        print(f"done: {folder} has the teacher's {distill.top_k} likeliest tokens at {count:,} targets")
    return 0


def jit_likeliest(teacher: Built, session: Session, distill: Distill, vocabulary: int) -> Any:
    """Compile batch -> the likeliest tokens and their log-probabilities, whole on every device.

    Args:
        vocabulary: the number of tokens that both models have.
    """
    graph, state = nnx.split(teacher.model)

    def run(state: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rows = [batch[name] for name in ("tokens", "positions", "segment_ids")]
        about = distill.temperature, vocabulary
        return top_logps(teacher.forward, nnx.merge(graph, state), rows, distill.top_k, about)

    compiled = jax.jit(run, out_shardings=NamedSharding(session.mesh, PartitionSpec()))
    return lambda batch: compiled(state, batch)


def _write(
    folder: Path,
    split: str,
    samples: Samples,
    session: Session,
    settings: RunSettings,
    compute: Any,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Write a split, each of its samples once, behind the rows that an interrupted writing left.

    Args:
        about: of `Writing`.
    """
    data, total, distill = settings.data, session.prepared.rows, settings.train.distill
    assert distill is not None
    once = [1.0] * (int(samples.sources.max()) + 1)
    rows = Epochs(samples, data.max_length, data.packing, None, once).of(0)
    placing, shape = Rows.of(session.mesh, total), BatchShape(total, data.max_length, 0)
    about = {**about, "packing": data.packing, "max_length": data.max_length}
    writing = Writing(folder, split, samples, distill.top_k, about) if session.hosts.first else None
    done = session.hosts.agree(f"teacher/{split}", lambda: 0 if writing is None else writing.done)
    start = done // total * total
    if start:
        say(f"note: going on with the teacher of {split} behind {start:,} of {len(rows):,} rows")
    with Progress(f"computing the teacher, {split}", 1.0) as progress:
        progress.advance(start / len(rows))
        for number, chunk in enumerate(itertools.islice(chunked(rows, total), start // total, None), 1):
            here = [chunk[row] if row < len(chunk) else () for row in placing.here]
            batch = fill(samples, here, replace(shape, rows=len(here)), 1.0, 0)
            tokens, logps = (np.asarray(array) for array in compute(placing.place(batch)))
            if writing is not None:
                for place, row in enumerate(chunk):
                    writing.add(row, tokens[place], logps[place])
                writing.record(min(start + number * total, len(rows)))
            progress.advance(len(chunk) / len(rows))
    return {} if writing is None else writing.end()
