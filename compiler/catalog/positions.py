"""The positions of a model: the longest sequence that vLLM serves with it.

vLLM reads the number from config.json, with the defaults of transformers' config class. It multiplies the
number by the factor of a rope scaling, unless the kind of scaling has it in the number already. The rule is
that of the pinned vLLM (`_get_and_verify_max_len` in vllm/config/model.py). tests/e2e/test_vllm_positions.py
compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from recipec.compiler.catalog.listing import default_positions
from recipec.runtime.model.families.family import text_config
from recipec.runtime.model.families.rotary import ALIASES

KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_target_positions", "max_sequence_length", "max_seq_length", "seq_len"),
)
"""The keys of config.json that give a number of positions. The smallest counts."""

OVERRIDING = "model_max_length"
"""The key that counts alone where it is present."""

INCLUDED = ("longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of rope scaling whose factor is already part of the number of positions."""

ALREADY_SCALED = "gemma3"
"""Model types with this in their name have every factor in the number of positions."""


def positions(config: Mapping[str, Any], overrides: Mapping[str, Any], complete: bool) -> int | None:
    """Return the most tokens of a sequence that vLLM accepts for a model; None where they are not known.

    Args:
        config: config.json.
        overrides: keys that replace those of config.json, as in vLLM's --hf-overrides.
        complete: whether `config` has all keys. The catalog holds only some.
    """
    config = _merged(config, overrides)
    text = text_config(config)
    number = _number(text, complete)
    if number is None:
        return None
    kind = str(text.get("model_type") or config.get("model_type"))
    return int(number * (1.0 if ALREADY_SCALED in kind else _factor(text)))


def window(config: Mapping[str, Any]) -> int | None:
    """Return the sliding window that config.json gives, None without one."""
    text = text_config(config)
    size = text.get("sliding_window")
    used = text.get("use_sliding_window") is not False
    return size if used and isinstance(size, int) else None


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in overrides.items():
        before = merged.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping) and key == "text_config"
        merged[key] = _merged(before, value) if both else value  # type: ignore[arg-type]
    return merged


def _number(text: Mapping[str, Any], complete: bool) -> float | None:
    """Return the number of positions before scaling.

    Args:
        complete: whether a missing key has the value of transformers' config class.
    """
    numbers = {key: text[key] for key in KEYS if _is_number(text.get(key))}
    if OVERRIDING in numbers:
        return float(numbers[OVERRIDING])
    default = default_positions().get(str(text.get("model_type"))) if complete else None
    if KEYS[0] not in numbers and default is not None:
        numbers[KEYS[0]] = default
    return min(numbers.values(), default=None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _factor(text: Mapping[str, Any]) -> float:
    """Return the factor by which rope scaling multiplies the positions: that of the last section with one."""
    factor = 1.0
    for section in _sections(text):
        kind = section.get("rope_type") or section.get("type") or "default"
        if ALIASES.get(kind, kind) not in INCLUDED and _is_number(section.get("factor")):
            factor = float(section["factor"])
    return factor


def _sections(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary embedding's section, or one for each type of layer."""
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return
    nested = [value for value in scaling.values() if isinstance(value, Mapping)]
    yield from nested or [scaling]
