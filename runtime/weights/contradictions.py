"""Guess what a wrong file or tensor most likely is, for messages that say more than "wrong"."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import UserError
from ..model.families.base import LAYERS

AGAIN = "copy or download the checkpoint again"


def json_object(content: bytes, path: str, help: str = AGAIN) -> dict[str, Any]:
    """Return the JSON object of a file; raise UserError if it holds none."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})", help) from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: not a JSON object", help)
    return found


HEADS = (("num_attention_heads", "head_dim"), ("num_attention_heads", "global_head_dim"))
KV_HEADS = (
    ("num_key_value_heads", "head_dim"),
    ("num_global_key_value_heads", "global_head_dim"),
    ("num_key_value_heads", "global_head_dim"),
)
HIDDEN, INTERMEDIATE = (("hidden_size",),), (("intermediate_size",), ("moe_intermediate_size",))

AXES: Mapping[str, Sequence[Sequence[Sequence[str]]]] = {
    "embed_tokens": ((("vocab_size",),), HIDDEN),
    "lm_head": ((("vocab_size",),), HIDDEN),
    "q_proj": (HEADS, HIDDEN),
    "k_proj": (KV_HEADS, HIDDEN),
    "v_proj": (KV_HEADS, HIDDEN),
    "o_proj": (HIDDEN, HEADS),
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
    "q_norm": ((("head_dim",), ("global_head_dim",)),),
    "k_norm": ((("head_dim",), ("global_head_dim",)),),
    "norm": (HIDDEN,),
    "layernorm": (HIDDEN,),
}
"""By the last part of a module's name, for each axis of its weight: config keys whose product may be it."""

LAYER = re.compile(rf"{LAYERS}\.(\d{{1,9}})\.")


def foreign(head: bytes) -> tuple[str, str] | None:
    """Return what a file really is, and what to do; None if its first bytes do not show it.

    Args:
        head: its first bytes, at least a hundred if it has so many.
    """
    start = head.lstrip().lower()
    if not head:
        return "an empty file", AGAIN
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer instead of the file", "run `git lfs pull` in that folder"
    if start.startswith((b"<!doctype html", b"<html", b"<?xml")):
        return (
            "a web page or an error of the server that it came from",
            "download it again; a gated model needs HF_TOKEN",
        )
    return None


def config_keys(
    config: Mapping[str, Any], name: str, expected: Sequence[int], found: Sequence[int]
) -> str | None:
    """Return the keys of config.json whose sizes a tensor contradicts: "hidden_size 64".

    Args:
        config: config.json, or its section on the text model.
        name: the tensor's name.
        expected, found: its shape from config.json and in the file.

    Returns:
        None if it cannot be determined.
    """
    module = name.removesuffix(".weight").rpartition(".")[2]
    axes = next((axes for end, axes in AXES.items() if module.endswith(end)), ())
    if len(axes) != len(expected) or len(found) != len(expected):
        return None
    named = [keys for one in zip(axes, expected, found, strict=True) for keys in _named(config, *one)]
    return " and ".join(dict.fromkeys(named)) or None


def _named(
    config: Mapping[str, Any], candidates: Sequence[Sequence[str]], expected: int, found: int
) -> Iterator[str]:
    """Return the keys that may have given one size of a shape; several if the numbers are ambiguous."""
    if expected == found:
        return
    alternatives = []
    for keys in candidates:
        values = [config.get(key) for key in keys]
        if all(isinstance(value, int) for value in values) and math.prod(values) == expected:  # type: ignore[arg-type]
            alternatives.append(" x ".join(f"{key} {value}" for key, value in zip(keys, values, strict=True)))
    if alternatives:
        yield " or ".join(alternatives)
