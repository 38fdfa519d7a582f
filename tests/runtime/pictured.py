"""Rows with pictures of one size, also packed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.vision_checkpoints import SIGLIP

LENGTH, ROWS = 40, 8
PATCHES, FEATURES, TOKEN = 36, 9, 8
"""Patches and features of a picture of vision_checkpoints.make_gemma3, and the token that stands for one."""
COUNTS = (0, 1, 2, 1)
"""Pictures of a row, by its number."""
PATCH, SIDE = SIGLIP["patch_size"], SIGLIP["image_size"]


def patches_of(pixels: np.ndarray, size: int = PATCH) -> np.ndarray:
    """Return [N, patches, channels * size * size] of pixels [N, channels, height, width], row by row."""
    count, channels, height, width = pixels.shape
    cut = pixels.reshape(count, channels, height // size, size, width // size, size)
    return cut.transpose(0, 2, 4, 1, 3, 5).reshape(
        count, (height // size) * (width // size), channels * size * size
    )


def row(random: np.random.Generator, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a sample, and which of its pictures each stands for, from 1; 0 for text."""
    tokens = random.integers(20, 500, length).astype(np.int32)
    ids = np.zeros(length, np.int32)
    place = 1
    for picture in range(1, count + 1):
        place += int(random.integers(1, 3))
        tokens[place - 1], tokens[place + FEATURES] = 6, 7
        tokens[place : place + FEATURES], ids[place : place + FEATURES] = TOKEN, picture
        place += FEATURES + 1
    return tokens, ids


def batch() -> dict[str, np.ndarray]:
    """Return rows without, with one and with two pictures, a sample in each."""
    random = np.random.default_rng(0)
    rows = []
    for number in range(ROWS):
        count = COUNTS[number % len(COUNTS)]
        rows.append([(*row(random, count, int(random.integers(26, LENGTH + 1))), pictures(random, count))])
    return filled(rows)


def pictures(random: np.random.Generator, count: int) -> np.ndarray:
    """Return the patches of random pictures, [count, PATCHES, F]."""
    return patches_of(random.standard_normal((count, 3, SIDE, SIDE)).astype(np.float32))


def filled(
    rows: Sequence[Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]], length: int = LENGTH, most: int = 2
) -> dict[str, np.ndarray]:
    """Return the arrays of rows of samples: their tokens, the pictures of these, and the pictures' patches.

    Args:
        length: tokens of a row.
        most: pictures of a row that there is room for.
    """
    count = len(rows)
    one: dict[str, np.ndarray] = {
        name: np.zeros((count, length), np.int32)
        for name in ("tokens", "positions", "segment_ids", "image_ids")
    }
    one["image_features"] = np.full((count, length), -1, np.int32)
    one["patches"] = np.zeros((count, most * PATCHES, 3 * PATCH**2), np.float32)
    one["patch_images"] = np.zeros((count, most * PATCHES), np.int32)
    one["patch_positions"] = np.zeros((count, most * PATCHES, 2), np.int32)
    for r, samples in enumerate(rows):
        start = pictures = 0
        for segment, (tokens, ids, patches) in enumerate(samples, 1):
            here, there = slice(start, start + len(tokens)), slice(pictures * PATCHES, None)
            one["tokens"][r, here] = tokens
            one["positions"][r, here] = np.arange(len(tokens))
            one["segment_ids"][r, here] = segment
            one["image_ids"][r, here] = np.where(ids > 0, ids + pictures, 0)
            features = pictures * FEATURES + np.cumsum(ids > 0) - 1
            one["image_features"][r, here] = np.where(ids > 0, features, -1)
            one["patches"][r, there][: len(patches) * PATCHES] = patches.reshape(-1, 3 * PATCH**2)
            for picture in range(len(patches)):
                part = slice((pictures + picture) * PATCHES, (pictures + picture + 1) * PATCHES)
                one["patch_images"][r, part] = pictures + picture + 1
                one["patch_positions"][r, part] = np.indices((6, 6)).reshape(2, -1).T
            start, pictures = start + len(tokens), pictures + len(patches)
    return one
