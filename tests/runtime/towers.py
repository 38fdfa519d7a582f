"""Tiny multimodal models of each kind with random values, and pictures of unlike sizes for them and for
transformers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

from recipec.runtime.data.image_processor import rotary_positions
from recipec.runtime.model.families.vision import VisionArchitecture

GRIDS = ((6, 12), (12, 6), (18, 12))
"""Rows and columns of patches of the pictures."""
ROWS = ((0, 1), (2,))
"""The pictures of the rows that are compared with transformers one by one."""
PACKED = ((), (0,), (1, 2), (3,), (), (4,), (5, 6), (7,))
"""The pictures of a micro-batch's rows."""
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
    "mistral3-experts": {
        "vision_config": {
            **{"model_type": "pixtral", **SIZES, "num_hidden_layers": 2, "num_attention_heads": 4},
            **{"image_size": 80, "patch_size": 4},
        },
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
    "llava-clip": {
        "vision_config": {
            **{"model_type": "clip_vision_model", **SIZES, "num_hidden_layers": 3, "num_attention_heads": 4},
            **{"image_size": 24, "patch_size": 4},
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    },
    "qwen2_vl": {
        "vision_config": {
            **{
                "embed_dim": 48,
                "mlp_ratio": 2,
                "hidden_size": 36,
                "depth": 2,
                "num_heads": 4,
                "patch_size": 4,
            },
        },
    },
    "qwen2_5_vl": {"vision_config": {**QWEN, "window_size": 16, "fullatt_block_indexes": [1]}},
    "qwen3_vl": {
        "vision_config": {**QWEN, "num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2]}
    },
    "qwen3_vl_moe": {
        "vision_config": {**QWEN, "num_position_embeddings": 36, "deepstack_visual_indexes": [1]}
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
CASES["paddleocr_vl"] = {
    "vision_config": {
        **{"model_type": "paddleocr_vl_vision", **SIZES, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"image_size": 20, "patch_size": 4},
    },
}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
TEXTS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "mistral3": "mistral",
    "llava": "mistral",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "llama4": "llama4_text",
    "paddleocr_vl": "paddleocr_vl_text",
}
"""The model type of the text config of each kind."""


PARTS = (
    "visual.",
    "projector.",
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "embed_vision.",
    "vision_embedder.",
)
"""What the names of a tower's tensors begin with, without their prefix."""
TURNED = ("qwen", "paddleocr")
"""What the names of models begin with that turn by time, row and column."""
UNUSED = {"llava-clip": r"layers\.2\.|post_layernorm"}
"""Tensors of towers that no feature is made of, by case."""
TOKEN = 50
"""The token that stands for a picture."""
SIX_HEADS = {
    **{"num_attention_heads": 6, "head_dim": 6},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]},
}
LOCAL = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
FURTHER: dict[str, dict[str, Any]] = {
    "gemma3": LOCAL,
    "gemma4": {**LOCAL, "hidden_size_per_layer_input": 4, "pad_token_id": 3},
    "gemma4-plain": LOCAL,
    "gemma4-both_ways": {**LOCAL, "use_bidirectional_attention": "vision"},
    "gemma4_unified": {**LOCAL, "use_bidirectional_attention": None},
    "gemma4_unified-both_ways": {**LOCAL, "use_bidirectional_attention": "vision"},
    "llava-clip": {"model_type": "llama"},
    "mistral3": {"sliding_window": None},
    "mistral3-experts": {
        **{"model_type": "mistral4", "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8},
        **{"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": 24},
        **{"n_routed_experts": 5, "num_experts_per_tok": 2},
    },
    "qwen2_vl": SIX_HEADS,
    "qwen2_5_vl": SIX_HEADS,
    "qwen3_vl_moe": {"moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2},
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
    named = "image_token_id" if kind.startswith(("gemma4", *TURNED)) else "image_token_index"
    given = {"text_config": text, named: TOKEN, **(CASES.get(case) or CASES[kind])}
    return transformers.AutoConfig.for_model(kind, **given)


def reference(case: str) -> tuple[Any, Any]:
    """Return transformers' model of a case, with random values in all arrays, and its config."""
    config = config_of(case)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # grouped products take no float64
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
    """The pictures of some rows.

    Attributes:
        patches: of each, float32[P, F], in the tower's order.
        places: of each, int32[P, 2], the row and column of a patch.
        vision: the tower that reads them.
        rows: the pictures of each row.
    """

    patches: Sequence[np.ndarray]
    places: Sequence[np.ndarray]
    vision: VisionArchitecture
    rows: Sequence[Sequence[int]]

    @classmethod
    def of(
        cls,
        vision: VisionArchitecture,
        rows: Sequence[Sequence[int]] = ROWS,
        seed: Sequence[int] = (1,),
    ) -> Pictures:
        """Return random pictures."""
        fixed = vision.patches is not None
        merge = 1 if fixed else int(vision.patches_of_feature**0.5)
        count = 1 + max(i for row in rows for i in row)
        grids = [(6, 6) if fixed else GRIDS[i % len(GRIDS)] for i in range(count)]
        random = np.random.default_rng(seed)
        places = [_places(grid, merge) for grid in grids]
        patches = [
            random.uniform(-1, 1, (len(at), vision.patch_features)).astype(np.float32) for at in places
        ]
        return cls(patches, places, vision, rows)

    def counts(self) -> list[int]:
        """Return the features of each picture."""
        return [len(at) // self.vision.patches_of_feature for at in self.places]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return patches, patch_images and patch_positions of the rows; shorter ones are padded, and where
        pictures may have any size, all are."""
        padding = 0 if self.vision.patches is not None else 4 * self.vision.patches_of_feature
        rows = len(self.rows)
        length = padding + max(sum(len(self.places[i]) for i in row) for row in self.rows)
        patches = np.zeros((rows, length, self.patches[0].shape[1]), np.float32)
        images, at = np.zeros((rows, length), np.int32), np.zeros((rows, length, 2), np.int32)
        for r, row in enumerate(self.rows):
            start = 0
            for number, i in enumerate(row, 1):
                here = slice(start, start + len(self.places[i]))
                patches[r, here], images[r, here], at[r, here] = self.patches[i], number, self.places[i]
                start = here.stop
        return {"patches": patches, "patch_images": images, "patch_positions": at}

    def arguments(self, model: Any, chosen: Sequence[int]) -> dict[str, Any]:
        """Return transformers' arguments for some pictures."""
        return pixel_arguments(model, [(self.patches[i], self.places[i]) for i in chosen])

    def features(self, model: Any, i: int) -> np.ndarray:
        """Return transformers' features of a picture, [1 + S, R, D]."""
        kind, given = model.config.model_type, self.arguments(model, [i])
        if kind == "llama4":
            projected = model.multi_modal_projector(
                model.vision_model(given["pixel_values"]).last_hidden_state
            )
            return projected.numpy().reshape(1, self.counts()[i], -1)
        if kind == "llava" and "image_sizes" in given:
            given |= {"vision_feature_select_strategy": "full"}
        out = model.model.get_image_features(**given, return_dict=True)
        pooled = out.pooler_output
        first = pooled[0] if isinstance(pooled, tuple | list) else pooled
        lists = [first, *(getattr(out, "deepstack_features", None) or ())]
        return np.stack([one.numpy().reshape(self.counts()[i], -1) for one in lists])


def pixel_arguments(model: Any, pictures: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Return transformers' arguments for pictures.

    Args:
        pictures: of each, its patches float32[P, F] in the tower's order, and their places int32[P, 2].
    """
    kind = model.config.model_type
    tiled = kind in ("gemma3", "llama4") or model.config.vision_config.model_type == "clip_vision_model"
    if tiled:
        return {"pixel_values": torch.tensor(np.stack([_pixels(*one) for one in pictures]))}
    if kind.startswith("gemma4"):
        most = max(len(at) for _, at in pictures)
        patches, places = [], []
        for values, at in pictures:
            order, extra = np.lexsort(at.T[::-1]), most - len(at)
            patches.append(np.pad(values[order], ((0, extra), (0, 0))))
            places.append(np.pad(at[order][:, ::-1], ((0, extra), (0, 0)), constant_values=-1))
        return {
            "pixel_values": torch.tensor(np.stack(patches)),
            "image_position_ids": torch.tensor(np.stack(places)).long(),
        }
    if kind in ("mistral3", "llava"):
        whole = [_pixels(*one) for one in pictures]
        sizes = [one.shape[1:] for one in whole]
        height, width = (max(size[axis] for size in sizes) for axis in (0, 1))
        padded = [
            np.pad(one, ((0, 0), (0, height - y), (0, width - x)))
            for one, (y, x) in zip(whole, sizes, strict=True)
        ]
        return {"pixel_values": torch.tensor(np.stack(padded)), "image_sizes": torch.tensor(sizes)}
    if kind == "paddleocr_vl":  # row by row
        ordered = [patches[np.lexsort(at.T[::-1])] for patches, at in pictures]
        side = math.isqrt(ordered[0].shape[1] // 3)
        pictures = [
            (patches.reshape(-1, 3, side, side), at)
            for patches, (_, at) in zip(ordered, pictures, strict=True)
        ]
    return {
        "pixel_values": torch.tensor(np.concatenate([patches for patches, _ in pictures])),
        "image_grid_thw": torch.tensor([[1, *at.max(0) + 1] for _, at in pictures]),
    }


def _pixels(patches: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return a picture's pixels, float32[3, height, width]."""
    size = math.isqrt(patches.shape[1] // 3)
    height, width = (places.max(0) + 1) * size
    out = np.empty((3, height, width), np.float32)
    for patch, (y, x) in zip(patches, places, strict=True):
        out[:, y * size : (y + 1) * size, x * size : (x + 1) * size] = patch.reshape(3, size, size)
    return out


def arguments(model: Any, one: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return transformers' arguments for the pictures of a micro-batch, whose rows have one sample each.

    Models that turn by time, row and column get no positions: transformers finds them by itself.
    """
    pictures = [
        (one["patches"][r, mine], one["patch_positions"][r, mine])
        for r, images in enumerate(one["patch_images"])
        for mine in (images == number for number in range(1, images.max() + 1))
    ]
    kind = model.config.model_type
    kinds = torch.tensor((one["image_ids"] > 0).astype(np.int64))
    out: dict[str, Any] = pixel_arguments(model, pictures) if pictures else {}
    if kind == "gemma3":
        out["token_type_ids"] = kinds
    if kind.startswith(("gemma4", *TURNED)):
        out["mm_token_type_ids"] = kinds
    return {**out, "position_ids": None} if kind.startswith(TURNED) else out


def tokens_of(pictures: Pictures, seed: Sequence[int] = (2,), text: int = 0) -> dict[str, np.ndarray]:
    """Return the tokens of the rows, with the arrays that say which stand for pictures.

    Args:
        text: the most tokens of text after a row's pictures. The rows have room for as many.
    """
    random, rows, counts = np.random.default_rng(seed), [], pictures.counts()
    for row in pictures.rows:
        tokens, ids = [random.integers(4, 40, 3)], [np.zeros(3, np.int32)]
        for number, i in enumerate(row, 1):
            between = int(random.integers(2, 5))
            tokens += [np.full(counts[i], TOKEN), random.integers(4, 40, between)]
            ids += [np.full(counts[i], number), np.zeros(between, np.int32)]
        if text:
            after = int(random.integers(text // 2, text + 1))
            tokens, ids = [*tokens, random.integers(4, 40, after)], [*ids, np.zeros(after, np.int32)]
        rows.append((np.concatenate(tokens), np.concatenate(ids)))
    room = [3 + sum(counts[i] + 4 for i in row) + text for row in pictures.rows]
    length = 2 + (max(room) if text else max(len(tokens) for tokens, _ in rows))
    names = ("tokens", "positions", "segment_ids", "image_ids", "image_features")
    out = {name: np.zeros((len(rows), length), np.int32) for name in names}
    for r, (tokens, ids) in enumerate(rows):
        here = slice(len(tokens))
        out["tokens"][r, here], out["image_ids"][r, here] = tokens, ids
        out["positions"][r, here], out["segment_ids"][r, here] = np.arange(len(tokens)), 1
    out["image_features"] = np.where(out["image_ids"] > 0, np.cumsum(out["image_ids"] > 0, 1) - 1, -1)
    return out | pictures.arrays()


def batches(vision: VisionArchitecture, turned: bool) -> Callable[..., dict[str, np.ndarray]]:
    """Return a function that makes micro-batches with pictures, as `training.batch` does without.

    Args:
        turned: whether the model's positions are those of time, row and column.
    """

    @functools.cache
    def samples(index: int, seed: int) -> dict[str, np.ndarray]:
        pictures = Pictures.of(vision, PACKED, (seed, index))
        one = tokens_of(pictures, (seed, index, 1), text=12)
        shown = one["image_ids"] > 0
        one["loss_mask"] = (one["segment_ids"] > 0) & ~shown & (one["positions"] >= 3)
        if turned:
            one["rotary_positions"] = np.zeros((*shown.shape, 3), np.int32)
            merge = math.isqrt(vision.patches_of_feature)
            for r, row in enumerate(pictures.rows):
                firsts = [int(np.argmax(one["image_ids"][r] == number)) for number in range(1, len(row) + 1)]
                grids = [tuple((pictures.places[i].max(0) + 1) // merge) for i in row]
                length = int((one["segment_ids"][r] > 0).sum())
                at = rotary_positions(length, [*zip(firsts, grids, strict=True)])
                one["rotary_positions"][r, :length] = at
        return one

    def batch(index: int, accumulation: int = 1, seed: int = 0) -> dict[str, np.ndarray]:
        first = index - index % accumulation
        norm = sum(int(samples(i, seed)["loss_mask"].sum()) for i in range(first, first + accumulation))
        return {
            **samples(index, seed),
            "norm": np.float32(norm / accumulation),
            "index": np.int32(index),
        }

    return batch


def _places(grid: tuple[int, int], merge: int) -> np.ndarray:
    """Return int32[P, 2], the rows and columns of a picture's patches, block by block."""
    rows, columns = grid
    at = np.stack(np.mgrid[:rows, :columns], -1)
    at = at.reshape(rows // merge, merge, columns // merge, merge, 2).swapaxes(1, 2)
    return at.reshape(-1, 2).astype(np.int32)
