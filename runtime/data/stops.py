"""The tokens at which generation stops: those of a checkpoint's generation_config.json, and those with which
training ends an answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..weights.checkpoint import HFCheckpoint


CONFIG = "config.json"

GENERATION = "generation_config.json"
"""transformers and vLLM read a model's end tokens from this file."""

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of config.json that transformers uses if a checkpoint has no generation_config.json."""

LIMIT = "max_new_tokens"
"""A key that limits every request of a server, if the server reads the file from another folder than the
model's (vLLM's --generation-config FOLDER)."""


def files_of(base: HFCheckpoint) -> tuple[bytes | None, dict[str, Any]]:
    """Return a checkpoint's generation_config.json, None if it has none, and its config.json."""
    content = base.side_file(GENERATION) if GENERATION in base.side_files else None
    return content, json.loads(base.side_file(CONFIG))


def generation_config(side_files: Sequence[str], read: Callable[[str], bytes]) -> Mapping[str, Any]:
    """Return a checkpoint's generation_config.json; {} if it has no readable one.

    Args:
        side_files: names of its files other than the weights.
        read: returns the bytes of a file.
    """
    return parsed(read(GENERATION)) or {} if GENERATION in side_files else {}


def end_tokens(config: Mapping[str, Any]) -> list[int]:
    """Return the end tokens of a generation_config.json or a config.json."""
    tokens = config.get("eos_token_id")
    return [token for token in (tokens if isinstance(tokens, list) else [tokens]) if isinstance(token, int)]


def ends_of(content: bytes | None, config: Mapping[str, Any]) -> list[int]:
    """Return a checkpoint's end tokens, as transformers reads them.

    Args:
        content: generation_config.json, None if the checkpoint has none.
        config: config.json.
    """
    return _known(content, config) or []


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
    text_config = _text_config(config)
    tokens = {name: text_config[name] for name in TOKENS if text_config.get(name) is not None}
    before = tokens if content is None else parsed(content) or {}
    return _written({**before, "eos_token_id": [*(_known(content, config) or ()), *added]})


def with_stops_for_adapter(content: bytes | None, config: Mapping[str, Any], ends: Iterable[int]) -> bytes:
    """Return the generation_config.json that lies next to an adapter: the base's, with further end tokens and
    without LIMIT. A server of the base and the adapter reads it in place of the base's.

    Args:
        content, config, ends: as for `new_stops`.
    """
    with_ends = with_stops(content, config, ends)
    if with_ends is None:
        tokens = end_tokens(_text_config(config))
        return _written({"eos_token_id": tokens} if tokens else {})
    generation = parsed(with_ends)
    if generation is None or LIMIT not in generation:
        return with_ends
    return _written({name: value for name, value in generation.items() if name != LIMIT})


def _known(content: bytes | None, config: Mapping[str, Any]) -> list[int] | None:
    """Return a checkpoint's end tokens; None if its generation_config.json cannot be read."""
    generation = {} if content is None else parsed(content)
    return None if generation is None else end_tokens(generation) or end_tokens(_text_config(config))


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config.json that names the text model's tokens."""
    return config if "eos_token_id" in config else config.get("text_config") or config


def parsed(content: bytes) -> dict[str, Any] | None:
    """Return the object in a JSON file, None if it cannot be read."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _written(config: Mapping[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
