"""The formats in which a checkpoint may store its weights quantized, by its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model.families.base import Family
from .packed import Format

KEY = "quantization_config"
"""The key of config.json that describes the format."""


def format_of(family: Family, config: Mapping[str, Any]) -> Format | None:
    """Return the format that a config.json names; None if it names none that the family reads.

    Raises:
        UnsupportedCheckpoint: a value of the format is wrong.
    """
    described = config.get(KEY)
    if described is None or not family.reads(described):
        return None
    if described["quant_method"] == "mxfp4":
        from .mxfp4 import Mxfp4

        return Mxfp4()
    from .fp8 import Fp8

    return Fp8.of(described)


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without the description of stored quantization."""
    return {key: value for key, value in config.items() if key != KEY}
