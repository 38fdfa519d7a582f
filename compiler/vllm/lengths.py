"""The longest request that vLLM accepts for a model, with the flags and variables of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from recipec.compiler.json_value import json_value
from recipec.compiler.vllm.flags import by_flag

if TYPE_CHECKING:
    from recipec.compiler.catalog import Model
    from recipec.spec.language import Serve

ALLOWED = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""The variable with which vLLM starts in spite of too few positions."""

OTHER_CONFIG = ("hf-config-path", "config-format")
"""Flags that make vLLM read another file than the weights' config.json."""


def longest_request(model: Model | None, serve: Serve) -> int | None:
    """Return the largest max_model_len with which vLLM starts; None where it is not known."""
    flags = by_flag(serve.extra_args)
    if model is None or any(name in flags for name in OTHER_CONFIG):
        return None
    most = model.positions(overrides(flags))
    if flags.get("disable-sliding-window") is True and (seen := model.window) is not None:
        return seen if most is None else min(most, seen)
    return most


def allows_longer(serve: Serve) -> bool:
    """Return whether the server starts with a longer max_model_len too."""
    return serve.env.get(ALLOWED, "").lower() in ("1", "true")


def overrides(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json that --hf-overrides replaces, whole or by --hf-overrides.KEY."""
    whole = flags.get("hf-overrides")
    whole = json_value(whole) if isinstance(whole, str) else whole
    keys: dict[str, Any] = dict(whole) if isinstance(whole, Mapping) else {}
    for name, value in flags.items():
        if not name.startswith("hf-overrides."):
            continue
        _, *path, last = name.split(".")
        inner = keys
        for part in path:
            inner[part] = dict(inner[part]) if isinstance(inner.get(part), Mapping) else {}
            inner = inner[part]
        inner[last] = value
    return keys
