"""Miniatures of vision towers, with the processors and the tokens of their pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from recipec.runtime.model.families.towers import CLIP, HELD, HOLDER, VISION, kind_of


@dataclass(frozen=True)
class Tower:
    """A multimodal model's vision tower in miniature.

    Attributes:
        config: vision_config. A value of None becomes the text model's hidden size.
        further: further keys of config.json.
        processor: of preprocessor_config.json.
        named: of processor_config.json, the class and numbers of the whole processor.
        special: tokens for pictures; none if the tokenizer of the text model's family has them.
        place: what the chat template writes for a picture.
        media: which of these tokens stand for what, by config.json's keys.
        text: what the names of the text model's tensors begin with.
        held: what the names of the tower's and the projector's begin with.
        unread: shapes of tensors that no feature is made of, by name.
    """

    config: Mapping[str, Any]
    further: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, Any] = field(default_factory=dict)
    special: tuple[str, ...] = ()
    place: str = ""
    media: Mapping[str, str] = field(default_factory=dict)
    text: str = "model.language_model."
    held: tuple[str, ...] = tuple(f"{HOLDER}{part}." for part in HELD)
    unread: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        """Return the files of transformers' processor, as JSON values by name."""
        whole = {**self.processor, **self.named}
        return {"preprocessor_config.json": whole, "processor_config.json": dict(self.named)}


def tower_of(config: Mapping[str, Any]) -> Tower | None:
    """Return the tower of a miniature, None for a text model's."""
    return TOWERS[tower_kind(config)] if VISION in config else None


def tower_kind(config: Mapping[str, Any]) -> str:
    """Return a model's key of TOWERS; another text if it has no entry there."""
    kind = kind_of(config)
    return "pixtral" if kind == "mistral3" != config.get("model_type") else kind


COLORS = {
    **{"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255},
    **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
}


def gemma3_processor(side: int, tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return Gemma 3's processor, as Tower has it.

    Args:
        side: width and height of a picture in pixels, to which each is resized.
        tokens: of a picture.
    """
    size = {"height": side, "width": side}
    picture = {"image_processor_type": "Gemma3ImageProcessor", "resample": 2, "size": size, **COLORS}
    return picture, {"processor_class": "Gemma3Processor", "image_seq_length": tokens}


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCH = 8
"""Height and width of a patch in pixels."""

QWEN_PATCHES = {"patch_size": PATCH, "temporal_patch_size": 2, "spatial_merge_size": 2}
QWEN_SIZES = {
    **{"hidden_size": 32, "intermediate_size": 64, "depth": 2, "num_heads": 2, "out_hidden_size": None},
    **QWEN_PATCHES,
}


def _qwen(
    config: Mapping[str, Any],
    processor: str,
    text: str = Tower.text,
    held: tuple[str, ...] = Tower.held,
) -> Tower:
    return Tower(
        config,
        {},
        {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            **{"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2},
            "size": {"shortest_edge": 256, "longest_edge": 4096},
        },
        {"processor_class": processor},
        ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            "vision_start_token_id": "<|vision_start|>",
            "image_token_id": "<|image_pad|>",
            "vision_end_token_id": "<|vision_end|>",
            "video_token_id": "<|video_pad|>",
        },
        text,
        held,
    )


def _pixtral(merge: int, further: Mapping[str, Any]) -> Tower:
    return Tower(
        {"model_type": "pixtral", **SIZES, "image_size": 64, "patch_size": PATCH},
        {**further, **({"spatial_merge_size": merge} if merge > 1 else {})},
        {
            "image_processor_type": "PixtralImageProcessorFast",
            **{"size": {"longest_edge": 64}, "patch_size": PATCH, **COLORS},
        },
        {"processor_class": "PixtralProcessor", "patch_size": PATCH, "spatial_merge_size": merge},
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "[IMG]",
        {"image_token_index": "[IMG]"},
        "language_model.model.",
        ("vision_tower.", "multi_modal_projector."),
    )


TOWERS = {
    "gemma3": Tower(
        {
            "model_type": "siglip_vision_model",
            **SIZES,
            "image_size": 32,
            "patch_size": PATCH,
            "num_channels": 3,
            "vision_use_head": False,
        },
        {"mm_tokens_per_image": 4},
        *gemma3_processor(32, 4),
    ),
    "gemma4": Tower(
        {
            "model_type": "gemma4_vision",
            **SIZES,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
            "default_output_length": 16,
        },
        {"audio_config": None},
        {
            "image_processor_type": "Gemma4ImageProcessor",
            **{"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        },
        {"processor_class": "Gemma4Processor"},
    ),
    "gemma4_unified": Tower(
        {
            "model_type": "gemma4_unified_vision",
            **{"mm_embed_dim": 32, "output_proj_dims": 32},
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "mm_posemb_size": 64,
            "num_soft_tokens": 16,
        },
        {"audio_config": None},
        {
            "image_processor_type": "Gemma4UnifiedImageProcessor",
            **{"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        },
        {"processor_class": "Gemma4UnifiedProcessor"},
    ),
    "llama4": Tower(
        {
            "model_type": "llama4_vision_model",
            **SIZES,
            # Four patches become one feature, as in the original.
            **{"intermediate_size": 128, "image_size": 32, "patch_size": PATCH, "pixel_shuffle_ratio": 0.5},
            **{"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        },
        {},
        {
            "image_processor_type": "Llama4ImageProcessorFast",
            **{"size": {"height": 32, "width": 32}, "max_patches": 4, **COLORS},
        },
        {"processor_class": "Llama4Processor", "patch_size": PATCH, "pixel_shuffle_ratio": 0.5},
        (
            *("<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>"),
            *("<|tile_x_separator|>", "<|tile_y_separator|>"),
        ),
        "<|image|>",
        {
            "image_token_index": "<|patch|>",
            "boi_token_index": "<|image_start|>",
            "eoi_token_index": "<|image_end|>",
        },
        "language_model.model.",
        ("vision_model.", "multi_modal_projector."),
    ),
    "llava": Tower(
        {"model_type": CLIP, **SIZES, "num_hidden_layers": 2, "image_size": 32, "patch_size": PATCH},
        {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 32},
            "crop_size": {"height": 32, "width": 32},
            **COLORS,
        },
        {
            "processor_class": "LlavaProcessor",
            **{"patch_size": PATCH, "num_additional_image_tokens": 1, "image_token": "<image>"},
            "vision_feature_select_strategy": "default",
        },
        ("<image>",),
        "<image>",
        {"image_token_index": "<image>"},
        "language_model.model.",
        ("vision_tower.vision_model.", "multi_modal_projector."),
        unread={f"vision_tower.vision_model.post_layernorm.{name}": (32,) for name in ("weight", "bias")},
    ),
    "mistral3": _pixtral(2, {"vision_feature_layer": -1, "multimodal_projector_bias": False}),
    "pixtral": _pixtral(1, {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}),
    "paddleocr_vl": Tower(
        {"model_type": "paddleocr_vl_vision", **SIZES, "image_size": 32, **QWEN_PATCHES},
        {},
        {
            "image_processor_type": "PaddleOCRVLImageProcessor",
            **{"patch_size": PATCH, "merge_size": 2, "min_pixels": 256, "max_pixels": 4096, **COLORS},
        },
        {"processor_class": "PaddleOCRVLProcessor"},
        ("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>"),
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        {
            "vision_start_token_id": "<|IMAGE_START|>",
            "image_token_id": "<|IMAGE_PLACEHOLDER|>",
            "vision_end_token_id": "<|IMAGE_END|>",
        },
        "model.",
        ("visual.", "mlp_AR."),
    ),
    "qwen2_vl": _qwen(
        {
            "model_type": "qwen2_vl",
            **{"embed_dim": 32, "mlp_ratio": 2, "depth": 2, "num_heads": 2, "hidden_size": None},
            **QWEN_PATCHES,
        },
        "Qwen2VLProcessor",
        "model.",
        ("visual.",),
    ),
    "qwen2_5_vl": _qwen(
        {"model_type": "qwen2_5_vl", **QWEN_SIZES, "window_size": 32, "fullatt_block_indexes": [1]},
        "Qwen2_5_VLProcessor",
        "model.",
        ("visual.",),
    ),
    **{
        kind: _qwen(
            {
                "model_type": kind,
                **{**QWEN_SIZES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            },
            "Qwen3VLProcessor",
        )
        for kind in ("qwen3_vl", "qwen3_vl_moe")
    },
    **{
        kind: _qwen({"model_type": kind, **QWEN_SIZES, "num_position_embeddings": 16}, "Qwen3VLProcessor")
        for kind in ("qwen3_5", "qwen3_5_moe")
    },
}
"""Kinds of towers whose miniatures are multimodal if the original is. The others get only the text model."""
