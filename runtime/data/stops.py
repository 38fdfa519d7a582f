"""The tokens at which generation stops: those of a checkpoint's generation_config.json, and those with which
training ends an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

GENERATION = "generation_config.json"
"""transformers and vLLM read a model's end tokens from this file."""

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of config.json that transformers uses if a checkpoint has no generation_config.json."""

LIMIT = "max_new_tokens"
"""A key that limits every request of a server, if the server reads the file from another folder than the
model's (vLLM's --generation-config FOLDER)."""


def generation_config(side_files: Sequence[str], read: Callable[[str], bytes]) -> Mapping[str, Any]:
    """Return a checkpoint's generation_config.json; {} if it has no readable one.

    Args:
        side_files: names of its files other than the weights.
        read: returns the bytes of a file.
    """
    return parsed(read(GENERATION)) or {} if GENERATION in side_files else {}


def end_tokens(config: Mapping[str, Any]) -> list[int]:
    """Return the end tokens of a generation_config.json or a config.json."""
    given = config.get("eos_token_id")
    return [token for token in (given if isinstance(given, list) else [given]) if isinstance(token, int)]


def new_stops(content: bytes | None, config: Mapping[str, Any], ends: Iterable[int]) -> list[int]:
    """Return the tokens that end answers in training, and not yet in a checkpoint.

    Args:
        content: generation_config.json, None if the checkpoint has none.
        config: config.json.
        ends: the tokens with which training ends an answer.
    """
    known = _known(content, config)
    return [] if known is None else [token for token in dict.fromkeys(ends) if token not in known]


def with_stops(content: bytes | None, config: Mapping[str, Any], ends: Iterable[int]) -> bytes | None:
    """Return a checkpoint's generation_config.json with further end tokens, or unchanged if it has them.

    Args:
        content, config, ends: as for `new_stops`.

    Returns:
        The file; None if there is none, and no token to add.
    """
    added = new_stops(content, config, ends)
    if not added:
        return content
    own = _text_config(config)
    given = {name: own[name] for name in TOKENS if own.get(name) is not None}
    before = given if content is None else parsed(content) or {}
    return _written({**before, "eos_token_id": [*(_known(content, config) or ()), *added]})


def beside_adapter(content: bytes | None, config: Mapping[str, Any], ends: Iterable[int]) -> bytes:
    """Return the generation_config.json that lies next to an adapter: the base's, with further end tokens and
    without LIMIT. A server of the base and the adapter reads it in place of the base's.

    Args:
        content, config, ends: as for `new_stops`.
    """
    whole = with_stops(content, config, ends)
    if whole is None:
        tokens = end_tokens(_text_config(config))
        return _written({"eos_token_id": tokens} if tokens else {})
    made = parsed(whole)
    if made is None or LIMIT not in made:
        return whole
    return _written({name: value for name, value in made.items() if name != LIMIT})


def _known(content: bytes | None, config: Mapping[str, Any]) -> list[int] | None:
    """Return a checkpoint's end tokens; None if its generation_config.json cannot be read."""
    found = {} if content is None else parsed(content)
    return None if found is None else end_tokens(found) or end_tokens(_text_config(config))


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that names the text model's tokens."""
    return config if "eos_token_id" in config else config.get("text_config") or config


def parsed(content: bytes) -> dict[str, Any] | None:
    """Return the object in a JSON file, None if it cannot be read."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _written(config: Mapping[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
