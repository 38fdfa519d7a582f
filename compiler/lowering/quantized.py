"""Checkpoints whose weights are stored quantized, told by what their tools write; few can be trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipec.runtime.model.families import UnsupportedCheckpoint, family_of

METHODS = {
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8",
    "gptq": "GPTQ",
    "mxfp4": "MXFP4",
}
"""Names of the methods, by `quant_method` of a config.json; others are named as they stand there."""

ENDINGS = {
    ".g_idx": "GPTQ",
    ".weight_scale_inv": "FP8",
    ".weight_packed": "compressed-tensors",
    ".absmax": "bitsandbytes",
    ".quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".qweight": "AWQ",
}
"""How the names of tensors end that a method writes beside the weights or in their place; the first that any
tensor has tells. GPTQ writes a `.qweight` too."""


def by_config(config: Any) -> str | None:
    """The method that a config.json names, None where it names none."""
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
    if method is None:  # of older versions of bitsandbytes
        return "bitsandbytes" if "load_in_4bit" in section or "load_in_8bit" in section else key
    return METHODS.get(str(method), str(method))


def is_read(config: Any) -> bool:
    """Whether the family of a config.json reads weights that are stored as it says."""
    try:
        return isinstance(config, dict) and family_of(config).reads(config.get("quantization_config"))
    except UnsupportedCheckpoint:
        return False


def by_tensors(types: Mapping[str, str]) -> str | None:
    """The method that the tensors' names or types show, None where they show none.

    Args:
        types: of each tensor, as safetensors names them.
    """
    for ending, method in ENDINGS.items():
        if any(name.endswith(ending) for name in types):
            return method
    return "FP8" if any(kind.startswith("F8_") for kind in types.values()) else None
