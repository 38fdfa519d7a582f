"""How much of a device's memory a server may use, and how much its weights need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.vllm.flags import by_flag

if TYPE_CHECKING:
    from recipec.spec.language import Recipe

DEFAULT_SHARE = 0.92
"""vLLM 0.32's default for --gpu-memory-utilization: the share of a device's memory for weights and cache."""


def memory_share(extra_args: Mapping[str, Any]) -> float:
    """Return the share of a device's memory that vLLM uses: from the recipe's flags, or vLLM's default.

    Raises:
        ArtifactError: when the flag's value is not a share between 0 and 1.
    """
    flags = by_flag(extra_args)
    names = ("gpu-memory-utilization", "device-memory-utilization")
    value = next((flags[name] for name in names if flags.get(name) is not None), DEFAULT_SHARE)
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = 0.0
    if not 0 < share <= 1:
        raise ArtifactError(
            f"serve.extra_args: gpu-memory-utilization is {value!r}, which is not a share of the memory",
            f"write a number above 0 and at most 1, for example {DEFAULT_SHARE}",
        )
    return share


def weight_size(recipe: Recipe) -> int:
    """Return the bytes of one number of the served weights. The few that stay unquantized count the same."""
    merged = recipe.merge.quantization if recipe.server.weights == "merged" else None
    return 1 if recipe.server.quantization or merged else 2
