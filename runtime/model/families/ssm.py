"""What the families with Mamba 2 mixers read of a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .decoder_family import Mamba, flag
from .family import UnsupportedCheckpoint, integer

LIMITS = "time_step_limit"


def divided(config: Mapping[str, Any], heads: str, groups: str) -> tuple[int, int]:
    """Return the numbers of heads and of groups, by their keys.

    Raises:
        UnsupportedCheckpoint: unless the groups divide the heads.
    """
    n, k = integer(config, heads), integer(config, groups)
    if n % k:
        raise UnsupportedCheckpoint(f"config.json: {groups} is {k}, which does not divide {n} heads", groups)
    return n, k


def mixer(
    config: Mapping[str, Any], inner: int, key: str, biases: Mapping[str, str], **different: Any
) -> Mamba:
    """Return the sizes of a mixer that is described by `mamba_...` keys.

    Args:
        inner: the features of all heads, by the config.json's `key`.
        biases: the key of each bias of `Mamba.biases`.
        different: other fields of `Mamba`.

    Raises:
        UnsupportedCheckpoint: unless the heads have these features together.
    """
    heads, groups = divided(config, "mamba_n_heads", "mamba_n_groups")
    width = config.get("mamba_d_head")
    width = inner // heads if width in (None, "auto") else integer(config, "mamba_d_head")
    if heads * width != inner:
        raise UnsupportedCheckpoint(
            f"config.json: {inner} features by {key} are not {heads} heads of {width}", key
        )
    shortest, longest = limits(config)
    return Mamba(
        heads,
        width,
        groups,
        integer(config, "mamba_d_state"),
        integer(config, "mamba_d_conv"),
        biases=tuple(part for part, key in biases.items() if flag(config, key)),
        shortest=shortest,
        longest=longest,
        **different,
    )


def limits(config: Mapping[str, Any]) -> tuple[float, float | None]:
    """Return the shortest and the longest step: `time_step_limit`, by default from 0 to infinity (None).

    transformers' torch code uses `time_step_min` in some models instead. Its kernels and vLLM do not.
    """
    bounds = config.get(LIMITS)
    if bounds is None:
        return 0.0, None
    pair = [_float(value) for value in bounds] if isinstance(bounds, list | tuple) else []
    if len(pair) != 2 or not 0 <= pair[0] < pair[1]:
        raise UnsupportedCheckpoint(
            f"config.json: {LIMITS} is {bounds!r}, not a shortest and a longest step", LIMITS
        )
    return pair[0], None if math.isinf(pair[1]) else pair[1]


def _float(value: Any) -> float:
    """Read a number, also as transformers 5 writes infinity: {"__float__": "Infinity"}. Without one: nan."""
    value = value.get("__float__") if isinstance(value, Mapping) else value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan
