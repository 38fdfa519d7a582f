"""Recognize checkpoints with quantized weights by what quantization tools write; few can be trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipec.runtime.model.families import UnsupportedCheckpoint, family_of

METHODS = {
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "fbgemm_fp8": "FBGEMM FP8",
    "gptq": "GPTQ",
    "mxfp4": "MXFP4",
}
"""Display names of the methods, by `quant_method` of a config.json; others keep the name given there."""

ENDINGS = {
    ".g_idx": "GPTQ",
    ".weight_scale_inv": "FP8",
    ".weight_packed": "compressed-tensors",
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".qweight": "AWQ",
}
"""Suffixes of the tensors that a method stores next to the weights or instead of them. The first suffix that
any tensor has decides, because GPTQ stores a `.qweight` too."""


def by_config(config: Any) -> str | None:
    """Return the method that a config.json names, None if it names none."""
    text = config.get("text_config") if isinstance(config, dict) else None
    for part in (config, text):
        for key in ("quantization_config", "compression_config"):
            if isinstance(part, dict) and part.get(key):
                return _named(part[key], key)
    return None


def _named(section: Any, key: str) -> str:
    if not isinstance(section, dict):
        return key
    method = section.get("quant_method")
    if method is None:  # older versions of bitsandbytes
        return "bitsandbytes" if "load_in_4bit" in section or "load_in_8bit" in section else key
    return METHODS.get(str(method), str(method))


def is_read(config: Any) -> bool:
    """Return whether the family of a config.json reads weights in the quantized format that the file
    states."""
    try:
        return isinstance(config, dict) and family_of(config).reads(config.get("quantization_config"))
    except UnsupportedCheckpoint:
        return False


def stored(config: Any) -> str | None:
    """Return the method in which weights are stored that the family reads, None for plain weights."""
    return by_config(config) if is_read(config) else None


def by_tensors(types: Mapping[str, str]) -> str | None:
    """Return the method that the tensors' names or types show, None if they show none.

    Args:
        types: the type of each tensor, as safetensors names it.
    """
    for ending, method in ENDINGS.items():
        if any(name.endswith(ending) for name in types):
            return method
    return "FP8" if any(kind.startswith("F8_") for kind in types.values()) else None
