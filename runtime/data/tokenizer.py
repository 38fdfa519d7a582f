"""Load the tokenizer of a checkpoint, with the recipe's new tokens, and the chat template of the training.

A new token replaces a reserved token of the checkpoint, or takes the first row of the embedding that no token
uses. model.vocab_size may add such rows. train.py encodes with new tokens, and merge.py writes them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..errors import UserError, first_line
from ..model.families import FAMILIES, foreign_markers
from ..settings import DataSettings, ModelSettings, Source
from ..untrusted import check_ends
from ..weights.files import json_object

if TYPE_CHECKING:
    from ..model.adapters import LoraSettings
    from ..weights.checkpoint import HFCheckpoint


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
    if data.images is not None and Path(source).is_dir():
        tokenizer.chat_template = of_processor(Path(source)) or tokenizer.chat_template
    chats = any(kind.format in CONVERSATIONS and kind.chat_template is None for kind in data.kinds)
    if chats and not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {source} has no chat template",
            "set data.chat_template to a template's path or text, or use an instruction-tuned checkpoint's",
        )
    _check_vocabulary(tokenizer, rows, str(source))
    if chats and model.family in FAMILIES:
        known, markers = tokenizer.get_vocab(), FAMILIES[model.family].turn_markers
        foreign = [
            marker
            for marker in foreign_markers(markers, chat_template(tokenizer, data, model_dir) or "")
            if marker not in known
        ]
        if foreign:
            raise UserError(
                f"the chat template of {source} writes {', '.join(foreign)}, which does not mark this "
                "model's turns: "
                + (f"it was trained with {' ... '.join(markers)}" if markers else "they are not its tokens"),
                "copy the template of the model's own repository there, or give it as data.chat_template",
            )
    return tokenizer


def of_processor(model_dir: Path) -> str | None:
    """Return the chat template that older checkpoints keep apart for their processor, which writes the
    places of pictures; None without one."""
    if (model_dir / "chat_template.jinja").is_file():
        return None
    for name in ("processor_config.json", "chat_template.json"):
        file = model_dir / name
        if file.is_file():
            template = json_object(file.read_bytes(), str(file)).get("chat_template")
            if isinstance(template, str):
                return template
    return None


def chat_template(tokenizer: Any, data: DataSettings, data_dir: Path) -> str | None:
    """Return the template's text: the recipe's (a text or a path), otherwise the tokenizer's, if it has one.

    Raises:
        UserError: the format needs a template and there is none, or its file cannot be read.
    """
    template = data.chat_template
    if template is None:
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
    if "{%" in template or "{{" in template or "\n" in template:
        return template
    file = data_dir / Path(template).expanduser()
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
        chat_template(tokenizer, kind, data_dir)
        if kind.chat_template or tokenizer.chat_template or kind.format in CONVERSATIONS
        else None
        for kind in kinds
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


def first_difference(student: Mapping[str, int], teacher: Mapping[str, int]) -> str | None:
    """Describe the first token, by number, in which two vocabularies differ; None if they are the same."""
    names = [{number: token for token, number in tokens.items()} for tokens in (student, teacher)]
    numbers = sorted(names[0].keys() | names[1].keys())
    first = next((number for number in numbers if names[0].get(number) != names[1].get(number)), None)
    if first is None:
        return None
    student_token, teacher_token = (repr(side[first]) if first in side else "no token" for side in names)
    return f"token {first} is {student_token} in the student's and {teacher_token} in the teacher's"


def vocabulary_size(config: Path) -> int | None:
    """Return the number of embeddings of the text model in a config.json; None if it does not say."""
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
        size = (fields.get("text_config") or fields).get("vocab_size")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return size if isinstance(size, int) else None


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
    contents = {name: json_object(files[name], f"{where}/{name}") for name in names if name in files}
    added = contents[TOKENIZER].setdefault("added_tokens", [])
    ids = token_ids(contents[TOKENIZER])
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
                [*(other for other in added if other["id"] != number), {"id": number, **entry}],
                key=lambda token: token["id"],
            )
            contents = {name: _renamed(content, place, token) for name, content in contents.items()}
            added = contents[TOKENIZER]["added_tokens"]
        ids[token] = number
        decoder = contents.get(CONFIG, {}).get("added_tokens_decoder")
        if decoder is not None:
            decoder[str(number)] = entry
        if ADDED in contents:
            contents[ADDED][token] = number
    written = {
        name: (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode()
        for name, content in contents.items()
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
    """Return the settings with a number for each token of lora.trainable_tokens.

    Args:
        base: the checkpoint, with its tokenizer.
        added: model.add_tokens of the recipe.

    Raises:
        UserError: when the tokenizer lacks a token, the embedding lacks its row, or a token is named twice.
    """
    rows, ids = base.architecture.vocab_size, dict[str, int]()
    if any(isinstance(token, str) for token in lora.trainable_tokens):
        files = {name: base.side_file(name) for name in base.side_files if name == TOKENIZER}
        if TOKENIZER not in files:
            raise UserError(
                f"{base.name}: no {TOKENIZER}, in which lora.trainable_tokens looks up its texts",
                "write the tokens' numbers in lora.trainable_tokens",
            )
        files = with_tokens(files, added, rows, base.name) if added else files
        ids = token_ids(json_object(files[TOKENIZER], f"{base.name}/{TOKENIZER}"))
    numbers: list[int] = []
    for token in lora.trainable_tokens:
        number = ids.get(token, -1) if isinstance(token, str) else token
        if number < 0:
            raise UserError(
                f"{base.name}: the tokenizer has no token `{token}`, which lora.trainable_tokens names",
                "write a token of the tokenizer, or its number; model.add_tokens adds tokens",
            )
        if number >= rows:
            raise UserError(
                f"{base.name}: the embedding has {rows} rows, and lora.trainable_tokens names row {number}",
                f"name rows from 0 to {rows - 1}",
            )
        if number in numbers:
            raise UserError(f"lora.trainable_tokens names token {number} twice", "name each token once")
        numbers.append(number)
    return replace(lora, trainable_tokens=tuple(numbers))


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
    reserved = next((name for name in names if name.startswith(("<", "["))), None)
    return f"'{reserved}'" if reserved else "'<|reserved|>'"
