"""A teacher's log-probabilities in files: its likeliest tokens at each target of the samples.

A folder has for each split, train and eval, two arrays of numpy's format, with a row for each target, in the
order of the samples and of their tokens:

    SPLIT.tokens.npy    int32[N, K], the teacher's K likeliest tokens in the place of the target
    SPLIT.logps.npy     float32[N, K + 1], the log-probabilities of these, the largest first, and as the last
                        column that of all other tokens together, at the temperature of the loss

and logps.json, which is written last: K, the temperature, and of each split a digest of its samples and of
its files. Until a split is complete, SPLIT.partial.json has the number of rows that are in its files, and
what they are of.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..sections import Distill
from .samples import Samples

DESCRIPTION = "logps.json"
TRAIN, EVAL = "train", "eval"
WRITE = "write them again with train.py --write-teacher"


def target_offsets(samples: Samples) -> np.ndarray:
    """Return int64[n + 1]: the rows of sample i are offsets[i] to offsets[i + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(samples.target_counts, dtype=np.int64)])


def places_of(samples: Samples, row: Sequence[int]) -> list[np.ndarray]:
    """Return for each sample of a row of a micro-batch the places before its targets, ascending."""
    out, start = [], 0
    for index in row:
        sample = samples[index]
        out.append(np.flatnonzero(sample.targets) + start - 1)
        start += len(sample.tokens)
    return out


@dataclass(frozen=True)
class StoredPart:
    """The log-probabilities of a split's samples.

    Attributes:
        offsets: from `target_offsets`.
        tokens, logps: as in the files.
    """

    offsets: np.ndarray
    tokens: np.ndarray
    logps: np.ndarray

    def arrays(
        self, samples: Samples, rows: Sequence[Sequence[int]], tokens: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return the arrays of a micro-batch: `objectives.LIKELIEST`.

        Args:
            rows: the samples of each row.
            tokens: int32[B, T], of the micro-batch.
        """
        likeliest = np.zeros((*tokens.shape, self.tokens.shape[1]), np.int32)
        logps = np.zeros((*tokens.shape, self.logps.shape[1]), np.float32)
        for r, row in enumerate(rows):
            for index, places in zip(row, places_of(samples, row), strict=True):
                part = slice(self.offsets[index], self.offsets[index + 1])
                likeliest[r, places], logps[r, places] = self.tokens[part], self.logps[part]
        return {"teacher_tokens": likeliest, "teacher_logps": logps}


@dataclass(frozen=True)
class StoredTeacher:
    """A folder of stored log-probabilities.

    Attributes:
        folder: of the files.
        about: the content of logps.json.
    """

    folder: Path
    about: Mapping[str, Any]

    @classmethod
    def open(cls, folder: Path, distill: Distill) -> StoredTeacher:
        """Open the folder that train.distill.stored names.

        Raises:
            UserError: there is none, it is incomplete, or it was written with other settings.
        """
        try:
            about = dict(json.loads((folder / DESCRIPTION).read_text("utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"{folder}: has no complete log-probabilities of the teacher (train.distill.stored)",
                "run train.py --write-teacher with the same recipe and data, which writes them",
            ) from error
        for name, value in (("top_k", distill.top_k), ("temperature", distill.temperature)):
            if about.get(name) != value:
                raise UserError(
                    f"{folder}: was written with train.distill.{name} {about.get(name)}, and the recipe has "
                    f"{value:g}",
                    f"{WRITE}, or set {name} back",
                )
        return cls(folder, about)

    @property
    def digest(self) -> str:
        """Return a SHA-256 of what the folder has."""
        return hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()

    def part(self, split: str, samples: Samples) -> StoredPart:
        """Return the log-probabilities of a split.

        Raises:
            UserError: they are of other samples, or a file is missing or damaged.
        """
        if self.about.get(split, {}).get("samples") != samples.digest:
            raise UserError(
                f"{self.folder}: has the teacher's log-probabilities of other samples than data.{split}",
                f"{WRITE}: the data, the tokenizer, the template or max_length has changed since",
            )
        offsets = target_offsets(samples)
        try:
            arrays = [np.load(self.folder / name, mmap_mode="r") for name in names(split)]
        except (OSError, ValueError) as error:
            raise UserError(f"{self.folder}: cannot be read: {error}", WRITE) from error
        if self.about[split].get("sha256") != {name: _digest(self.folder / name) for name in names(split)}:
            raise UserError(f"{self.folder}: the files of {split} are not those that logps.json names", WRITE)
        return StoredPart(offsets, *arrays)


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def names(split: str) -> tuple[str, str]:
    """Return the names of a split's files."""
    return f"{split}.tokens.npy", f"{split}.logps.npy"


def shapes(targets: int, top_k: int) -> list[tuple[int, int]]:
    """Return the shapes of a split's arrays."""
    return [(targets, top_k), (targets, top_k + 1)]


RECORDED_SECONDS = 10.0
"""Seconds between two records of the rows that are written."""


class Writing:
    """Write the files of a split. An interrupted writing goes on behind the rows that its last record counts.

    Attributes:
        done: rows that an earlier writing of the same left in the files.

    Args:
        about: what the log-probabilities are of besides the samples, as JSON. With another value, or without
            the files, the writing starts anew.

    Raises:
        UserError: the folder cannot be written, or has too little room.
    """

    def __init__(
        self, folder: Path, split: str, samples: Samples, top_k: int, about: Mapping[str, Any] | None = None
    ) -> None:
        self._samples, self._offsets = samples, target_offsets(samples)
        self._files = [folder / name for name in names(split)]
        self._record = folder / f"{split}.partial.json"
        self._about = {**(about or {}), "top_k": top_k, "samples": samples.digest}
        self._recorded = -math.inf
        sizes = shapes(int(self._offsets[-1]), top_k)
        self.done = self._rows_in_files(sizes)
        try:
            if not self.done:
                self._record.unlink(missing_ok=True)
            self._arrays = [
                np.lib.format.open_memmap(file, "r+" if self.done else "w+", dtype, shape)
                for file, dtype, shape in zip(self._files, (np.int32, np.float32), sizes, strict=True)
            ]
        except OSError as error:
            size = sum(map(math.prod, sizes)) * 4
            raise UserError(
                f"{folder}: {size:,} bytes of log-probabilities cannot be written: {error.strerror or error}",
                "free disk space, allow writing to the folder, or use a smaller train.distill.top_k",
            ) from error

    def _rows_in_files(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Return the rows that the record of an earlier writing counts; 0 if it was of something else."""
        try:
            record = json.loads(self._record.read_text("utf-8"))
            arrays = [np.load(file, mmap_mode="r") for file in self._files]
        except (OSError, ValueError):
            return 0
        alike = isinstance(record, dict) and record.get("about") == self._about
        whole = [array.shape for array in arrays] == [*sizes]
        return int(record["rows"]) if alike and whole else 0

    def record(self, rows: int) -> None:
        """Note that the first rows are in the files, unless that was noted a moment ago.

        The files reach the disk before the note does.
        """
        if time.monotonic() - self._recorded < RECORDED_SECONDS:
            return
        for array in self._arrays:
            array.flush()
        unfinished = self._record.with_suffix(".new")
        unfinished.write_text(json.dumps({"about": self._about, "rows": rows}) + "\n", "utf-8")
        os.replace(unfinished, self._record)
        self._recorded = time.monotonic()

    def add(self, row: Sequence[int], tokens: np.ndarray, logps: np.ndarray) -> None:
        """Write the samples of a row of a micro-batch.

        Args:
            tokens, logps: int32[T, K] and float32[T, K + 1], in the place before each token.
        """
        for index, places in zip(row, places_of(self._samples, row), strict=True):
            part = slice(self._offsets[index], self._offsets[index + 1])
            for array, values in zip(self._arrays, (tokens[places], logps[places]), strict=True):
                array[part] = values

    def end(self) -> dict[str, Any]:
        """Flush the files, and return what logps.json has of the split."""
        for array in self._arrays:
            array.flush()
        self._record.unlink(missing_ok=True)
        return {
            "samples": self._samples.digest,
            "targets": int(self._offsets[-1]),
            "sha256": {file.name: _digest(file) for file in self._files},
        }
