"""Llama 4's image processor with Pillow and numpy; transformers has it only for torchvision.

A picture is scaled, without changing its shape, into a canvas of whole tiles, whose rest is black. All of it,
scaled to one tile without keeping its shape, is a last tile if there are several.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class TileProcessor:
    """The settings of a checkpoint's processor, with transformers' defaults.

    Attributes:
        side: height and width of a tile, in pixels.
        most: the most tiles of a canvas.
        largest: whether a picture is scaled up as far as a canvas allows, rather than to the smallest canvas
            that it fits without being scaled down.
        resample: Pillow's number of the filter.
        do_rescale, rescale_factor, do_normalize, image_mean, image_std: from bytes to what the tower reads.
    """

    side: int = 336
    most: int = 16
    largest: bool = False
    resample: int = 2
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: Sequence[float] = (0.5, 0.5, 0.5)
    image_std: Sequence[float] = (0.5, 0.5, 0.5)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> TileProcessor:
        """Read the settings of preprocessor_config.json.

        Raises:
            UserError: they ask for tiles that are no squares, or for pictures of their own size.
        """
        size = settings.get("size") or {"height": cls.side, "width": cls.side}
        if size.get("height") != size.get("width") or settings.get("do_resize") is False:
            raise UserError(
                f"the image processor's size is {size!r}, and its tiles have to be squares that pictures are "
                "scaled to",
                "use the preprocessor_config.json of the model's own repository",
            )
        named = {"side": size["height"], "most": settings.get("max_patches")}
        named["largest"] = settings.get("resize_to_max_canvas")
        fields = ("resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
        named |= {name: settings.get(name) for name in fields}
        return cls(**{name: value for name, value in named.items() if value is not None})

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of the tiles of a picture of this size."""
        canvases = {
            (rows, tiles // rows): min(rows * self.side / height, tiles // rows * self.side / width)
            for tiles in range(1, self.most + 1)
            for rows in range(1, tiles + 1)
            if tiles % rows == 0
        }
        scales = np.asarray([*canvases.values()], np.float32)  # as torch compares them
        enough = scales[scales >= 1]
        chosen = scales.max() if self.largest or not len(enough) else enough.min()
        # Two of the same scale hold a smaller one of that scale too, so that the smallest is one alone.
        return min(
            (grid for grid, scale in zip(canvases, scales, strict=True) if scale == chosen), key=math.prod
        )

    def tiles(self, grid: tuple[int, int]) -> int:
        """Return the tiles of a picture, with that of all of it."""
        count = grid[0] * grid[1]
        return count + (count > 1)

    def scaled(self, height: int, width: int, grid: tuple[int, int]) -> tuple[int, int]:
        """Return the height and the width of a picture in its canvas."""

        def limit(size: int, tiles: int) -> tuple[int, float | np.float32]:
            """Return the most pixels of a side, and their ratio to the picture's: in float32 if the canvas is
            the limit, as torch divides."""
            canvas, picture_side = tiles * self.side, max(size, self.side)
            if self.largest or canvas < picture_side:
                return canvas, np.float32(canvas) / np.float32(size)
            return picture_side, picture_side / size

        (high, down), (wide, across) = limit(height, grid[0]), limit(width, grid[1])
        if across < down:
            return max(1, min(math.floor(height * across), high)), wide
        return high, max(1, min(math.floor(width * down), wide))

    def __call__(self, images: Sequence[Image], return_tensors: str = "np") -> dict[str, np.ndarray]:
        """Return float32[tiles, 3, side, side] of one picture, row by row and all of it last."""
        (image,) = images
        image = image.convert("RGB")
        grid = self.grid(image.height, image.width)
        height, width = self.scaled(image.height, image.width, grid)
        canvas = np.zeros((grid[0] * self.side, grid[1] * self.side, 3), np.uint8)
        canvas[:height, :width] = np.asarray(image.resize((width, height), self.resample))
        cut = canvas.reshape(grid[0], self.side, grid[1], self.side, 3).swapaxes(1, 2)
        tiles = [*cut.reshape(-1, self.side, self.side, 3)]
        if len(tiles) > 1:
            tiles.append(np.asarray(image.resize((self.side, self.side), self.resample)))
        return {"pixel_values": self._numbers(np.stack(tiles).transpose(0, 3, 1, 2))}

    def _numbers(self, pixels: np.ndarray) -> np.ndarray:
        """Return what the tower reads of bytes: each operation is rounded to bfloat16, as in the original."""
        import ml_dtypes

        def rounded(value: np.ndarray) -> np.ndarray:
            return value.astype(ml_dtypes.bfloat16).astype(np.float32)

        values = pixels.astype(np.float32)
        keep = rounded if self.do_rescale and self.do_normalize else (lambda value: value)
        if self.do_rescale:
            values = keep(keep(values) * np.float32(self.rescale_factor))
        if self.do_normalize:
            mean, std = (
                keep(np.asarray(numbers, np.float32)).reshape(3, 1, 1)
                for numbers in (self.image_mean, self.image_std)
            )
            values = keep(keep(values - mean) / std)
        return values
