"""The tokenizer and the chat template that a run used instead of its base's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from ..errors import UserError, first_line
from ..weights.checkpoint import HFCheckpoint, refuse_links
from ..weights.headers import files_of

CHAT_TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
"""The files of a template: transformers and vLLM read the first, llama.cpp the second."""
TEMPLATES = ("chat_template.*", "additional_chat_templates/*")
"""Patterns of a model's files that another chat template replaces."""
TOKENIZERS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("spiece.model", "tekken.json", "*.tiktoken", *TEMPLATES),
)
"""Patterns of a model's files that another tokenizer replaces."""


def own_files(tokenizer: str | None, template: str | None, folder: Path) -> dict[str, bytes]:
    """Return the files of the run's own tokenizer and chat template.

    Args:
        tokenizer: `model.tokenizer`, a Hugging Face id or a folder.
        template: the text of `data.chat_template`.
        folder: the base of a relative folder.

    Raises:
        UserError: when the tokenizer is not found.
    """
    files = {} if tokenizer is None else _files(tokenizer, folder)
    return with_own(files, {} if template is None else {CHAT_TEMPLATE: template.encode()})


def tokenizer_of(base: HFCheckpoint) -> dict[str, bytes]:
    """Return the files of a checkpoint's tokenizer, with its chat template."""
    return {name: base.side_file(name) for name in base.side_files if _matches(name, TOKENIZERS)}


def with_own(files: Mapping[str, bytes], replacing: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return a model's small files, in which the run's own replace those of the same purpose."""
    replaced = TOKENIZERS if replacing.keys() - {CHAT_TEMPLATE} else TEMPLATES if replacing else ()
    kept = {name: data for name, data in files.items() if not _matches(name, replaced)}
    if CHAT_TEMPLATE in replacing and CONFIG in kept:
        kept[CONFIG] = _without_template(kept[CONFIG])
    return {**kept, **replacing}


def _files(tokenizer: str, folder: Path) -> dict[str, bytes]:
    local = folder / Path(tokenizer).expanduser()
    if not local.is_dir():
        from huggingface_hub import snapshot_download

        try:
            local = Path(snapshot_download(tokenizer, allow_patterns=list(TOKENIZERS)))
        except Exception as error:  # an error of the hub, of the network, or of a name that is no id
            raise UserError(
                f"the run's tokenizer {tokenizer} cannot be downloaded: {first_line(error)}",
                f"a folder is expected at {local}; an id needs a connection to the Hugging Face hub",
            ) from error
    store = files_of(local)
    names = [name for name in store.sizes if _matches(name, TOKENIZERS)]
    refuse_links(store, names)
    return {name: store.read(name) for name in names}


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _without_template(content: bytes) -> bytes:
    """Return tokenizer_config.json without a chat template, which another template replaces."""
    try:
        config = json.loads(content)
        del config["chat_template"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return content
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
