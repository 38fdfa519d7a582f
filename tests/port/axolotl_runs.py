"""Port a config of Axolotl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recipec.compiler.port.keys import words
from recipec.compiler.port.ledger import Ledger
from tests.port.dialects import base, ported

BASE = base("axolotl")
WITHIN = words(
    """recipe save_compressed noise_schedule min_mask_ratio max_mask_ratio num_diffusion_steps eps
    importance_weighting mask_token_id mask_token_str generation_interval generation_steps
    generation_max_length backend base_url api_key project_id lora_rank train_attn train_mlp train_unembed
    loss_fn loss_fn_config pipeline max_sample_tokens sample_temperature num_samples reward_funcs save_steps
    save_name_prefix future_timeout use_mora mora_type"""
)
"""Keys that lie in a section of a plug-in's own."""


def port(folder: Path, devices: int | None = None, **changes: Any) -> Ledger:
    """Port the base config with other keys; None removes a key."""
    content = {key: value for key, value in {**BASE, **changes}.items() if value is not None}
    return ported("axolotl", folder, content, devices=devices)
