"""Load the tokenizer of a checkpoint, and the chat template that a recipe trains with."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..endless import check_ends
from ..errors import UserError, first_line
from ..model.families import FAMILIES, foreign_markers
from ..settings import DataSettings, ModelSettings, Source

CONVERSATIONS = ("chat", "instruction")
"""Formats all of whose rows need a chat template."""


def load_tokenizer(
    model_dir: Path, model: ModelSettings, data: DataSettings, data_dir: Path | None = None
) -> Any:
    """Load the fast tokenizer of transformers for a model; this needs no torch.

    Args:
        model_dir: the checkpoint's folder.
        model: `model.tokenizer`, when given, is a Hugging Face id or a directory (a relative one is
            looked for in `data_dir`) to be used instead of the checkpoint's.
        data_dir: the base of relative paths, the working folder when None.

    Raises:
        UserError: it cannot be loaded, is not a fast one, has no chat template although the recipe gives
            none, its template writes another model's turns, or it has more tokens than the model has
            embeddings.
    """
    # On import transformers reports that it found no PyTorch, which is not needed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    source = _source(model_dir, model, data_dir or Path())
    rows = model.vocab_size or vocabulary_size(model_dir / "config.json")
    try:
        if model.add_tokens:
            from .new_tokens import tokenizer_folder

            with tokenizer_folder(model_dir, dict(model.add_tokens), rows or 0) as folder:
                tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        else:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # transformers and the Rust parser raise any exception on a broken file
        raise UserError(
            f"the tokenizer of {source} cannot be loaded: {first_line(error)}",
            "tokenizer.json and tokenizer_config.json must be in the model's folder; model.tokenizer names "
            "another tokenizer",
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"the tokenizer of {source} has no fast version, whose character offsets the loss mask needs",
            "convert it (transformers writes tokenizer.json with save_pretrained), or set model.tokenizer",
        )
    chats = any(own.format in CONVERSATIONS and own.chat_template is None for own in data.kinds)
    if chats and not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {source} has no chat template",
            "set data.chat_template to a template's path or text, or use an instruction-tuned checkpoint's",
        )
    _check_vocabulary(tokenizer, rows, str(source))
    if chats and model.family in FAMILIES:
        known, own = tokenizer.get_vocab(), FAMILIES[model.family].turn_markers
        foreign = [
            marker
            for marker in foreign_markers(own, chat_template(tokenizer, data, model_dir) or "")
            if marker not in known
        ]
        if foreign:
            raise UserError(
                f"the chat template of {source} writes {', '.join(foreign)}, which does not mark this "
                "model's turns: "
                + (f"it was trained with {' ... '.join(own)}" if own else "they are not its tokens"),
                "copy the template of the model's own repository there, or give it as data.chat_template",
            )
    return tokenizer


def chat_template(tokenizer: Any, data: DataSettings, data_dir: Path) -> str | None:
    """Return the template's text: the recipe's (a text or a path), otherwise the tokenizer's, if it has one.

    Raises:
        UserError: the format needs a template and there is none, or its file cannot be read.
    """
    given = data.chat_template
    if given is None:
        if tokenizer.chat_template:
            try:
                return str(tokenizer.get_chat_template())
            except ValueError as error:  # several templates, none of them the default
                raise UserError(
                    f"the tokenizer has no default chat template: {first_line(error)}",
                    "set data.chat_template to a template's path or text",
                ) from error
        if data.formats.isdisjoint(CONVERSATIONS):
            return None
        raise UserError(
            "the tokenizer has no chat template", "set data.chat_template to a template's path or text"
        )
    if "{%" in given or "{{" in given or "\n" in given:
        return given
    file = data_dir / Path(given).expanduser()
    check_ends(file, f"the chat template {file}")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the chat template {file} cannot be read: {first_line(error)}",
            "data.chat_template is a path relative to the artifact's folder or --data-dir, or the template "
            "itself",
        ) from error


def chat_templates(
    tokenizer: Any, data: DataSettings, data_dir: Path, sources: Sequence[str | Source]
) -> tuple[str | None, ...]:
    """Return the `chat_template` of each source; None if there is none and its rows do not need one.

    Raises:
        UserError: as `chat_template`.
    """
    kinds = [data.of(source) for source in sources]
    return tuple(
        chat_template(tokenizer, own, data_dir)
        if own.chat_template or tokenizer.chat_template or own.format in CONVERSATIONS
        else None
        for own in kinds
    )


def _source(model_dir: Path, model: ModelSettings, data_dir: Path) -> Path | str:
    if model.tokenizer is None:
        return model_dir
    directory = data_dir / Path(model.tokenizer).expanduser()
    return directory if directory.is_dir() else model.tokenizer


def _check_vocabulary(tokenizer: Any, size: int | None, source: str) -> None:
    """Refuse a tokenizer that gives ids without an embedding.

    Special tokens are accepted: text-only Gemma 3 checkpoints have an image token one past their embeddings.
    Tokenizing leaves out samples that use one.
    """
    if size is None:
        return
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    highest = max((i for i in tokenizer.get_vocab().values() if i not in special), default=-1)
    if highest >= size:
        raise UserError(
            f"the tokenizer of {source} has token ids up to {highest}, and the model has {size} embeddings",
            "use the model's own tokenizer: leave model.tokenizer out; or model.vocab_size adds rows",
        )


def vocabulary_size(config: Path) -> int | None:
    """Return the number of embeddings of the text model in a config.json; None if it does not say."""
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
        size = (fields.get("text_config") or fields).get("vocab_size")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return size if isinstance(size, int) else None
