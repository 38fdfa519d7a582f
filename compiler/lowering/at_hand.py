"""Find a recipe's training data and tokenizer on this machine. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.catalog import folder_of, is_directory
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.references import is_inline
from recipec.compiler.lowering.runtime_settings import data_settings, model_settings
from recipec.compiler.packages import version_of
from recipec.runtime import data as code

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.runtime.model.families import Architecture, Family
    from recipec.runtime.settings import DataSettings, ModelSettings
    from recipec.spec.language import Recipe

PACKAGES = ("numpy", "tokenizers", "transformers", "huggingface_hub")
"""Packages that tokenize data as train.py does."""

TOKENIZER_FILES = (
    *("config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "*.jinja"),
    *("preprocessor_config.json", "processor_config.json", "chat_template.json"),
)
"""The files that are downloaded of a model."""

TOKENIZERS = ("tokenizer.json", "tokenizer.model")
"""A folder without any of these files has no tokenizer."""

DECISIVE = ("tokenizers", "transformers", "jinja2", "datasets", "pyarrow")
"""Packages that decide how rows are read, rendered and tokenized."""


@dataclass(frozen=True)
class Subject:
    """A recipe with its model before it is lowered: what counting reads of a program."""

    recipe: Recipe
    source: Path
    family: Family
    architecture: Architecture


@dataclass(frozen=True)
class Unavailable:
    """The data or the tokenizer is not on this machine, or is not counted.

    Attributes:
        reason: a clause without full stop.
    """

    reason: str


@dataclass(frozen=True)
class AtHand:
    """The training data of a recipe, and its tokenizer.

    Attributes:
        data: the data settings, with only the sources of data.train.
        data_dir: the folder that relative paths of the data are relative to.
        model_dir: a folder with a tokenizer, and perhaps the checkpoint.
        model: the model settings; `tokenizer` is a folder on this machine, or None.
        vocabulary: number of the model's embeddings.
    """

    data: DataSettings
    data_dir: Path
    model_dir: Path
    model: ModelSettings
    vocabulary: int


class PlainTokenizer:
    """A tokenizer read from its files, with those attributes of transformers' fast tokenizer that are used.

    Args:
        folder: the folder with tokenizer.json and tokenizer_config.json.

    Raises:
        OSError: a file is missing.
        ValueError: a file is not the expected JSON.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self.backend_tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text("utf-8"))
        except OSError:
            raise
        except Exception as error:  # the Rust parser raises a plain Exception
            raise ValueError(str(error)) from error
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        more = folder / "special_tokens_map.json"
        named = (json.loads(more.read_text("utf-8")) if more.is_file() else {}) | config
        self.special_tokens_map = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in named.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        self.eos_token = self.special_tokens_map.get("eos_token")
        self.pad_token_id = 0
        template = folder / "chat_template.jinja"
        self.chat_template = (
            template.read_text("utf-8") if template.is_file() else config.get("chat_template")
        )
        if isinstance(self.chat_template, list):  # several named templates
            by_name = {template["name"]: template["template"] for template in self.chat_template}
            self.chat_template = by_name.get("default")

    @cached_property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The added tokens by id, each with `content` and `special`."""
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    @property
    def all_special_tokens(self) -> list[str]:
        """The texts of the named special tokens."""
        return list(self.special_tokens_map.values())

    def get_chat_template(self) -> str:
        """Return the template's text."""
        return str(self.chat_template)


def look(program: Program | Subject, model: Path | None, data_dir: Path | None) -> AtHand | Unavailable:
    """Find the training data and the tokenizer.

    Args:
        model: folder of the checkpoint or of its tokenizer. With None, look in the recipe's own folder and in
            Hugging Face's cache on this machine.
        data_dir: the folder that relative paths of data are relative to; None for the recipe's folder.

    Raises:
        ArtifactError: when a given folder, or a file in it, does not exist.
    """
    if model is not None and not model.is_dir():
        raise ArtifactError(f"{model}: no such folder", "--model DIR names the folder of the tokenizer")
    if program.recipe.data.stream_window is not None:
        return Unavailable("data.stream_window streams it, so its rows are not counted")
    folder = data_dir or program.source.parent
    data = replace(data_settings(program.recipe, program.source.parent), eval=())
    absent = _absent(data, folder, data_dir is not None)
    if absent is not None:
        return absent
    tokenizer = _tokenizer(program, model, folder)
    if isinstance(tokenizer, Unavailable):
        return tokenizer
    return AtHand(data, folder, *tokenizer, program.architecture.vocab_size)


def contents(inputs: AtHand) -> str:
    """Return everything that the tokenized data depends on, as JSON; files are given by their digests."""
    data = inputs.data
    folders = [inputs.model_dir] + ([Path(inputs.model.tokenizer)] if inputs.model.tokenizer else [])
    templates = sorted({kind.chat_template for kind in data.kinds if kind.chat_template})
    transforms = sorted({kind.transform.rpartition(":")[0] for kind in data.kinds if kind.transform})
    made_of: dict[str, Any] = {
        "settings": asdict(data),
        "vocabulary": inputs.vocabulary,
        "tokenizer": [_digests(folder, TOKENIZER_FILES) for folder in folders],
        "sources": [_digests(inputs.data_dir / path) for path in _paths(data)],
        "templates": [_digests(inputs.data_dir / text) for text in templates if not is_inline(text)],
        "transforms": [_digests(Path(transform)) for transform in transforms],
        "code": _digests(Path(code.__file__).parent, ["*.py"]),
        "packages": [version_of(name) for name in DECISIVE],
    }
    return json.dumps(made_of, sort_keys=True)


def _absent(data: DataSettings, folder: Path, has_folder: bool) -> Unavailable | None:
    """Return the first source that is not on this machine, or None when all are.

    Args:
        has_folder: whether the user named the folder. If so, a missing file raises ArtifactError.
    """
    help = "--data-dir DIR names the folder of the data"
    if has_folder and not folder.is_dir():
        raise ArtifactError(f"{folder}: no such folder", help)
    for source in _paths(data):
        if "://" in source:
            return Unavailable(f"the data {source} is not on this machine")
        if not (folder / source).exists():
            if has_folder:
                raise ArtifactError(f"there is no {folder / source}", help)
            return Unavailable(f"there is no {source} next to the recipe")
    return None


def _tokenizer(
    program: Program | Subject, model_dir: Path | None, data_dir: Path
) -> tuple[Path, ModelSettings] | Unavailable:
    """Return the folder for runtime.data.load_tokenizer, and the model settings."""
    model = program.recipe.model
    settings = replace(model_settings(program.recipe, program.family), tokenizer=None)
    if model.tokenizer is not None:
        folder = data_dir / Path(model.tokenizer).expanduser()
        if not folder.is_dir():
            folder = folder_of(model.tokenizer, program.source.parent) or folder
        other = folder.resolve() if folder.is_dir() else _cached(model.tokenizer, None)
        if other is None:
            return _not_here(model.tokenizer, "model.tokenizer may name a folder")
        return model_dir or other, replace(settings, tokenizer=str(other))
    if model_dir is not None:
        if not any((model_dir / name).is_file() for name in TOKENIZERS):
            raise ArtifactError(
                f"there is no tokenizer in {model_dir}", "--model DIR names the folder of the tokenizer"
            )
        return model_dir, settings
    local = folder_of(model.id, program.source.parent)
    if local is None and not is_directory(model.id):
        local = _cached(model.id, model.revision)
    if local is None or not (local / "tokenizer.json").is_file():
        return _not_here(model.id, "--model DIR names a folder with one")
    return local, settings


def _cached(repository: str, revision: str | None) -> Path | None:
    """Return the folder of a repository in Hugging Face's cache, or None if its tokenizer is not there."""
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(repository, "tokenizer.json", revision=revision)
    return Path(file).parent if isinstance(file, str) else None


def _not_here(name: str, way: str) -> Unavailable:
    return Unavailable(f"the tokenizer of {name} is not on this machine ({way})")


def _paths(data: DataSettings) -> list[str]:
    return [source if isinstance(source, str) else source.path for source in data.train]


def _digests(place: Path, patterns: Iterable[str] = ("**/*",)) -> list[str]:
    """Return the name and sha256 of a file, or of each file in a folder."""
    inside = {f for pattern in patterns for f in place.glob(pattern) if f.is_file()}
    out = []
    for file in [place] if place.is_file() else sorted(inside):
        with file.open("rb") as stream:
            name = file.relative_to(place).as_posix()
            out.append(f"{name} {hashlib.file_digest(stream, 'sha256').hexdigest()}")
    return out
