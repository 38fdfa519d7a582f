"""Folders with a tiny tokenizer and the image processor of each kind, as the hub's checkpoints have them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

TURNS = """\
{{ bos_token }}{% for message in messages %}{{ '<turn>' + message['role'] + '\\n' }}\
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}{{ 'PLACE' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\
{{ '<end>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<turn>assistant\\n' }}{% endif %}"""

GEMMA4 = {
    **{"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"},
    **{"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
}
SPECIAL: Mapping[str, Mapping[str, str]] = {
    "gemma3": {
        "boi_token": "<start_of_image>",
        "image_token": "<image_soft_token>",
        "eoi_token": "<end_of_image>",
    },
    "gemma4": GEMMA4,
    "gemma4_unified": {**GEMMA4, "video_token": "<|video|>"},
    "llama4": {},
    "llava": {},
    "paddleocr_vl": {"image_token": "<|IMAGE_PLACEHOLDER|>"},
    "pixtral": {},
    "qwen_vl": {},
}
"""Tokens that tokenizer_config.json names, by the kind of the processor."""

PLAIN = {
    "llava": ("<image>",),
    "paddleocr_vl": ("<|IMAGE_START|>", "<|IMAGE_END|>"),
    "llama4": (
        *("<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>"),
        *("<|tile_x_separator|>", "<|tile_y_separator|>"),
    ),
    "pixtral": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "qwen_vl": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
}

PLACES = {
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
    "gemma4_unified": "<|image|>",
    "llama4": "<|image|>",
    "llava": "<image>",
    "paddleocr_vl": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    "pixtral": "[IMG]",
    "qwen_vl": "<|vision_start|><|image_pad|><|vision_end|>",
}
"""What the chat template writes for a picture."""

IMAGES: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": "Gemma3Processor",
        "size": {"height": 24, "width": 24},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_pan_and_scan": None,
        "resample": 2,
    },
    "gemma4": {
        "image_processor_type": "Gemma4ImageProcessor",
        "processor_class": "Gemma4Processor",
        "patch_size": 2,
        "max_soft_tokens": 70,
        "pooling_kernel_size": 3,
    },
    "gemma4_unified": {
        "image_processor_type": "Gemma4UnifiedImageProcessor",
        "processor_class": "Gemma4UnifiedProcessor",
        "patch_size": 2,
        "max_soft_tokens": 70,
        "pooling_kernel_size": 2,
    },
    "llama4": {
        "image_processor_type": "Llama4ImageProcessorFast",
        "processor_class": "Llama4Processor",
        "size": {"height": 24, "width": 24},
        "max_patches": 6,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "llava": {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
        "size": {"shortest_edge": 24},
        "crop_size": {"height": 24, "width": 24},
    },
    "paddleocr_vl": {
        "image_processor_type": "PaddleOCRVLImageProcessor",
        "processor_class": "PaddleOCRVLProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "min_pixels": 256,
        "max_pixels": 2048,
    },
    "pixtral": {
        "image_processor_type": "PixtralImageProcessorFast",
        "processor_class": "PixtralProcessor",
        "size": {"longest_edge": 40},
        "patch_size": 4,
    },
    "qwen_vl": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "min_pixels": 256,
        "max_pixels": 2048,
    },
}
"""preprocessor_config.json, by the kind."""

PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"processor_class": "Gemma3Processor", "image_seq_length": 9},
    "gemma4": {"processor_class": "Gemma4Processor"},
    "gemma4_unified": {"processor_class": "Gemma4UnifiedProcessor"},
    "llama4": {"processor_class": "Llama4Processor", "patch_size": 4, "pixel_shuffle_ratio": 0.5},
    "llava": {
        **{"processor_class": "LlavaProcessor", "patch_size": 4, "num_additional_image_tokens": 1},
        "vision_feature_select_strategy": "default",
    },
    "paddleocr_vl": {"processor_class": "PaddleOCRVLProcessor"},
    "pixtral": {"processor_class": "PixtralProcessor", "patch_size": 4, "spatial_merge_size": 2},
    "qwen_vl": {"processor_class": "Qwen2_5_VLProcessor"},
}
"""processor_config.json, by the kind."""

PATCH = {kind: 2 if kind.startswith("gemma4") else 4 for kind in IMAGES}

TEXT = (
    "What is in these pictures? A red circle, two blue squares and a green triangle, left of it. "
    "user assistant"
)


def write(folder: Path, kind: str, **images: Any) -> Path:
    """Write the files of a kind's checkpoint that say how text and pictures are read.

    Args:
        images: changes of preprocessor_config.json.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    special = ["<pad>", "<eos>", "<bos>", "<turn>", "<end>"]
    special += [*SPECIAL[kind].values(), *PLAIN.get(kind, ())]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": dict(SPECIAL[kind]),
    }
    save(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(TURNS.replace("PLACE", PLACES[kind]), encoding="utf-8")
    save(folder / "preprocessor_config.json", {**IMAGES[kind], **images})
    save(folder / "processor_config.json", PROCESSORS[kind])
    save(folder / "config.json", {"vision_config": {"patch_size": PATCH[kind]}, "vocab_size": 512})
    return folder


def save(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def drawn(size: tuple[int, int], seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Return a picture of a height and a width: a smooth pattern with some noise."""
    random = np.random.default_rng(seed)
    y, x = np.indices(size) / max(size)
    waves = [np.sin(random.uniform(2, 20) * x + random.uniform(2, 20) * y + k) for k in range(3)]
    pixels = 127 + 100 * np.stack(waves, -1) + random.normal(0, 10, (*size, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)


CLASSES = {
    "gemma3": ("gemma3.processing_gemma3", "Gemma3Processor"),
    "gemma4": ("gemma4.processing_gemma4", "Gemma4Processor"),
    "gemma4_unified": ("gemma4_unified.processing_gemma4_unified", "Gemma4UnifiedProcessor"),
    "llama4": ("llama4.processing_llama4", "Llama4Processor"),
    "llava": ("llava.processing_llava", "LlavaProcessor"),
    "paddleocr_vl": ("paddleocr_vl.processing_paddleocr_vl", "PaddleOCRVLProcessor"),
    "pixtral": ("pixtral.processing_pixtral", "PixtralProcessor"),
    "qwen_vl": ("qwen3_vl.processing_qwen3_vl", "Qwen3VLProcessor"),
}
"""transformers' own processors, by the kind."""


def reference(folder: Path, kind: str) -> Any:
    """Return transformers' processor of a folder, with its image processor for Pillow.

    Of two kinds, transformers has none for Pillow: `WITHOUT_PILLOW`.
    """
    from transformers import AutoTokenizer
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    module_name, class_name = CLASSES[kind]
    processor = getattr(imported(module_name), class_name)
    # A processor without its parts for sound and video.
    processor = type(class_name, (processor,), {"check_argument_for_proper_class": lambda *arguments: None})
    settings = {key: value for key, value in PROCESSORS[kind].items() if key != "processor_class"}
    if kind in WITHOUT_PILLOW:
        images = WITHOUT_PILLOW[kind]()
    else:
        images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if kind.startswith("gemma4"):
        return processor(None, images, tokenizer, None, chat_template=tokenizer.chat_template, **settings)
    if kind == "qwen_vl":
        return processor(images, tokenizer, None, chat_template=tokenizer.chat_template, **settings)
    return processor(images, tokenizer, chat_template=tokenizer.chat_template, **settings)


class MergedPatches:
    """The image processor of Gemma 4 12B: that of the others, and transformers' function that merges the
    patches of a square."""

    model_input_names = ("pixel_values",)

    def fetch_images(self, images: Any) -> Any:
        return images

    def __call__(self, images: Sequence[Image.Image], **arguments: Any) -> dict[str, Any]:
        import torch
        from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

        merge = imported("gemma4_unified.image_processing_gemma4_unified").patches_merge
        keys = ("patch_size", "max_soft_tokens", "pooling_kernel_size")
        processor = Gemma4ImageProcessorPil(**{key: IMAGES["gemma4_unified"][key] for key in keys})
        out = processor(images=make_flat(images), return_tensors="np", do_convert_rgb=True)
        patches, places, counts = [], [], []
        for values, at in zip(out["pixel_values"], out["image_position_ids"], strict=True):
            used = at[:, 0] >= 0
            given = (torch.tensor(array[used])[None] for array in (values, at))
            merged, positions = merge(*given, int(used.sum()) // processor.pooling_kernel_size**2)
            counts.append(merged.shape[1])
            empty = processor.max_soft_tokens - counts[-1]
            patches.append(np.pad(merged[0].numpy(), ((0, empty), (0, 0))))
            places.append(np.pad(positions[0].numpy(), ((0, empty), (0, 0)), constant_values=-1))
        return {
            "pixel_values": np.stack(patches),
            "image_position_ids": np.stack(places),
            "num_soft_tokens_per_image": counts,
        }


class Tiles:
    """Llama 4's image processor: transformers' functions for the sizes, Pillow for the scaling, and torch for
    the numbers in bfloat16."""

    model_input_names = ("pixel_values",)

    def fetch_images(self, images: Any) -> Any:
        return images

    def __call__(self, images: Sequence[Image.Image], **arguments: Any) -> dict[str, Any]:
        import torch
        from transformers.image_transforms import split_to_tiles
        from transformers.image_utils import SizeDict

        functions = imported("llama4.image_processing_llama4")
        side, most = IMAGES["llama4"]["size"]["height"], IMAGES["llama4"]["max_patches"]
        known = torch.tensor(functions.find_supported_resolutions(most, SizeDict(height=side, width=side)))

        def numbers(pixels: np.ndarray) -> Any:
            scaled = torch.tensor(pixels.transpose(2, 0, 1))[None].to(torch.bfloat16) * (1 / 255)
            half = torch.tensor([0.5] * 3, dtype=torch.bfloat16)[:, None, None]
            return (scaled - half) / half

        tiles, grids = [], []
        for image in make_flat(images):
            size = image.height, image.width
            canvas = functions.get_best_fit(size, known)
            within = tuple(min(max(own, side), end) for own, end in zip(size, canvas, strict=True))
            height, width = functions.get_max_res_without_distortion(size, within)
            whole = np.zeros((*map(int, canvas), 3), np.uint8)
            whole[: int(height), : int(width)] = np.asarray(image.resize((int(width), int(height)), 2))
            grids.append([int(end) // side for end in canvas])
            tiles.append(split_to_tiles(numbers(whole), *grids[-1])[0])
            if len(tiles[-1]) > 1:
                tiles.append(numbers(np.asarray(image.resize((side, side), 2))))
        pixels = torch.cat(tiles).float().numpy()
        return {"pixel_values": pixels, "aspect_ratios": np.array(grids)}


WITHOUT_PILLOW = {"gemma4_unified": MergedPatches, "llama4": Tiles}
"""The image processors that transformers has only for torchvision, of its functions that do not use it."""


def make_flat(images: Any) -> list[Image.Image]:
    from transformers.image_utils import make_flat_list_of_images

    return make_flat_list_of_images(images)  # type: ignore[no-any-return]


def imported(name: str) -> Any:
    """Import a module of transformers.models.

    Some import torchvision, which only their image processors for it use. So a stand-in without content is
    enough for them.
    """
    import importlib
    import sys
    from types import ModuleType

    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    names += ["torchvision.transforms.v2.functional"]
    absent = [one for one in names if one not in sys.modules]
    for absent_name in absent:
        module = ModuleType(absent_name)
        sys.modules[absent_name] = module
        parent, _, last = absent_name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    if absent:
        sys.modules[names[-1]].InterpolationMode = object  # type: ignore[attr-defined]
    try:
        return importlib.import_module(f"transformers.models.{name}")
    finally:
        for absent_name in absent:
            del sys.modules[absent_name]
