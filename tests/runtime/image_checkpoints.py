"""Folders with a tiny tokenizer and the image processor of each kind, as the hub's checkpoints have them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

TURNS = """\
{{ bos_token }}{% for message in messages %}{{ '<turn>' + message['role'] + '\\n' }}\
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}{{ 'PLACE' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\
{{ '<end>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<turn>assistant\\n' }}{% endif %}"""

SPECIAL: Mapping[str, Mapping[str, str]] = {
    "gemma3": {
        "boi_token": "<start_of_image>",
        "image_token": "<image_soft_token>",
        "eoi_token": "<end_of_image>",
    },
    "gemma4": {
        "boi_token": "<|image>",
        "image_token": "<|image|>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    },
    "pixtral": {},
    "qwen_vl": {},
}
"""Tokens that tokenizer_config.json names, by the kind of the processor."""

PLAIN = {
    "pixtral": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "qwen_vl": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
}

PLACES = {
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
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
    "pixtral": {"processor_class": "PixtralProcessor", "patch_size": 4, "spatial_merge_size": 2},
    "qwen_vl": {"processor_class": "Qwen2_5_VLProcessor"},
}
"""processor_config.json, by the kind."""

PATCH = {"gemma3": 4, "gemma4": 2, "pixtral": 4, "qwen_vl": 4}

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
    "pixtral": ("pixtral.processing_pixtral", "PixtralProcessor"),
    "qwen_vl": ("qwen3_vl.processing_qwen3_vl", "Qwen3VLProcessor"),
}
"""transformers' own processors, by the kind."""


def reference(folder: Path, kind: str) -> Any:
    """Return transformers' processor of a folder, with its image processor for Pillow.

    The modules of some processors import torchvision, which only their image processors for it use. So a
    stand-in without content is enough for them.
    """
    import importlib
    import sys
    from types import ModuleType

    from transformers import AutoTokenizer
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    names += ["torchvision.transforms.v2.functional"]
    absent = [name for name in names if name not in sys.modules]
    for name in absent:
        module = ModuleType(name)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    if absent:
        sys.modules[names[-1]].InterpolationMode = object  # type: ignore[attr-defined]
    try:
        module_name, class_name = CLASSES[kind]
        processor = getattr(importlib.import_module(f"transformers.models.{module_name}"), class_name)
    finally:
        for name in absent:
            del sys.modules[name]
    # A processor without its parts for sound and video.
    processor = type(class_name, (processor,), {"check_argument_for_proper_class": lambda *arguments: None})
    settings = {key: value for key, value in PROCESSORS[kind].items() if key != "processor_class"}
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if kind == "gemma4":
        return processor(None, images, tokenizer, None, chat_template=tokenizer.chat_template, **settings)
    if kind == "qwen_vl":
        return processor(images, tokenizer, None, chat_template=tokenizer.chat_template, **settings)
    return processor(images, tokenizer, chat_template=tokenizer.chat_template, **settings)
