"""The batches of an evaluation, and the means of their losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..settings import DataSettings, Source
from .batches import Batch, BatchShape, Row, chunked, fill
from .epochs import PackedRows
from .samples import Samples
from .weighted import WeightedEpochs


@dataclass(frozen=True)
class EvalPart:
    """The evaluation batches of one source.

    Attributes:
        name: a unique name of the source.
        batches: numbers of the source's batches among the evaluation batches.
        factor: multiply the sum of their losses by this to get the source's own mean.
    """

    name: str
    batches: slice
    factor: float


def eval_losses(losses: Sequence[float], parts: Sequence[EvalPart]) -> dict[str, float]:
    """Return the mean loss of all targets as `loss`, and the mean of each part under its name.

    Args:
        losses: the loss of each evaluation batch.
    """
    each = np.asarray(losses, np.float64)
    own = {part.name: float(each[part.batches].sum()) * part.factor for part in parts}
    return {"loss": float(each.mean()), **own}


def eval_line(step: int, losses: Mapping[str, float]) -> str:
    """Return the line that a run prints for an evaluation.

    Args:
        losses: the mean as `loss`, and the losses of its sources.
    """
    sources = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items() if name != "loss")
    return f"step {step}: eval_loss {losses['loss']:.4f}" + (f" ({sources})" if sources else "")


def source_names(sources: Sequence[str | Source]) -> list[str]:
    """Return a unique name of each source, never `loss`: the shortest of its path's last part without
    extension, its whole path, or that with a number."""
    paths = [source.path if isinstance(source, Source) else source for source in sources]
    short = [path.rstrip("/").rpartition("/")[2].partition(".")[0] or path for path in paths]
    for names in (short, paths):
        if len({*names, "loss"}) > len(names):
            return names
    return [f"{path} {number}" for number, path in enumerate(paths, 1)]


def rows_by_source(
    samples: Samples, sources: Sequence[str | Source], data: DataSettings
) -> dict[str, PackedRows]:
    """Return the rows of each source that has samples, by its name."""
    out = {}
    for number, name in enumerate(source_names(sources)):
        weights = [float(source == number) for source in range(len(sources))]
        own = WeightedEpochs(samples, data.max_length, data.packing, data.shuffle_seed, weights)
        if own.draws:
            out[name] = own.of(0)
    return out


def evaluation_batches(
    samples: Samples, rows: Mapping[str, Sequence[Row]], shape: BatchShape
) -> tuple[list[Batch], list[EvalPart]]:
    """Build the evaluation batches: every row once, in order, each source in batches of its own.

    The norm is chosen so that the mean of (summed loss / norm) over the batches is the mean loss of a
    target, independent of which batch a target is in.

    Args:
        rows: the rows of each source, by its name.

    Returns:
        The batches, and which of them belong to each source.
    """
    chunks = {name: list(chunked(own, shape.rows)) for name, own in rows.items()}
    weights = samples.weights
    norm = int(weights.sum()) / sum(map(len, chunks.values()))
    batches: list[Batch] = []
    parts = []
    for name, own in chunks.items():
        start, members = len(batches), [i for chunk in own for row in chunk for i in row]
        batches += [fill(samples, chunk, shape, norm, start + i) for i, chunk in enumerate(own)]
        parts.append(EvalPart(name, slice(start, len(batches)), norm / int(weights[members].sum())))
    return batches, parts
