"""The image processor of a checkpoint: which tokens stand for a picture, and its pixels as patches.

transformers' own processors for Pillow and numpy make the pixels; they need neither torch nor torchvision.
How many tokens a picture has follows from its size. The tests compare tokens and pixels with transformers'
processors.

Each kind of processor is a class here. It gives, for a picture of a height and a width, the grid of its
patches and the text that takes the place of the chat template's placeholder; and from the processor's
output, the patches in the order in which the tower reads them:
- of a fixed size (gemma3), and in each tile (llama4): row by row;
- if the tower merges m x m patches into a feature (gemma4, pixtral with a merger, qwen_vl): in blocks of m x
  m, row by row, and row by row within a block. So a feature is made of adjacent patches.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..errors import UserError, first_line
from ..sections import Images
from .pictures import (
    Limits,
    Picture,
    check_decodes,
    content_of,
    decoded,
    digest_of,
    keep,
    opened,
    refused_setting,
)
from .row_values import Malformed
from .tiles import TileProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

PROCESSOR, PREPROCESSOR = "processor_config.json", "preprocessor_config.json"


@dataclass(frozen=True)
class ImageSettings:
    """How pictures become tokens and patches, as plain values, which other processes and cache keys get.

    Attributes:
        kind: one of KINDS.
        processor: the checkpoint's settings of its image processor, changed as the recipe says.
        tokens: texts of the tokens that stand for a picture, by their roles.
        feature: the id of the token whose embedding a feature replaces.
        sizes: further numbers of the processor: tokens of a picture, sizes of the merge.
        limits: of the pictures that the processor gets.
        kept: the folder of pictures that stand in rows.
    """

    kind: str
    processor: Mapping[str, Any]
    tokens: Mapping[str, str]
    feature: int
    sizes: Mapping[str, float] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    kept: str = ""

    @property
    def identity(self) -> dict[str, Any]:
        """Return what decides tokens and pixels, as JSON values."""
        return {key: value for key, value in asdict(self).items() if key != "kept"}


@dataclass(frozen=True)
class Placed:
    """A picture as a sample has it.

    Attributes:
        place: of its file, as `pictures.Picture` has it.
        digest: a hash of the file's bytes.
        size: height and width in pixels, as seen.
        grid: its rows and columns of patches; for tiles, its rows and columns of tiles.
        patches, tokens: how many patches it has, and how many tokens a feature replaces.
        text: what takes the place of the chat template's placeholder.
    """

    place: str
    digest: int
    size: tuple[int, int]
    grid: tuple[int, int]
    patches: int
    tokens: int
    text: str


class ImageProcessor(ABC):
    """A kind of image processor.

    Attributes:
        patch: height and width of a patch, in pixels.
        ratio: patches of a feature.
        merge: height and width, in patches, of the blocks in which patches are ordered; 1 for none.
    """

    patch: int
    merge: int = 1
    ratio: int = 1
    rotary: ClassVar[bool] = False
    """Whether the model has positions in three dimensions (M-RoPE)."""

    def __init__(self, settings: ImageSettings) -> None:
        self.settings = settings
        self.limits = settings.limits

    @property
    @abstractmethod
    def features(self) -> int:
        """Return the numbers of a patch."""

    @property
    def unit(self) -> int:
        """Return a number that divides the patches of every picture, and those of a row."""
        return self.ratio

    def tokens_of(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of the tokens that features replace."""
        return grid[0] // self.merge, grid[1] // self.merge

    @property
    def placeholder(self) -> str:
        """Return what the chat template writes for a picture."""
        return self.settings.tokens["placeholder"]

    @abstractmethod
    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of patches of a picture of this size."""

    @abstractmethod
    def text(self, grid: tuple[int, int]) -> str:
        """Return the text that takes the place of the placeholder."""

    @abstractmethod
    def patches_of(self, output: Mapping[str, Any], grid: tuple[int, int]) -> np.ndarray:
        """Return float32[patches, features] from the output of transformers' processor for one picture."""

    def patches(self, grid: tuple[int, int]) -> int:
        """Return the number of a picture's patches."""
        return grid[0] * grid[1]

    def positions(self, grid: tuple[int, int]) -> np.ndarray:
        """Return int32[patches, 2]: row and column of each patch."""
        rows, columns = np.indices(grid, dtype=np.int32)
        return blocks(np.stack([rows, columns], -1), self.merge)

    def on_canvas(self, grid: tuple[int, int]) -> np.ndarray:
        """Return int32[shown, 2]: row and column in the whole picture of the first patches, which show it."""
        return self.positions(grid)

    @abstractmethod
    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and the width that the tower sees, in pixels."""

    @cached_property
    def processor(self) -> Any:
        return self.load(dict(self.settings.processor))

    @abstractmethod
    def load(self, settings: dict[str, Any]) -> Any:
        """Build transformers' processor."""

    def place(self, picture: Picture, what: str) -> Placed:
        """Return what a picture becomes. It is read and decoded once, so that a broken one shows here.

        Raises:
            Malformed: it cannot be used.
        """
        kept = Path(self.settings.kept)
        content = picture.content
        if content is None:
            content = content_of(picture.place, kept, what)
        image, size = opened(content, what)
        try:
            grid = self.grid(*self.limits.of(size))
        except ValueError as error:
            raise Malformed(f"{what}: {first_line(error)}") from error
        check_decodes(image, what)
        if picture.content is not None:
            keep(picture, kept)
        patches = self.patches(grid)
        return Placed(
            *(picture.place, digest_of(content), size, grid, patches, patches // self.ratio, self.text(grid))
        )

    def pixels(self, place: str, digest: int, grid: tuple[int, int], what: str) -> np.ndarray:
        """Return the patches of a picture, float32[patches, features].

        Raises:
            UserError: it is not the picture that was tokenized.
        """
        try:
            content = content_of(place, Path(self.settings.kept), "the picture")
            if digest_of(content) != digest:
                raise Malformed(f"the picture has changed since the data was tokenized: {place}")
            image = decoded(opened(content, "the picture")[0], "the picture", self.limits)
        except Malformed as error:
            raise UserError(
                f"{what}: {error}", "leave the data's pictures unchanged during a run; start it again"
            ) from None
        return self.of_image(image, grid)

    def of_image(self, image: Image, grid: tuple[int, int]) -> np.ndarray:
        """Return the patches of an opened picture, float32[patches, features]."""
        output = self.processor(images=[image], return_tensors="np", **self.arguments)
        patches = np.asarray(self.patches_of(output, grid), np.float32)
        if len(patches) != self.patches(grid):
            raise RuntimeError(f"{len(patches)} patches of a picture of {grid}")
        return patches

    def shown(self, patches: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        """Return what the tower sees of a picture, from its patches: uint8[height, width, 3]."""
        colors = self.colors(patches)
        processor = self.processor
        if processor.do_normalize:
            colors = colors * np.asarray(processor.image_std) + np.asarray(processor.image_mean)
        pixels = (colors / (processor.rescale_factor if processor.do_rescale else 1.0)).round().clip(0, 255)
        side, positions = pixels.shape[1], self.on_canvas(grid)
        rows, columns = positions.max(0) + 1
        whole = np.zeros((rows * side, columns * side, 3), np.uint8)
        for patch, (row, column) in zip(pixels[: len(positions)], positions, strict=True):
            whole[row * side : (row + 1) * side, column * side : (column + 1) * side] = patch
        return whole

    def colors(self, patches: np.ndarray) -> np.ndarray:
        """Return patches as [patches, height, width, channels], as their numbers are ordered."""
        side = self.patch
        return patches.reshape(len(patches), 3, side, side).transpose(0, 2, 3, 1)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return what the processor gets in addition to a picture."""
        return {}


def blocks(grid: np.ndarray, merge: int) -> np.ndarray:
    """Return [rows, columns, ...] as [rows * columns, ...], in blocks of merge x merge."""
    rows, columns, *rest = grid.shape
    split = grid.reshape(rows // merge, merge, columns // merge, merge, *rest)
    return split.swapaxes(1, 2).reshape(rows * columns, *rest)


def cut(pixels: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """Return the patches of [channels, height, width] as [patches, channels * patch * patch]."""
    channels, height, width = pixels.shape
    split = pixels.reshape(channels, height // patch, patch, width // patch, patch)
    return blocks(split.transpose(1, 3, 0, 2, 4), merge).reshape(-1, channels * patch * patch)


class Gemma3Images(ImageProcessor):
    """Gemma 3: every picture has one size."""

    def __init__(self, settings: ImageSettings) -> None:
        super().__init__(settings)
        self.patch = int(settings.sizes["patch"])
        size = settings.processor["size"]
        self._size = int(size["height"]), int(size["width"])
        tokens = int(settings.sizes["tokens"])
        self.ratio = self.patches(self.grid(*self._size)) // tokens

    @property
    def features(self) -> int:
        return 3 * self.patch**2

    @property
    def unit(self) -> int:
        return self.patches(self.grid(*self._size))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        return self._size[0] // self.patch, self._size[1] // self.patch

    def size(self, height: int, width: int) -> tuple[int, int]:
        return self._size

    def text(self, grid: tuple[int, int]) -> str:
        tokens = self.settings.tokens
        features = tokens["feature"] * (self.patches(grid) // self.ratio)
        return f"\n\n{tokens['placeholder']}{features}{tokens['end']}\n\n"

    def patches_of(self, output: Mapping[str, Any], grid: tuple[int, int]) -> np.ndarray:
        return cut(np.asarray(output["pixel_values"][0]), self.patch, 1)

    def load(self, settings: dict[str, Any]) -> Any:
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil(**settings)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"do_convert_rgb": True, "do_pan_and_scan": False}


class ClipImages(ImageProcessor):
    """CLIP, for LLaVA 1.5: every picture has one size, cut out of its middle."""

    def __init__(self, settings: ImageSettings) -> None:
        super().__init__(settings)
        self.patch = int(settings.sizes["patch"])
        size = settings.processor.get("crop_size") or {"height": 224, "width": 224}
        sides = (size["height"], size["width"]) if isinstance(size, Mapping) else (size, size)
        self._size = int(sides[0]), int(sides[1])

    @property
    def features(self) -> int:
        return 3 * self.patch**2

    @property
    def unit(self) -> int:
        return self.patches(self.grid(*self._size))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        return self._size[0] // self.patch, self._size[1] // self.patch

    def size(self, height: int, width: int) -> tuple[int, int]:
        return self._size

    def text(self, grid: tuple[int, int]) -> str:
        return self.settings.tokens["feature"] * self.patches(grid)

    def patches_of(self, output: Mapping[str, Any], grid: tuple[int, int]) -> np.ndarray:
        return cut(np.asarray(output["pixel_values"][0]), self.patch, 1)

    def load(self, settings: dict[str, Any]) -> Any:
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        return CLIPImageProcessorPil(**settings)


class Gemma4Images(ImageProcessor):
    """Gemma 4: the largest size of the picture's shape within a number of patches."""

    def __init__(self, settings: ImageSettings) -> None:
        super().__init__(settings)
        self.patch = int(settings.processor.get("patch_size", 16))
        self.merge = int(settings.processor.get("pooling_kernel_size", 3))
        self.ratio = self.merge**2
        self._most = int(settings.processor.get("max_soft_tokens", 280)) * self.ratio

    @property
    def features(self) -> int:
        return 3 * self.patch**2

    def size(self, height: int, width: int) -> tuple[int, int]:
        from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

        return get_aspect_ratio_preserving_size(height, width, self.patch, self._most, self.merge)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        height, width = self.size(height, width)
        return height // self.patch, width // self.patch

    def text(self, grid: tuple[int, int]) -> str:
        tokens = self.settings.tokens
        return tokens["begin"] + tokens["feature"] * (self.patches(grid) // self.ratio) + tokens["end"]

    def patches_of(self, output: Mapping[str, Any], grid: tuple[int, int]) -> np.ndarray:
        patches = np.asarray(output["pixel_values"][0])[: self.patches(grid)]
        return blocks(patches.reshape(*grid, -1), self.merge)

    def colors(self, patches: np.ndarray) -> np.ndarray:
        return patches.reshape(len(patches), self.patch, self.patch, 3)

    def load(self, settings: dict[str, Any]) -> Any:
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        return Gemma4ImageProcessorPil(**settings)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"do_convert_rgb": True}


class Gemma4UnifiedImages(Gemma4Images):
    """Gemma 4 12B: the patches are the squares that the other models average, and row by row."""

    def __init__(self, settings: ImageSettings) -> None:
        super().__init__(settings)
        self.patch, self.merge, self.ratio = self.patch * self.merge, 1, 1
        self._most = int(settings.processor.get("max_soft_tokens", 280))

    def load(self, settings: dict[str, Any]) -> Any:
        return super().load({**settings, "patch_size": self.patch, "pooling_kernel_size": 1})


class Llama4Images(ImageProcessor):
    """Llama 4: a picture is cut into tiles of one size; several tiles are followed by one of all of it."""

    def __init__(self, settings: ImageSettings) -> None:
        super().__init__(settings)
        self.patch, self.ratio = int(settings.sizes["patch"]), int(settings.sizes["ratio"])
        self._side = self.processor.side // self.patch

    @property
    def features(self) -> int:
        return 3 * self.patch**2

    @property
    def unit(self) -> int:
        return self._side**2

    def grid(self, height: int, width: int) -> tuple[int, int]:
        return self.processor.grid(height, width)

    def size(self, height: int, width: int) -> tuple[int, int]:
        rows, columns = self.grid(height, width)
        return rows * self.processor.side, columns * self.processor.side

    def patches(self, grid: tuple[int, int]) -> int:
        return self.processor.tiles(grid) * self.unit

    def positions(self, grid: tuple[int, int]) -> np.ndarray:
        return np.tile(super().positions((self._side, self._side)), (self.processor.tiles(grid), 1))

    def on_canvas(self, grid: tuple[int, int]) -> np.ndarray:
        tiles = super().positions(grid)[:, None]
        return (tiles * self._side + super().positions((self._side, self._side))).reshape(-1, 2)

    def text(self, grid: tuple[int, int]) -> str:
        tokens, (rows, columns) = self.settings.tokens, grid
        tile = tokens["feature"] * (self.unit // self.ratio)
        row = tokens["column"].join([tile] * columns) + tokens["row"]
        cut = row * rows if rows * columns > 1 else ""
        return f"{tokens['begin']}{cut}{tokens['placeholder']}{tile}{tokens['end']}"

    def patches_of(self, output: Mapping[str, Any], grid: tuple[int, int]) -> np.ndarray:
        return np.concatenate([cut(tile, self.patch, 1) for tile in output["pixel_values"]])

    def load(self, settings: dict[str, Any]) -> Any:
        return TileProcessor.of(settings)


class PixtralImages(ImageProcessor):
    """Pixtral, and Mistral 3 with its merger: pictures keep their shape, up to a longest side."""

    def __init__(self, settings: ImageSettings) -> None:
        super().__init__(settings)
        self.patch, self.merge = int(settings.sizes["patch"]), int(settings.sizes["merge"])
        self.ratio = self.merge**2

    @property
    def features(self) -> int:
        return 3 * self.patch**2

    def size(self, height: int, width: int) -> tuple[int, int]:
        from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

        block = self.patch * self.merge
        longest = int(self.settings.processor.get("size", {}).get("longest_edge", 1024))
        # Its first argument is only asked for its shape.
        picture = np.broadcast_to(np.zeros(1, np.uint8), (3, height, width))
        return get_resize_output_image_size(picture, longest, block, "channels_first")

    def grid(self, height: int, width: int) -> tuple[int, int]:
        height, width = self.size(height, width)
        return height // self.patch, width // self.patch

    def text(self, grid: tuple[int, int]) -> str:
        tokens, columns = self.settings.tokens, grid[1] // self.merge
        row = tokens["feature"] * columns
        return (row + tokens["break"]) * (grid[0] // self.merge - 1) + row + tokens["end"]

    def patches_of(self, output: Mapping[str, Any], grid: tuple[int, int]) -> np.ndarray:
        pixels = np.asarray(output["pixel_values"][0])
        return cut(pixels[:, : grid[0] * self.patch, : grid[1] * self.patch], self.patch, self.merge)

    def load(self, settings: dict[str, Any]) -> Any:
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

        return PixtralImageProcessorPil(**settings)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"patch_size": self.patch * self.merge}


class QwenImages(ImageProcessor):
    """Qwen 2 VL to 3.5: pictures keep their shape, within a smallest and a largest number of pixels."""

    rotary = True

    def __init__(self, settings: ImageSettings) -> None:
        super().__init__(settings)
        processor = settings.processor
        self.patch, self.merge = int(processor.get("patch_size", 14)), int(processor.get("merge_size", 2))
        self.ratio = self.merge**2

    @property
    def features(self) -> int:
        return 3 * int(self.settings.processor.get("temporal_patch_size", 2)) * self.patch**2

    def size(self, height: int, width: int) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        least, most = (self.processor.size[key] for key in ("shortest_edge", "longest_edge"))
        return smart_resize(height, width, self.patch * self.merge, least, most)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        height, width = self.size(height, width)
        return height // self.patch, width // self.patch

    def text(self, grid: tuple[int, int]) -> str:
        return self.settings.tokens["feature"] * (self.patches(grid) // self.ratio)

    def patches_of(self, output: Mapping[str, Any], grid: tuple[int, int]) -> np.ndarray:
        return np.asarray(output["pixel_values"])

    def colors(self, patches: np.ndarray) -> np.ndarray:
        return super().colors(patches.reshape(len(patches), 3, -1, self.patch, self.patch)[:, :, 0])

    def load(self, settings: dict[str, Any]) -> Any:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        if "size" in settings:
            settings["size"] = dict(settings["size"])  # the class changes it
        else:
            settings["size"] = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
        return Qwen2VLImageProcessorPil(**settings)


class PaddleOCRImages(QwenImages):
    """PaddleOCR-VL: as Qwen's, with patches of one picture, row by row."""

    @property
    def features(self) -> int:
        return 3 * self.patch**2

    def size(self, height: int, width: int) -> tuple[int, int]:
        from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import smart_resize

        least, most = (self.processor.size[key] for key in ("shortest_edge", "longest_edge"))
        return smart_resize(height, width, self.patch * self.merge, least, most)

    def patches_of(self, output: Mapping[str, Any], grid: tuple[int, int]) -> np.ndarray:
        return blocks(np.asarray(output["pixel_values"]).reshape(*grid, -1), self.merge)

    def load(self, settings: dict[str, Any]) -> Any:
        from transformers.models.paddleocr_vl import image_processing_pil_paddleocr_vl as of_transformers

        size = settings.get("size") or {"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536}
        settings["size"] = dict(size)  # the class changes it
        return of_transformers.PaddleOCRVLImageProcessorPil(**settings)


KINDS: dict[str, type[ImageProcessor]] = {
    "llava": ClipImages,
    "gemma3": Gemma3Images,
    "gemma4": Gemma4Images,
    "gemma4_unified": Gemma4UnifiedImages,
    "llama4": Llama4Images,
    "paddleocr_vl": PaddleOCRImages,
    "pixtral": PixtralImages,
    "qwen_vl": QwenImages,
}

KIND_OF = {
    "Gemma3": "gemma3",
    "Gemma4Unified": "gemma4_unified",
    "Gemma4": "gemma4",
    "Llama4": "llama4",
    "LlavaProcessor": "llava",
    "Pixtral": "pixtral",
    "Mistral3": "pixtral",
    "PaddleOCRVL": "paddleocr_vl",
    "Qwen2VL": "qwen_vl",
    "Qwen2_5_VL": "qwen_vl",
    "Qwen3VL": "qwen_vl",
}
"""The kinds by the beginning of the names of transformers' processors and image processors; of two that fit,
the first one counts."""


def image_processor(settings: ImageSettings) -> ImageProcessor:
    """Return the processor of its kind."""
    return KINDS[settings.kind](settings)


def load_image_settings(
    model_dir: Path, tokenizer: Any, images: Images, kept: Path | str = ""
) -> ImageSettings:
    """Read how a checkpoint takes pictures, with the recipe's changes.

    Args:
        model_dir: the checkpoint's folder.
        tokenizer: from `load_tokenizer`.
        images: the recipe's section.
        kept: the folder of pictures that stand in rows.

    Raises:
        UserError: the checkpoint has no image processor that is known here, or lacks one of its tokens; or a
            setting of the recipe is none of its settings; or the tokenizer is of another model.
    """
    whole = _read(model_dir / PROCESSOR)
    processor = {**_read(model_dir / PREPROCESSOR), **dict(whole.get("image_processor") or {})}
    names = [str(processor.get("image_processor_type", "")), str(whole.get("processor_class", ""))]
    names += [str(processor.get("processor_class", ""))]
    kind = next((KIND_OF[start] for name in names for start in KIND_OF if name.startswith(start)), None)
    if not processor:
        raise UserError(
            f"{model_dir} has no {PREPROCESSOR}, which says how the model takes pictures",
            "download it from the model's repository, or remove data.images",
        )
    if kind is None:
        name = next((name for name in names if name), "unknown")
        raise UserError(
            f"the image processor of {model_dir} is {name}, which this version does not have",
            f"it has those of {', '.join(KIND_OF)}; remove data.images to train on text alone",
        )
    config = _read(model_dir / "config.json")
    vision = config.get("vision_config") or {}
    settings = {key: value for key, value in processor.items() if key not in UNREAD}
    tokens: dict[str, str] = {}
    sizes: dict[str, float] = {}
    if kind.startswith("gemma"):
        tokens = {
            "placeholder": _named(tokenizer, "boi_token" if kind == "gemma3" else "image_token", model_dir),
            "feature": _named(tokenizer, "image_token", model_dir),
            "begin": _named(tokenizer, "boi_token", model_dir),
            "end": _named(tokenizer, "eoi_token", model_dir),
        }
    if kind == "gemma3":
        if settings.get("do_pan_and_scan"):
            raise UserError(
                f"the image processor of {model_dir} cuts pictures into crops (do_pan_and_scan), which this "
                "version does not do",
                f"set it to false in {PREPROCESSOR}",
            )
        default = config.get("mm_tokens_per_image", 256)
        sizes = {"tokens": whole.get("image_seq_length") or default, "patch": vision.get("patch_size", 14)}
    elif kind == "pixtral":
        patch = whole.get("patch_size") or vision.get("patch_size", 16)
        merge = whole.get("spatial_merge_size") or config.get("spatial_merge_size") or 1
        sizes = {"patch": int(patch), "merge": int(merge)}
        feature = str(whole.get("image_token", "[IMG]"))
        tokens = {
            "placeholder": feature,
            "feature": feature,
            "break": str(whole.get("image_break_token", "[IMG_BREAK]")),
            "end": str(whole.get("image_end_token", "[IMG_END]")),
        }
    elif kind == "llama4":
        ratio = whole.get("pixel_shuffle_ratio") or vision.get("pixel_shuffle_ratio", 0.5)
        patch = whole.get("patch_size") or vision.get("patch_size", 14)
        sizes = {"patch": int(patch), "ratio": round(1 / float(ratio) ** 2)}
        tokens = {role: str(whole.get(key, token)) for role, (key, token) in LLAMA4.items()}
    elif kind == "llava":
        sizes = {"patch": int(whole.get("patch_size") or vision.get("patch_size", 14))}
        tokens = dict.fromkeys(("placeholder", "feature"), str(whole.get("image_token", "<image>")))
    elif kind in ("qwen_vl", "paddleocr_vl"):
        usual = "<|image_pad|>" if kind == "qwen_vl" else "<|IMAGE_PLACEHOLDER|>"
        feature = getattr(tokenizer, "image_token", None) or usual
        tokens = {"placeholder": feature, "feature": feature}
    known = tokenizer.get_vocab()
    missing = [text for text in tokens.values() if text not in known]
    if missing:
        raise UserError(
            f"the tokenizer of {model_dir} has no {missing[0]}, which stands for a picture",
            "use the tokenizer of the model's own repository",
        )
    feature_id = int(known[tokens["feature"]])
    stated = next(
        (config[key] for key in ("image_token_id", "image_token_index") if key in config), feature_id
    )
    if stated != feature_id:
        raise UserError(
            f"the tokenizer gives {tokens['feature']} the id {feature_id}, and in {model_dir}/config.json a "
            f"picture's tokens have {stated}",
            "use the tokenizer of the model's own repository",
        )
    return ImageSettings(
        kind,
        _changed(settings, kind, images),
        tokens,
        feature_id,
        sizes,
        Limits(images.longest_side, images.max_pixels),
        str(kept),
    )


LLAMA4 = {
    "placeholder": ("image_token", "<|image|>"),
    "feature": ("patch_token", "<|patch|>"),
    "begin": ("start_of_image_token", "<|image_start|>"),
    "end": ("end_of_image_token", "<|image_end|>"),
    "column": ("tile_x_separator_token", "<|tile_x_separator|>"),
    "row": ("tile_y_separator_token", "<|tile_y_separator|>"),
}
"""The keys of processor_config.json for Llama 4's tokens, with transformers' defaults, by their roles."""

UNREAD = (
    *("image_processor_type", "processor_class", "image_seq_length", "data_format", "input_data_format"),
    *("auto_map", "_valid_processor_keys", "device", "feature_extractor_type"),
)
"""Keys of preprocessor_config.json that transformers' classes do not take, or that choose the class."""


def _changed(processor: dict[str, Any], kind: str, images: Images) -> dict[str, Any]:
    """Return a processor's settings with the recipe's."""
    if refused := refused_setting(images.tokens, images.tiles, kind):
        key, reason, help = refused
        raise UserError(f"{key}: {reason}", help)
    if images.tiles is not None:
        return {**processor, "max_patches": images.tiles}
    if images.tokens is None:
        return processor
    if kind.startswith("gemma4"):
        return {**processor, "max_soft_tokens": images.tokens}
    block = int(processor.get("patch_size", 14)) * int(processor.get("merge_size", 2))
    size = dict(processor.get("size") or {})
    least = int(processor.get("min_pixels") or size.get("shortest_edge") or 56 * 56)
    most = images.tokens * block**2
    rest = {key: value for key, value in processor.items() if key not in ("min_pixels", "max_pixels")}
    return {**rest, "size": {"shortest_edge": min(least, most), "longest_edge": most}}


def _read(file: Path) -> dict[str, Any]:
    """Return a JSON object of a checkpoint's folder, {} if the file is missing."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read: {first_line(error)}", "download it again") from error
    return value if isinstance(value, dict) else {}


def _named(tokenizer: Any, name: str, model_dir: Path) -> str:
    text = getattr(tokenizer, name, None)
    if not isinstance(text, str):
        raise UserError(
            f"the tokenizer of {model_dir} names no {name}, which pictures need",
            "use the tokenizer_config.json of the model's own repository",
        )
    return text


def rotary_positions(tokens: int, at: Sequence[tuple[int, tuple[int, int]]]) -> np.ndarray:
    """Return the positions of a sample's tokens in time, height and width, int32[tokens, 3].

    A text token is one further than all before it, in each. The tokens of a picture begin one further, and
    count their rows and columns from there.

    Args:
        tokens: how many the sample has.
        at: of each picture, its first token, and its rows and columns of tokens.
    """
    out = np.empty((tokens, 3), np.int32)
    following, place = 0, 0
    for first, (rows, columns) in at:
        out[place:first] = (following + np.arange(first - place, dtype=np.int32))[:, None]
        following += first - place
        count = rows * columns
        row, column = np.divmod(np.arange(count, dtype=np.int32), columns)
        out[first : first + count] = np.stack([np.zeros_like(row), row, column], -1) + following
        following += max(rows, columns)
        place = first + count
    out[place:] = (following + np.arange(tokens - place, dtype=np.int32))[:, None]
    return out
