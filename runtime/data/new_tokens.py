"""Add new tokens to a tokenizer's files: train.py encodes with them, merge.py writes them.

A new token replaces a reserved token of the checkpoint, or takes the first row of the embedding that no token
uses. model.vocab_size may add such rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..weights.checkpoint_files import json_object

if TYPE_CHECKING:
    from ..model.adapters import LoraSettings
    from ..weights.checkpoint import HFCheckpoint

TOKENIZER, CONFIG, ADDED, SPECIAL = (
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
)
MULTIPLE = 64
"""Suggested numbers of rows are multiples of this, so that they divide over the devices of most meshes."""
RESERVES = ("reserved", "unused", "dummy", "control", "placeholder", "extra")
"""Words in the names of reserved tokens of checkpoints."""


def with_tokens(
    files: Mapping[str, bytes], tokens: Mapping[str, str | None], rows: int, where: str
) -> dict[str, bytes]:
    """Return a tokenizer's files with further special tokens; other files stay unchanged.

    Args:
        files: a tokenizer's files by name, at least tokenizer.json.
        tokens: each new token's text, and the token that it replaces, None for a row of its own.
        rows: of the embedding.
        where: the owner of the files, for messages.

    Raises:
        UserError: when there is no place for a token.
    """
    if TOKENIZER not in files:
        raise UserError(
            f"{where}: no {TOKENIZER}, which model.add_tokens changes",
            "convert the tokenizer: transformers writes the file with save_pretrained",
        )
    names = (TOKENIZER, CONFIG, ADDED, SPECIAL)
    made = {name: json_object(files[name], f"{where}/{name}") for name in names if name in files}
    added = made[TOKENIZER].setdefault("added_tokens", [])
    ids = token_ids(made[TOKENIZER])
    for token, place in sorted(tokens.items()):  # in the order of a record, whose keys are sorted
        if token in ids:
            raise UserError(
                f"{where}: the tokenizer has `{token}` already, as token {ids[token]}",
                "leave it out of model.add_tokens",
            )
        entry = {"content": token, "single_word": False, "lstrip": False, "rstrip": False}
        entry |= {"normalized": False, "special": True}
        if place is None:
            number = max(ids.values(), default=-1) + 1
            if number >= rows:
                raise UserError(
                    f"{where}: `{token}` would be token {number}, and the embedding has {rows} rows",
                    f"name a token that it replaces: model.add_tokens={{'{token}': {_reserve(ids)}}}; or add "
                    f"rows: model.vocab_size={padded(number + 1)}",
                )
            added.append({"id": number, **entry})
        else:
            number = ids.pop(place, -1)
            if number < 0:
                raise UserError(
                    f"{where}: the tokenizer has no `{place}`, which `{token}` would replace",
                    f"name a token that it has in reserve, such as {_reserve(ids)}",
                )
            added[:] = sorted(
                [*(one for one in added if one["id"] != number), {"id": number, **entry}],
                key=lambda one: one["id"],
            )
            made = {name: _renamed(content, place, token) for name, content in made.items()}
            added = made[TOKENIZER]["added_tokens"]
        ids[token] = number
        decoder = made.get(CONFIG, {}).get("added_tokens_decoder")
        if decoder is not None:
            decoder[str(number)] = entry
        if ADDED in made:
            made[ADDED][token] = number
    written = {
        name: (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode()
        for name, content in made.items()
    }
    return {**files, **written}


@contextmanager
def tokenizer_folder(folder: Path, tokens: Mapping[str, str | None], rows: int) -> Iterator[Path]:
    """Copy a checkpoint's small files to a folder in which the tokenizer has the new tokens.

    Args:
        rows: of the embedding.
    """
    kinds = (".json", ".jinja", ".model", ".txt")
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in kinds}
    with TemporaryDirectory(prefix="tokenizer-") as temporary:
        for name, content in with_tokens(files, tokens, rows, str(folder)).items():
            (Path(temporary) / name).write_bytes(content)
        yield Path(temporary)


def numbered(lora: LoraSettings, base: HFCheckpoint, added: Mapping[str, str | None]) -> LoraSettings:
    """Return the settings with a number for each token of lora.train_tokens.

    Args:
        base: the checkpoint, with its tokenizer.
        added: model.add_tokens of the recipe.

    Raises:
        UserError: when the tokenizer lacks a token, the embedding lacks its row, or a token is named twice.
    """
    rows, ids = base.architecture.vocab_size, dict[str, int]()
    if any(isinstance(token, str) for token in lora.train_tokens):
        files = {name: base.side_file(name) for name in base.side_files if name == TOKENIZER}
        if TOKENIZER not in files:
            raise UserError(
                f"{base.name}: no {TOKENIZER}, in which lora.train_tokens looks up its texts",
                "write the tokens' numbers in lora.train_tokens",
            )
        files = with_tokens(files, added, rows, base.name) if added else files
        ids = token_ids(json_object(files[TOKENIZER], f"{base.name}/{TOKENIZER}"))
    found: list[int] = []
    for token in lora.train_tokens:
        number = ids.get(token, -1) if isinstance(token, str) else token
        if number < 0:
            raise UserError(
                f"{base.name}: the tokenizer has no token `{token}`, which lora.train_tokens names",
                "write a token of the tokenizer, or its number; model.add_tokens adds tokens",
            )
        if number >= rows:
            raise UserError(
                f"{base.name}: the embedding has {rows} rows, and lora.train_tokens names row {number}",
                f"name rows from 0 to {rows - 1}",
            )
        if number in found:
            raise UserError(f"lora.train_tokens names token {number} twice", "name each token once")
        found.append(number)
    return replace(lora, train_tokens=tuple(found))


def token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return every token's id, from a tokenizer.json."""
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or ()}
    return {**_vocabulary(tokenizer), **added}


def padded(rows: int) -> int:
    """Round a vocabulary's size up to the next multiple of MULTIPLE."""
    return -(-rows // MULTIPLE) * MULTIPLE


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of the model's own tokens: a mapping for BPE and WordPiece, a list for Unigram."""
    vocabulary = tokenizer.get("model", {}).get("vocab") or {}
    if isinstance(vocabulary, Mapping):
        return dict(vocabulary)
    return {piece: number for number, (piece, *_) in enumerate(vocabulary)}


def _renamed(content: Any, old: str, new: str) -> Any:
    if isinstance(content, dict):
        return {new if key == old else key: _renamed(value, old, new) for key, value in content.items()}
    if isinstance(content, list):
        return [_renamed(value, old, new) for value in content]
    return new if content == old else content


def _reserve(ids: Mapping[str, int]) -> str:
    """Return a reserved token of the checkpoint, quoted; a made-up one if it has none."""
    names = (
        name for name in sorted(ids, key=ids.__getitem__) if any(word in name.lower() for word in RESERVES)
    )
    found = next((name for name in names if name.startswith(("<", "["))), None)
    return f"'{found}'" if found else "'<|reserved|>'"
