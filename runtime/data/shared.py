"""Count the samples that occur twice: in evaluation and training data, or in several training sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy as np

from ..settings import DataSettings
from .samples import Samples


def fingerprints(samples: Samples) -> np.ndarray:
    """Return uint64[n / group], a hash of the tokens of each group of samples."""
    tokens = np.ascontiguousarray(samples.tokens, np.int32).view(np.uint8).data
    offsets = (4 * samples.offsets).tolist()
    group, lengths = samples.group, samples.lengths
    out = np.empty(len(samples) // group, np.uint64)
    for number, first in enumerate(range(0, len(samples), group)):
        digest = blake2b(tokens[offsets[first] : offsets[first + group]], digest_size=8)
        if group > 1:
            digest.update(lengths[first : first + group].tobytes())
        out[number] = int.from_bytes(digest.digest(), "little")
    return out


def common(held_out: np.ndarray, trained: np.ndarray) -> int:
    """Return how many of the first fingerprints are among the second."""
    return int(np.isin(held_out, trained).sum())


def repeated(hashes: np.ndarray, sources: np.ndarray) -> Mapping[tuple[int, int], int]:
    """Return how many groups of a source are also in an earlier one, by the numbers of the two.

    A group that several earlier sources have is counted for the first of them.

    Args:
        hashes: the groups' fingerprints.
        sources: the source of each group.
    """
    order = np.lexsort((sources, hashes))
    values, owners = hashes[order], sources[order]
    begins = np.diff(values, prepend=values[:1] ^ np.uint64(1)) != 0
    first = np.maximum.accumulate(np.where(begins, np.arange(len(values)), 0))
    pairs = np.stack([owners[first], owners])[:, owners[first] != owners]
    kinds, counts = np.unique(pairs, axis=1, return_counts=True)
    return {(int(a), int(b)): int(count) for (a, b), count in zip(kinds.T, counts, strict=True)}


def repeated_notes(data: DataSettings, samples: Samples, hashes: np.ndarray) -> list[str]:
    """Return a sentence for each two sources of data.train that have samples in common.

    Args:
        hashes: the fingerprints of the samples.
    """
    paths = [source if isinstance(source, str) else source.path for source in data.train]
    return [
        f"{count:,} samples of data.train[{second}], {paths[second]}, are also in data.train[{first}], "
        f"{paths[first]}"
        for (first, second), count in repeated(hashes, samples.sources[:: samples.group]).items()
    ]


def evaluation_warning(count: int, samples: int, chooses: Sequence[str] = (), window: str = "") -> str:
    """Return what to say of evaluation samples that are trained on, "" if there are none.

    Args:
        count, samples: those that are trained on, and all.
        chooses: the recipe's keys that choose a step by the evaluation loss.
        window: the name of the window of a stream that they were compared with, "" for all training data.
    """
    if not count:
        return ""
    how = f"all {samples:,}" if count == samples else f"{count:,} of the {samples:,}"
    where = f", in {window}" if window else ""
    out = f"{how} evaluation samples are also trained on{where}: their loss says nothing about new samples"
    if chooses:
        out += f", and {' and '.join(chooses)} would choose the step that knows them best"
    return out
