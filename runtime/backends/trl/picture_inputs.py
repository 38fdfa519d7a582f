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
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...data.batches import Batch
from ...model.adapters import LoraSettings
from ...model.families.towers import kind_of
from ...weights.checkpoint import HFCheckpoint

ARGUMENTS = (
    *("pixel_values", "image_sizes", "image_grid_thw", "image_position_ids"),
    *("token_type_ids", "mm_token_type_ids"),
)
"""The names of what `PictureInputs.arguments` can return, besides position_ids."""

Picture = tuple[np.ndarray, np.ndarray]
"""The patches of a picture, float32[P, F], and the rows and columns where they are, int32[P, 2]."""


@dataclass(frozen=True)
class PictureInputs:
    """Makes the arguments of transformers' model for the pictures of some rows.

    Attributes:
        model_type: of the model's tower (`towers.kind_of`).
        patches: of a picture or tile, if all have as many; else None.
        ratio: patches of a feature.
        token: the id of the token that a feature replaces.
        trained: whether the tower is trained. It then computes a picture for all rows, since processes that
            average their gradients must have the same ones.
    """

    model_type: str
    patches: int | None
    ratio: int
    token: int
    trained: bool

    @classmethod
    def of(cls, base: HFCheckpoint, model: Any, lora: LoraSettings | None) -> PictureInputs | None:
        """Return that of a checkpoint; None if no pictures are read.

        Args:
            model: transformers' model of it.
        """
        vision = base.architecture.vision
        if vision is None:
            return None
        token = next(id for key in TOKEN if (id := getattr(model.config, key, None)) is not None)
        trained = lora is not None and lora.vision
        return cls(kind_of(base.config), vision.patches, vision.patches_of_feature, token, trained)

    def filled(self, rows: Batch) -> Batch:
        """Return some rows, with a black picture after the first of them if its features are needed and no
        row has a picture. No other token sees it."""
        if not self.trained or rows["patch_images"].any():
            return rows
        patches = self.patches or self.ratio
        side, count = math.isqrt(patches), patches // self.ratio
        width = rows["tokens"].shape[1]
        out = {
            name: np.pad(array, [(0, 0), (0, count)] + [(0, 0)] * (array.ndim - 2))
            if array.ndim > 1 and array.shape[1] == width and not name.startswith("patch")
            else array
            for name, array in rows.items()
        }
        out["tokens"][0, width:], out["image_ids"][0, width:] = self.token, 1
        shape = len(rows["tokens"]), patches
        out["patches"] = np.zeros((*shape, rows["patches"].shape[2]), np.float32)
        out["patch_images"] = np.zeros(shape, np.int32)
        out["patch_positions"] = np.zeros((*shape, 2), np.int32)
        out["patch_images"][0] = 1
        out["patch_positions"][0] = np.indices((side, side)).reshape(2, -1).T
        return out

    def arguments(self, rows: Batch) -> Batch:
        """Return the arguments for the pictures of some rows, which have the arrays of pixels.py.

        Returns:
            Arrays by their names, without pixels if no row has a picture. position_ids is among them if the
            model counts time, rows and columns: [4, B, T], first the positions in the samples, which show
            where a row's samples begin.
        """
        pictures = [
            (rows["patches"][r, mine], rows["patch_positions"][r, mine])
            for r, numbers in enumerate(rows["patch_images"])
            for mine in (numbers == number for number in range(1, numbers.max() + 1))
        ]
        out: Batch = {}
        if pictures and self.patches is not None:
            out = _tiles(pictures, self.patches)
        elif pictures:
            out = FORMS[self.model_type](pictures)
        if (name := TYPES.get(self.model_type)) is not None:
            out[name] = (rows["image_ids"] > 0).astype(np.int64)
        if "rotary_positions" in rows:
            turned = np.moveaxis(rows["rotary_positions"], -1, 0)
            out["position_ids"] = np.concatenate([rows["positions"][None], turned]).astype(np.int64)
        return out


TOKEN = ("image_token_id", "image_token_index")
"""The attributes of a config of transformers that have the token which a feature replaces."""

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
