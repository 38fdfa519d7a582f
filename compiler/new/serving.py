"""The `serve` section of a new recipe: what can be tried on a machine, the best first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compiler.hardware import Accelerator
from compiler.wording import divisors

LENGTHS = (16384, 8192, 4096)
"""Of `max_model_len`, the longest first."""


def sections(accelerator: Accelerator) -> Iterator[dict[str, Any]]:
    """Sections for a machine: as few copies of the model as can be, the longest requests first."""
    cache = "fp8" if accelerator.fp8_kv_cache else "auto"
    for split in reversed(divisors(accelerator.devices)):
        for length in LENGTHS:
            section: dict[str, Any] = {"accelerator": accelerator.name, "tensor_parallel_size": split}
            if split < accelerator.devices:
                section["data_parallel_size"] = accelerator.devices // split
            yield {**section, "max_model_len": length, "kv_cache_dtype": cache}
