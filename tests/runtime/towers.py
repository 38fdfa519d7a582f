"""Tiny multimodal models of each kind with random values, and pictures of unlike sizes for them and for
transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

from recipec.runtime.model.families.vision import VisionArchitecture

GRIDS = ((6, 12), (12, 6), (18, 12))
"""Rows and columns of patches of the pictures: the first two in one row of a batch, the third in another."""
TEXT = {
    **{"vocab_size": 64, "hidden_size": 36, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
    **{"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 0},
}
SIZES = {"hidden_size": 48, "intermediate_size": 40}
QWEN = {**SIZES, "depth": 3, "num_heads": 4, "out_hidden_size": 36, "patch_size": 4}
CASES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "vision_config": {
            **{
                "model_type": "siglip_vision_model",
                **SIZES,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
            },
            **{"image_size": 24, "patch_size": 4, "layer_norm_eps": 1e-3, "vision_use_head": False},
        },
        "mm_tokens_per_image": 9,
    },
    "gemma4": {
        "vision_config": {
            **{"model_type": "gemma4_vision", **SIZES, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 20},
            **{"use_clipped_linears": True, "standardize": True},
        },
        "audio_config": None,
    },
    "gemma4-plain": {
        "vision_config": {
            **{"model_type": "gemma4_vision", **SIZES, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"num_key_value_heads": 4, "head_dim": 8, "patch_size": 4, "position_embedding_size": 20},
        },
        "audio_config": None,
    },
    "gemma4_unified": {
        "vision_config": {
            **{"model_type": "gemma4_unified_vision", "patch_size": 2, "pooling_kernel_size": 2},
            **{"mm_embed_dim": 40, "output_proj_dims": 40, "mm_posemb_size": 20},
        },
        "audio_config": None,
    },
    "mistral3": {
        "vision_config": {
            **{"model_type": "pixtral", **SIZES, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"image_size": 80, "patch_size": 4},
        },
        "multimodal_projector_bias": True,
    },
    "mistral3-threes": {
        "vision_config": {
            **{"model_type": "pixtral", **SIZES, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{
                "image_size": 80,
                "patch_size": 4,
                "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        "spatial_merge_size": 3,
    },
    "llava": {
        "vision_config": {
            **{"model_type": "pixtral", **SIZES, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"image_size": 80, "patch_size": 4},
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "qwen2_5_vl": {"vision_config": {**QWEN, "window_size": 16, "fullatt_block_indexes": [1]}},
    "qwen3_vl": {
        "vision_config": {**QWEN, "num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2]}
    },
    "qwen3_5": {"vision_config": {**QWEN, "num_position_embeddings": 25}},
    "llama4": {
        "vision_config": {
            **{"model_type": "llama4_vision_model", "hidden_size": 48, "intermediate_size": 192},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 24, "patch_size": 4},
            **{"vision_output_dim": 20, "projector_input_dim": 20, "projector_output_dim": 20},
        },
    },
}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
TEXTS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "mistral3": "mistral",
    "llava": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_5": "qwen3_5_text",
    "llama4": "llama4_text",
}
"""The model type of the text config of each kind."""


PARTS = (
    "visual.",
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "embed_vision.",
    "vision_embedder.",
)
"""What the names of a tower's tensors begin with, without their prefix."""
TOKEN = 50
"""The token that stands for a picture."""
LOCAL = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
FURTHER: dict[str, dict[str, Any]] = {
    "gemma3": LOCAL,
    "gemma4": {**LOCAL, "hidden_size_per_layer_input": 4, "pad_token_id": 3},
    "gemma4-plain": LOCAL,
    "gemma4-both_ways": {**LOCAL, "use_bidirectional_attention": "vision"},
    "gemma4_unified": {**LOCAL, "use_bidirectional_attention": None},
    "gemma4_unified-both_ways": {**LOCAL, "use_bidirectional_attention": "vision"},
    "mistral3": {"sliding_window": None},
    "qwen2_5_vl": {
        **{"num_attention_heads": 6, "head_dim": 6},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]},
    },
    "qwen3_5": {
        **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2},
        **{"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 4},
        **{"head_dim": 32},
    },
    "llama4": {
        **{"attention_chunk_size": 100, "interleave_moe_layer_step": 2, "num_local_experts": 5},
        **{"intermediate_size_mlp": 40, "num_experts_per_tok": 1, "no_rope_layers": [1, 0]},
    },
}
"""What a case's text config has besides TEXT."""


def config_of(case: str) -> Any:
    """Return transformers' config of a case."""
    kind = case.partition("-")[0]
    text = {**TEXT, "model_type": TEXTS[kind], **(SECTIONS if "vl" in kind else {}), **FURTHER.get(case, {})}
    named = "image_token_id" if "qwen" in kind or "gemma4" in kind else "image_token_index"
    given = {"text_config": text, named: TOKEN, **(CASES.get(case) or CASES[kind])}
    return transformers.AutoConfig.for_model(kind, **given)


def reference(case: str) -> tuple[Any, Any]:
    """Return transformers' model of a case, with random values in all arrays, and its config."""
    config = config_of(case)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval().float()
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            value.copy_(torch.randn(value.shape) * 0.3 + 0.3 * (value.ndim == 1))
            if name.endswith("_min"):
                value.fill_(-0.7)
            if name.endswith("_max"):
                value.fill_(0.9)
    return model, config


@dataclass(frozen=True)
class Pictures:
    """The pictures of two rows: two in the first, one in the second.

    Attributes:
        pixels: of each, float32[3, height, width].
        patches: of each, float32[P, F], in the tower's order.
        places: of each, int32[P, 2], the row and column of a patch.
        grids: rows and columns of patches of each.
        vision: the tower that reads them.
    """

    pixels: Sequence[np.ndarray]
    patches: Sequence[np.ndarray]
    places: Sequence[np.ndarray]
    grids: Sequence[tuple[int, int]]
    vision: VisionArchitecture

    ROWS = ((0, 1), (2,))

    @classmethod
    def of(cls, case: str, vision: VisionArchitecture, config: Mapping[str, Any]) -> Pictures:
        """Return random pictures for a case."""
        size = config["vision_config"]["patch_size"]
        size *= config["vision_config"].get("pooling_kernel_size", 1) if vision.layers is None else 1
        fixed = vision.patches is not None
        merge = 1 if fixed else int(vision.patches_of_feature**0.5)
        grids = ((6, 6),) * 3 if fixed else GRIDS
        random = np.random.default_rng(1)
        pixels = [random.uniform(-1, 1, (3, y * size, x * size)).astype(np.float32) for y, x in grids]
        places = [_places(grid, merge) for grid in grids]
        patches = []
        for picture, at in zip(pixels, places, strict=True):
            cut = np.stack([picture[:, y * size : (y + 1) * size, x * size : (x + 1) * size] for y, x in at])
            if case.startswith("gemma4"):
                cut = cut.transpose(0, 2, 3, 1)
            if "qwen" in case:
                # Both frames of a still picture are the same. These differ, so that their order counts.
                cut = np.stack([cut, cut * 0.5], 2)
            patches.append(cut.reshape(len(at), -1))
        return cls(pixels, patches, places, grids, vision)

    def counts(self) -> list[int]:
        """Return the features of each picture."""
        return [len(at) // self.vision.patches_of_feature for at in self.places]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return patches, patch_images and patch_positions of both rows; the shorter one is padded, and where
        pictures may have any size, both are."""
        padding = 0 if self.vision.patches is not None else 4 * self.vision.patches_of_feature
        rows = len(self.ROWS)
        length = padding + max(sum(len(self.places[i]) for i in row) for row in self.ROWS)
        patches = np.zeros((rows, length, self.patches[0].shape[1]), np.float32)
        images, at = np.zeros((rows, length), np.int32), np.zeros((rows, length, 2), np.int32)
        for r, row in enumerate(self.ROWS):
            start = 0
            for number, i in enumerate(row, 1):
                here = slice(start, start + len(self.places[i]))
                patches[r, here], images[r, here], at[r, here] = self.patches[i], number, self.places[i]
                start = here.stop
        return {"patches": patches, "patch_images": images, "patch_positions": at}

    def arguments(self, model: Any, chosen: Sequence[int]) -> dict[str, Any]:
        """Return transformers' arguments for some pictures."""
        kind = model.config.model_type
        if kind in ("gemma3", "llama4"):
            return {"pixel_values": torch.tensor(np.stack([self.pixels[i] for i in chosen]))}
        if kind.startswith("gemma4"):
            most = max(len(self.places[i]) for i in chosen)
            patches, at = [], []
            for i in chosen:
                order, extra = np.lexsort(self.places[i].T[::-1]), most - len(self.places[i])
                patches.append(np.pad(self.patches[i][order], ((0, extra), (0, 0))))
                at.append(np.pad(self.places[i][order][:, ::-1], ((0, extra), (0, 0)), constant_values=-1))
            return {
                "pixel_values": torch.tensor(np.stack(patches)),
                "image_position_ids": torch.tensor(np.stack(at)).long(),
            }
        if kind in ("mistral3", "llava"):
            sizes = [self.pixels[i].shape[1:] for i in chosen]
            height, width = (max(size[axis] for size in sizes) for axis in (0, 1))
            pixels = [
                np.pad(self.pixels[i], ((0, 0), (0, height - y), (0, width - x)))
                for i, (y, x) in zip(chosen, sizes, strict=True)
            ]
            return {"pixel_values": torch.tensor(np.stack(pixels)), "image_sizes": torch.tensor(sizes)}
        return {
            "pixel_values": torch.tensor(np.concatenate([self.patches[i] for i in chosen])),
            "image_grid_thw": torch.tensor([[1, *self.grids[i]] for i in chosen]),
        }

    def features(self, model: Any, i: int) -> np.ndarray:
        """Return transformers' features of a picture, [1 + S, R, D]."""
        kind, given = model.config.model_type, self.arguments(model, [i])
        if kind == "llama4":
            projected = model.multi_modal_projector(
                model.vision_model(given["pixel_values"]).last_hidden_state
            )
            return projected.numpy().reshape(1, self.counts()[i], -1)
        if kind == "llava":
            given |= {"vision_feature_select_strategy": "full"}
        out = model.model.get_image_features(**given, return_dict=True)
        pooled = out.pooler_output
        first = pooled[0] if isinstance(pooled, tuple | list) else pooled
        lists = [first, *(getattr(out, "deepstack_features", None) or ())]
        return np.stack([one.numpy().reshape(self.counts()[i], -1) for one in lists])


def tokens_of(pictures: Pictures) -> dict[str, np.ndarray]:
    """Return the tokens of both rows, with the arrays that say which stand for pictures."""
    random, rows, counts = np.random.default_rng(2), [], pictures.counts()
    for row in pictures.ROWS:
        tokens, ids = [random.integers(4, 40, 3)], [np.zeros(3, np.int32)]
        for number, i in enumerate(row, 1):
            text = int(random.integers(2, 5))
            tokens += [np.full(counts[i], TOKEN), random.integers(4, 40, text)]
            ids += [np.full(counts[i], number), np.zeros(text, np.int32)]
        rows.append((np.concatenate(tokens), np.concatenate(ids)))
    length = 2 + max(len(tokens) for tokens, _ in rows)
    names = ("tokens", "positions", "segment_ids", "image_ids", "image_features")
    out = {name: np.zeros((len(rows), length), np.int32) for name in names}
    for r, (tokens, ids) in enumerate(rows):
        here = slice(len(tokens))
        out["tokens"][r, here], out["image_ids"][r, here] = tokens, ids
        out["positions"][r, here], out["segment_ids"][r, here] = np.arange(len(tokens)), 1
    out["image_features"] = np.where(out["image_ids"] > 0, np.cumsum(out["image_ids"] > 0, 1) - 1, -1)
    return out | pictures.arrays()


def _places(grid: tuple[int, int], merge: int) -> np.ndarray:
    """Return int32[P, 2], the rows and columns of a picture's patches, block by block."""
    rows, columns = grid
    at = np.stack(np.mgrid[:rows, :columns], -1)
    at = at.reshape(rows // merge, merge, columns // merge, merge, 2).swapaxes(1, 2)
    return at.reshape(-1, 2).astype(np.int32)
