"""Tokenized samples as flat arrays: the number of objects does not grow with the number of samples.

A sample is one conversation, one text, or one answer of a preference. Fingerprints show which occur twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from ..settings import Source
from .formats import COLUMNS, PROMPT


@dataclass(frozen=True)
class Sample:
    """One conversation or text, tokenized.

    Attributes:
        tokens: int32[n].
        targets: bool[n]; True where the loss is computed. Never the first token: nothing predicts it.
    """

    tokens: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True)
class Samples(Sequence[Sample]):
    """The samples of a split, in the order of its sources.

    Attributes:
        tokens: int32[N], the tokens of all samples, one after the other.
        targets: bool[N].
        offsets: int64[n + 1]; sample i is offsets[i] to offsets[i + 1].
        sources: int32[n], the source of each sample.
        origins: bytes[n], the place of each sample: FILE:LINE and the like, in UTF-8.
        liked: bool[n] for unpaired preferences: whether the answer is desirable; otherwise bool[0].
        columns, column_offsets: uint8[M] and int64[n + 1] for prompts: what rewards read of each, in JSON
            (`formats.columns_of`); otherwise empty, and int64[0].
        picture_offsets: int64[n + 1] if samples may have pictures: the pictures of sample i are
            picture_offsets[i] to picture_offsets[i + 1] of the following; otherwise int64[0].
        places: bytes[m], the place of each picture (`pictures.Picture`), in UTF-8.
        digests: uint64[m], a hash of the bytes of each picture.
        stamps: uint64[m], a hash of what the file system says of it; 0 where it says nothing.
        grids: int32[m, 2], rows and columns of its patches, or of its tiles.
        patches, picture_tokens: int32[m], its patches, and its tokens that features replace.
        group: adjacent samples that form a group, each in its own row: 2 for a preference, the chosen answer
            first.
    """

    tokens: np.ndarray
    targets: np.ndarray
    offsets: np.ndarray
    sources: np.ndarray
    origins: np.ndarray
    liked: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    columns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    column_offsets: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    picture_offsets: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    places: np.ndarray = field(default_factory=lambda: np.zeros(0, "S1"))
    digests: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    stamps: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    grids: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    patches: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    picture_tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    group: int = 1

    def pictures(self, index: int) -> range:
        """Return the numbers of a sample's pictures."""
        if not len(self.picture_offsets):
            return range(0)
        return range(int(self.picture_offsets[index]), int(self.picture_offsets[index + 1]))

    @property
    def picture_counts(self) -> np.ndarray:
        """Return int64[n]: the number of pictures of each sample."""
        if not len(self.picture_offsets):
            return np.zeros(len(self), np.int64)
        return np.diff(self.picture_offsets)

    @cached_property
    def patch_counts(self) -> np.ndarray:
        """Return int64[n]: the number of patches of each sample."""
        if not len(self.picture_offsets):
            return np.zeros(len(self), np.int64)
        before = np.concatenate([[0], np.cumsum(self.patches, dtype=np.int64)])
        return before[self.picture_offsets[1:]] - before[self.picture_offsets[:-1]]

    @cached_property
    def weights(self) -> np.ndarray:
        """Return int64[n / group]: each group's weight in a mean: its targets, or 1 if answers are judged."""
        judged = self.group > 1 or len(self.liked) or len(self.column_offsets)
        return np.ones(len(self) // self.group, np.int64) if judged else self.target_counts

    def members(self, group: int) -> list[int]:
        """Return the samples of a group."""
        return list(range(group * self.group, (group + 1) * self.group))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = slice(self.offsets[index], self.offsets[index + 1])
        return Sample(self.tokens[part], self.targets[part])

    @property
    def group_sources(self) -> np.ndarray:
        """Return int32[n / group]: the source of each group."""
        return self.sources[:: self.group]

    @property
    def group_lengths(self) -> np.ndarray:
        """Return int64[n / group]: the number of tokens of each group, over all its samples."""
        return self.lengths.reshape(-1, self.group).sum(1)

    def lengths_of(self, index: int) -> int:
        """Return the number of tokens of a sample."""
        return int(self.offsets[index + 1] - self.offsets[index])

    @property
    def lengths(self) -> np.ndarray:
        """Return int64[n]: the number of tokens of each sample."""
        return np.diff(self.offsets)

    @property
    def target_counts(self) -> np.ndarray:
        """Return int64[n]: the number of targets of each sample."""
        before = np.concatenate([[0], np.cumsum(self.targets, dtype=np.int64)])
        return before[self.offsets[1:]] - before[self.offsets[:-1]]

    def origin(self, index: int) -> str:
        """Return the place of a sample in its source."""
        return self.origins[index].decode("utf-8")

    def prompt(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Return a prompt, a text or messages, and the columns that rewards read."""
        start, end = self.column_offsets[index : index + 2]
        row = json.loads(self.columns[start:end].tobytes())
        return row[PROMPT], row[COLUMNS]

    @cached_property
    def fingerprints(self) -> np.ndarray:
        """Return uint64[n / group]: a hash of the tokens of each group."""
        tokens = np.ascontiguousarray(self.tokens, np.int32).view(np.uint8).data
        offsets, lengths, group = (4 * self.offsets).tolist(), self.lengths, self.group
        hashes = np.empty(len(self) // group, np.uint64)
        for number, first in enumerate(range(0, len(self), group)):
            digest = blake2b(tokens[offsets[first] : offsets[first + group]], digest_size=8)
            if group > 1:
                digest.update(lengths[first : first + group].tobytes())
            if len(self.digests):
                pictures = self.pictures(first)
                digest.update(self.digests[pictures.start : pictures.stop].tobytes())
            hashes[number] = int.from_bytes(digest.digest(), "little")
        return hashes

    def shared_with(self, others: Samples) -> int:
        """Return how many of the groups are also among others."""
        return int(np.isin(self.fingerprints, others.fingerprints).sum())

    @cached_property
    def digest(self) -> str:
        """Return a sha256 of all training content: tokens, targets, labels, samples' offsets and sources."""
        digest = hashlib.sha256()
        arrays = [self.tokens, self.targets, self.offsets, self.sources, self.liked]
        arrays += [self.columns, self.column_offsets] if len(self.column_offsets) else []
        arrays += [self.digests, self.grids, self.picture_offsets] if len(self.picture_offsets) else []
        for array in arrays:
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        return digest.hexdigest()


def join(parts: Sequence[Samples]) -> Samples:
    """Concatenate samples."""
    if not parts:
        empty = np.zeros(0, np.int32)
        return Samples(empty, np.zeros(0, bool), np.zeros(1, np.int64), empty, np.zeros(0, "S1"))
    lengths = np.concatenate([part.lengths for part in parts])
    return Samples(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.targets for part in parts]),
        np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
        np.concatenate([part.sources for part in parts]),
        np.concatenate([part.origins for part in parts]),
        np.concatenate([part.liked for part in parts]),
        np.concatenate([part.columns for part in parts]),
        _joined(np.concatenate([np.diff(part.column_offsets) for part in parts])),
        _joined(np.concatenate([np.diff(part.picture_offsets) for part in parts])),
        **{  # type: ignore[arg-type]
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("places", "digests", "stamps", "grids", "patches", "picture_tokens")
        },
    )


def _joined(lengths: np.ndarray) -> np.ndarray:
    """Return the offsets of parts of these lengths; none for no parts."""
    return np.concatenate([np.zeros(min(1, len(lengths)), np.int64), np.cumsum(lengths, dtype=np.int64)])


def repeated(hashes: np.ndarray, sources: np.ndarray) -> Mapping[tuple[int, int], int]:
    """Return how many groups of a source are also in an earlier one, by the numbers of the two.

    A group that several earlier sources have is counted for the first of them.

    Args:
        hashes: uint64[n], the groups' fingerprints.
        sources: int32[n], the source of each group.
    """
    order = np.lexsort((sources, hashes))
    values, owners = hashes[order], sources[order]
    begins = np.diff(values, prepend=values[:1] ^ np.uint64(1)) != 0
    first = np.maximum.accumulate(np.where(begins, np.arange(len(values)), 0))
    pairs = np.stack([owners[first], owners])[:, owners[first] != owners]
    kinds, counts = np.unique(pairs, axis=1, return_counts=True)
    return {(int(a), int(b)): int(count) for (a, b), count in zip(kinds.T, counts, strict=True)}


def repeated_notes(sources: Sequence[str | Source], samples: Samples) -> list[str]:
    """Return a sentence for each two sources of data.train that have samples in common."""
    paths = [source if isinstance(source, str) else source.path for source in sources]
    return [
        f"{count:,} samples of data.train[{second}], {paths[second]}, are also in data.train[{first}], "
        f"{paths[first]}"
        for (first, second), count in repeated(samples.fingerprints, samples.group_sources).items()
    ]
