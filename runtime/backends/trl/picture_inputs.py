"""The pictures of some rows as transformers' models take them, from the arrays of data/pixels.py.

Each model type has its own form of pixels; all begin with the pictures of the rows, in order:
- pixel_values of one size, [pictures or tiles, 3, height, width] (Gemma 3, Llama 4, LLaVA 1.5);
- pixel_values of the largest height and width, with each picture's own in image_sizes (Mistral 3, Pixtral);
- the patches of all pictures, with their rows and columns in image_grid_thw (Qwen VL, PaddleOCR-VL);
- patches of as many as the largest picture has, with their places in image_position_ids (Gemma 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ...data.batches import Batch

ARGUMENTS = (
    *("pixel_values", "image_sizes", "image_grid_thw", "image_position_ids"),
    *("token_type_ids", "mm_token_type_ids"),
)
"""The names of what `picture_inputs` can return, besides position_ids."""

Picture = tuple[np.ndarray, np.ndarray]
"""The patches of a picture, float32[P, F], and the rows and columns where they are, int32[P, 2]."""


def picture_inputs(rows: Batch, model_type: str, patches: int | None) -> Batch:
    """Return the arguments of transformers' model for the pictures of some rows.

    Args:
        rows: of a micro-batch, with the arrays of pixels.py.
        model_type: of the model's tower (`towers.kind_of`).
        patches: of a picture or tile, if all have as many.

    Returns:
        Arrays by their names, without pixels if no row has a picture. position_ids is among them if the model
        counts time, rows and columns: [4, B, T], first the positions in the samples, which show where a row's
        samples begin.
    """
    pictures = [
        (rows["patches"][r, mine], rows["patch_positions"][r, mine])
        for r, numbers in enumerate(rows["patch_images"])
        for mine in (numbers == number for number in range(1, numbers.max() + 1))
    ]
    out: Batch = {}
    if pictures:
        out = _tiles(pictures, patches) if patches is not None else FORMS[model_type](pictures)
    if (name := TYPES.get(model_type)) is not None:
        out[name] = (rows["image_ids"] > 0).astype(np.int64)
    if "rotary_positions" in rows:
        turned = np.moveaxis(rows["rotary_positions"], -1, 0)
        out["position_ids"] = np.concatenate([rows["positions"][None], turned]).astype(np.int64)
    return out


TYPES = {
    "gemma3": "token_type_ids",
    **dict.fromkeys(("gemma4", "gemma4_unified"), "mm_token_type_ids"),
}
"""The argument that says which tokens stand for pictures, for models whose mask may depend on it."""


def _tiles(pictures: Sequence[Picture], patches: int) -> Batch:
    tiles = [
        (values[start : start + patches], places[start : start + patches])
        for values, places in pictures
        for start in range(0, len(values), patches)
    ]
    return {"pixel_values": np.stack([_pixels(*tile) for tile in tiles])}


def _shaped(pictures: Sequence[Picture]) -> Batch:
    whole = [_pixels(*picture) for picture in pictures]
    sizes = np.array([pixels.shape[1:] for pixels in whole], np.int64)
    padded = np.zeros((len(whole), 3, *sizes.max(0)), np.float32)
    for place, pixels in zip(padded, whole, strict=True):
        place[:, : pixels.shape[1], : pixels.shape[2]] = pixels
    return {"pixel_values": padded, "image_sizes": sizes}


def _in_blocks(pictures: Sequence[Picture]) -> Batch:
    return {
        "pixel_values": np.concatenate([values for values, _ in pictures]),
        "image_grid_thw": np.array([(1, *_shape(places)) for _, places in pictures], np.int64),
    }


def _row_by_row(pictures: Sequence[Picture]) -> Batch:
    ordered = [(values[np.lexsort(places.T[::-1])], places) for values, places in pictures]
    out = _in_blocks(ordered)
    count, features = out["pixel_values"].shape
    side = math.isqrt(features // 3)
    return {**out, "pixel_values": out["pixel_values"].reshape(count, 3, side, side)}


def _listed(pictures: Sequence[Picture]) -> Batch:
    most = max(len(values) for values, _ in pictures)
    pixels = np.zeros((len(pictures), most, pictures[0][0].shape[1]), np.float32)
    at = np.full((len(pictures), most, 2), -1, np.int64)
    for i, (values, places) in enumerate(pictures):
        order = np.lexsort(places.T[::-1])
        pixels[i, : len(values)] = values[order]
        at[i, : len(values)] = places[order][:, ::-1]  # column and row
    return {"pixel_values": pixels, "image_position_ids": at}


FORMS: Mapping[str, Callable[[Sequence[Picture]], Batch]] = {
    **dict.fromkeys(("gemma4", "gemma4_unified"), _listed),
    "mistral3": _shaped,
    "paddleocr_vl": _row_by_row,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), _in_blocks),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _in_blocks),
}
"""By model type, what makes the pixels of pictures whose sizes differ."""


def _pixels(patches: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the pixels of a picture or tile, float32[3, height, width]."""
    rows, columns = _shape(places)
    side = math.isqrt(patches.shape[1] // 3)
    grid = np.empty((rows, columns, 3, side, side), np.float32)
    grid[places[:, 0], places[:, 1]] = patches.reshape(-1, 3, side, side)
    return grid.transpose(2, 0, 3, 1, 4).reshape(3, rows * side, columns * side)


def _shape(places: np.ndarray) -> tuple[int, int]:
    """Return the rows and columns of patches."""
    rows, columns = places.max(0) + 1
    return int(rows), int(columns)
