"""The room for pictures in a row, where shapes are needed before the data is read.

A run reserves as many patches a row as its data needs. A plan has no data: it assumes data.images.per_row
pictures a row, or, without that key, that half of a row's tokens stand for pictures.
"""

from __future__ import annotations

from recipec.compiler.lowering.program import Program

SHARE = 2
"""A row has this many tokens for each token of a picture."""


def masks_pictures(program: Program) -> bool:
    """Return whether the attention mask depends on a row's pictures, which splash attention does not do."""
    vision = program.architecture.vision
    return vision is not None and bool(vision.both_ways) and program.recipe.data.images is not None


def row_pictures(program: Program) -> int:
    """Return the pictures of a row; 0 if the recipe has none, or if pictures differ in size."""
    vision = program.architecture.vision
    size = None if vision is None else vision.patches
    return row_patches(program) // size if size else 0


def row_patches(program: Program) -> int:
    """Return the patches of pictures that a row reserves room for; 0 without pictures."""
    vision, data = program.architecture.vision, program.recipe.data
    if vision is None or data.images is None:
        return 0
    half = data.max_length // SHARE * vision.patches_of_feature
    if (size := vision.patches) is not None:
        return (data.images.per_row or max(1, half // size)) * size
    most = data.images.tokens
    if most is None or data.images.per_row is None:
        return half
    return min(data.images.per_row * most, data.max_length) * vision.patches_of_feature
