"""What transformers and Tunix's models compute, to be held against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.runtime import training


def reference_logits(model: Any, one: dict[str, np.ndarray]) -> Any:
    """transformers' logits of right-padded rows, a torch tensor."""
    import torch

    tensors = {name: torch.tensor(value).long() for name, value in one.items() if value.ndim == 2}
    return model(
        input_ids=tensors["tokens"],
        attention_mask=(tensors["segment_ids"] > 0).long(),
        position_ids=tensors["positions"],
        use_cache=False,
    ).logits


def losses(folder: Path) -> dict[str, list[float]]:
    import json

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {name: [line[name] for line in lines] for name in ("loss", "grad_norm")}


def split(built: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A and B of each Hugging Face projection."""
    arrays = training.adapters(built)
    out = {}
    for adapter in built.adapters:
        out |= adapter.split(arrays[adapter.a_path], arrays[adapter.b_path])
    return {name: (a.copy(), b.copy()) for name, (a, b) in out.items()}
