"""The arrays of a micro-batch that describe its pictures. Their pixels are made when the batch is built.

B rows of T tokens; P patches of F numbers, of which a tower makes R features. All begin with the rows:
    patches float32[B, P, F]: the patches of a row's pictures, one picture after the other, in the order in
        which the tower reads them (image_processor.py); padding is 0,
    patch_images int32[B, P]: 1, 2, ... the number of the patch's picture in its row, 0 for padding,
    patch_positions int32[B, P, 2]: row and column of the patch in its picture, or in its tile,
    image_features int32[B, T]: of a token that stands for a picture, the number of its feature among the
        row's, in the order of patches; -1 for other tokens,
    image_ids int32[B, T]: the number of such a token's picture in its row, 0 for other tokens;
    for models with positions in three dimensions also rotary_positions int32[B, T, 3]: time, row and column.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np

from .image_processor import ImageSettings, image_processor, rotary_positions
from .samples import Samples

MOST_THREADS = 8
"""Threads that decode the pictures of a batch; decoding and scaling run outside of Python's lock."""


class Pixels:
    """Build the arrays of pictures.

    Args:
        settings: how pictures become patches.
        patches: patches of a row, P.
    """

    def __init__(self, settings: ImageSettings, patches: int) -> None:
        self.processor = image_processor(settings)
        self.patches = patches

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "pictures")

    def arrays(
        self, samples: Samples, rows: Sequence[Sequence[int]], tokens: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return the arrays of a micro-batch's pictures.

        Args:
            rows: the samples of each row; missing rows are empty.
            tokens: int32[B, T] of the micro-batch.

        Raises:
            UserError: a picture is not the one that was tokenized.
        """
        processor, feature = self.processor, self.processor.settings.feature
        patches = np.zeros((len(tokens), self.patches, processor.features), np.float32)
        patch_images = np.zeros(patches.shape[:2], np.int32)
        patch_positions = np.zeros((*patches.shape[:2], 2), np.int32)
        image_features = np.full(tokens.shape, -1, np.int32)
        image_ids = np.zeros(tokens.shape, np.int32)
        rotary = np.zeros((*tokens.shape, 3), np.int32) if processor.rotary else None
        pending = []
        for r, row in enumerate(rows):
            at = begin = number = 0
            for sample in row:
                length, pictures = samples.lengths_of(sample), samples.pictures(sample)
                here = begin + np.flatnonzero(tokens[r, begin : begin + length] == feature)
                taken, spans = 0, []
                for i in pictures:
                    number += 1
                    grid = int(samples.grids[i, 0]), int(samples.grids[i, 1])
                    count, end = int(samples.picture_tokens[i]), at + int(samples.patches[i])
                    places = here[taken : taken + count]
                    image_features[r, places] = at // processor.ratio + np.arange(count)
                    image_ids[r, places] = number
                    patch_images[r, at:end] = number
                    patch_positions[r, at:end] = processor.positions(grid)
                    place, digest = samples.places[i].decode("utf-8"), int(samples.digests[i])
                    job = self._threads.submit(processor.pixels, place, digest, grid, samples.origin(sample))
                    pending.append((job, r, at, end))
                    spans.append((int(places[0]) - begin, processor.tokens_of(grid)))
                    at, taken = end, taken + count
                if rotary is not None:
                    rotary[r, begin : begin + length] = rotary_positions(length, spans)
                begin += length
        for job, r, at, end in pending:
            patches[r, at:end] = job.result()
        arrays = {
            "patches": patches,
            "patch_images": patch_images,
            "patch_positions": patch_positions,
            "image_features": image_features,
            "image_ids": image_ids,
        }
        return arrays if rotary is None else {**arrays, "rotary_positions": rotary}
