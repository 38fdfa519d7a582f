"""Find the model that a recipe names, and read what a config.json describes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from recipec.compiler.catalog import added, quantized_checkpoints
from recipec.compiler.catalog.listing import (
    causal_models,
    entries,
    entry_of,
    is_directory,
    is_quantized,
    nearest,
    original_of,
    title,
    untrainable,
)
from recipec.compiler.catalog.positions import positions, window
from recipec.compiler.catalog.tensor_list import Listed, tensors_in
from recipec.compiler.json_value import json_value
from recipec.runtime.errors import UserError
from recipec.runtime.model.families import FAMILIES, Architecture, Family, UnsupportedCheckpoint, family_of
from recipec.runtime.model.families.family import TIE, arrays
from recipec.runtime.model.families.transformers import refuse
from recipec.runtime.model.families.vision import VisionArchitecture
from recipec.runtime.weights.agreement import prefix_of, same_values, spare_head, untied
from recipec.runtime.weights.headers import files_of, read_header
from recipec.runtime.weights.quantized_formats import format_of, plain
from recipec.spec.codes import Code

MAX_CONFIG = 1 << 22
"""The largest size in bytes of a config.json; a few thousand are usual."""

AGAIN = "copy it again from the model's repository"


class UnknownModel(ValueError):
    """A model whose config.json is not in the catalog and cannot be read.

    Attributes:
        code: the code of the diagnostic.
        help: what to write instead.
    """

    def __init__(self, code: Code, message: str, help: str) -> None:
        super().__init__(message)
        self.code = code
        self.help = help


@dataclass(frozen=True)
class Model:
    """A model whose sizes the compiler knows.

    Attributes:
        id: as in the recipe.
        title: for messages: "Gemma 4 31B".
        family, architecture: describe the model.
        config: config.json; for a model of the catalog only the keys that the family reads.
        origin: "catalog", or the config.json that was read.
        chat: whether it is tuned for chat; None when only its config.json is known.
        added: the folder that `recipe models add` saved it in, None if it was not added.
        published: the model without the embedding rows that a recipe adds, None where it adds none.
        own_head: the head in a folder's files, if config.json says that the embedding is the head and the
            two have different values. The model is then one with a head of its own.
        multimodal: keys of config.json that describe its vision tower, if `config` does not have them.
    """

    id: str
    title: str
    family: Family
    architecture: Architecture
    config: Mapping[str, Any]
    origin: str
    chat: bool | None
    added: added.Added | None = None
    published: Model | None = None
    own_head: str | None = None
    multimodal: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def tower(self) -> VisionArchitecture | None:
        """The model's vision tower; None if it has none, or none that this version computes."""
        try:
            return self.family.vision({**self.config, **self.multimodal})
        except UnsupportedCheckpoint:
            return None

    def positions(self, overrides: Mapping[str, Any] | None = None) -> int | None:
        """Return the most tokens of a sequence that vLLM accepts for the model, None where it is not known.

        Args:
            overrides: keys that replace those of config.json, as in vLLM's --hf-overrides.
        """
        return positions_of(self.config, self.origin, overrides)

    @property
    def window(self) -> int | None:
        """The sliding window that config.json gives, None without one."""
        return window(self.config)

    @property
    def stored(self) -> str | None:
        """The method in which the weights are stored quantized, None for plain weights."""
        return quantized_checkpoints.stored(self.config)

    @property
    def unquantized(self) -> str:
        """What to train instead of a quantized checkpoint, for a diagnostic's help."""
        return instead_of_quantized(self.id)

    def tensors(self, folder: Path) -> tuple[str, Mapping[str, Listed]] | None:
        """Return the file or folder that lists the checkpoint's tensors, and the tensors by their full names.

        Of an added model, every file is compared with the lock. None for a model of the catalog, for a
        folder without its weights, and for a model of no family, whose tensors `find` read.

        Args:
            folder: the recipe's.

        Raises:
            UnknownModel: the list cannot be read or has changed, or the weights are stored quantized in a
                format that is not read.
        """
        listed: Mapping[str, Listed] | None = None
        if self.added is not None:
            place = f"{self.added.name}/{added.TENSORS}"
            try:
                for file in self.added.files:
                    self.added.read(file)
                listed = added.tensors(self.added)
            except added.NotWhole as error:
                raise UnknownModel(E0810, str(error), added.again(self.id, folder)) from None
        elif is_directory(self.id) and self.family.tunix:
            place = self.id
            listed = self._tensors_of_folder(folder / Path(self.id).expanduser())
        if listed is None:
            return None
        method = quantized_checkpoints.by_tensors({name: tensor.dtype for name, tensor in listed.items()})
        if method is not None and format_of(self.family, self.config) is None:
            raise UnknownModel(
                E0813,
                f"`{self.id}` has weights that are stored quantized ({method}): {place} lists their tensors",
                self.unquantized,
            )
        return place, listed

    def _tensors_of_folder(self, place: Path) -> Mapping[str, Listed] | None:
        """Return the tensors of a folder, None if a file is missing: compiling does not need the weights."""
        try:
            return tensors_in(place)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            message = f"the tensors of `{self.id}` cannot be read: {reason}"
            raise UnknownModel(E0818, message, "download the whole checkpoint again") from None


Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a checkpoint's tensors, by their names."""

E0801 = Code(
    "E0801",
    "model is not in the catalog",
    cause="The compiler needs the sizes of the model. The catalog has no such id, and neither has a "
    "folder models/OWNER--NAME next to the recipe.",
    cure="Use the id that the message suggests, or write ./ before a directory. `recipe models add` "
    "fetches the config.json and the list of tensors of another model.",
)

E0803 = Code(
    "E0803",
    "checkpoint cannot be trained",
    cause="Its config.json asks for a feature that recipec's model of the family does not have. "
    "Training would be wrong without an error. For ids in the catalog, this is known from the "
    "family, or because a copy has quantized weights.",
    cure="Use another checkpoint. For a quantized copy, use its original.",
)

E0804 = Code(
    "E0804",
    "model in a bucket",
    cause="The compiler cannot read the config.json of a gs:// model.",
    cure="Use the Hugging Face id or a directory as model.id, and pass the address to train.py with --model.",
)


def positions_of(
    config: Mapping[str, Any], origin: str, overrides: Mapping[str, Any] | None = None
) -> int | None:
    """Return what `Model.positions` returns, from the model's `config` and `origin`."""
    return positions(config, overrides or {}, complete=origin != "catalog")


def find(model_id: str, folder: Path) -> Model:
    """Return the model that a recipe in `folder` names.

    Raises:
        UnknownModel: there is no such id, or no readable config.json.
        UnsupportedCheckpoint: its config asks for something that its family's Tunix model does not do.
    """
    if is_directory(model_id):
        config = _read_config(model_id, folder)
        place = folder / Path(model_id).expanduser()
        model = read(model_id, config, f"{model_id.rstrip('/')}/config.json", lambda: _of(tensors_in(place)))
        head = _own_head(model, place)
        if head is None:
            return model
        try:
            separate = read(model_id, untied(config), model.origin, lambda: _of(tensors_in(place)))
        except UnsupportedCheckpoint as error:
            raise UnsupportedCheckpoint(
                f"{head} has other values than the embedding, so transformers does not tie the two, whatever "
                f"config.json says; the model of {model.family.title} has no head of its own",
                TIE,
            ) from error
        return replace(separate, own_head=head)
    if model_id.startswith("gs://"):
        raise UnknownModel(
            E0804,
            f"the config.json of `{model_id}` cannot be read while compiling",
            "write the Hugging Face id, or a directory with its config.json, as model.id; "
            "train.py and merge.py get the checkpoint's folder with --model",
        )
    if (brought := added_model(model_id, folder)) is not None:
        return brought
    if model_id not in entries() and os.path.isdir(folder / model_id):
        raise UnknownModel(
            E0801,
            f"`{model_id}` is not in the catalog: a directory is written with ./",
            f"id: ./{model_id}",
        )
    if model_id not in entries() and (family_name := untrainable(model_id)) is not None:
        raise UnsupportedCheckpoint(f"recipec has no model for {family_name}", "model_type")
    entry = entry_of(model_id)
    if entry is None:
        raise UnknownModel(E0801, f"`{model_id}` is not in the catalog", _way_out(model_id, folder))
    if model_id not in entries() and is_quantized(model_id):
        original = original_of(model_id)
        message = f"`{model_id}` is a copy of `{original}` whose weights are stored quantized"
        raise UnknownModel(E0803, message, f"id: {original}")
    family = FAMILIES[entry["family"]]
    # The weights of another publisher's copy may be stored in another format.
    known: Mapping[str, Any] = entry["config"] if model_id in entries() else plain(entry["config"])
    architecture = family.architecture(known)
    return Model(
        *(model_id, title(model_id), family, architecture, known, "catalog", entry.get("chat")),
        multimodal=entry.get("vision", {}),
    )


E0810 = Code(
    "E0810",
    "added model was changed",
    cause="`recipe models add` wrote a folder next to the recipe. One of its files is missing or "
    "differs from the lock file. The model that was checked may not be the one that is trained.",
    cure="Add the model again, or name the folder as a directory, which is used without a lock.",
)


def added_model(model_id: str, folder: Path) -> Model | None:
    """Return the model of an id that was added next to the recipes of a folder; None if it was not added.

    Raises:
        UnknownModel: its folder has changed since it was added.
        UnsupportedCheckpoint: as for `find`.
    """
    try:
        place = added.find(model_id, folder)
        if place is None:
            return None
        config = json_value(place.read("config.json"))
        chat = None if place.has_template() else False
    except added.NotWhole as error:
        raise UnknownModel(E0810, str(error), added.again(model_id, folder)) from None
    model = of_hub(model_id, config, f"{place.name}/config.json", lambda: _of(added.tensors(place)))
    return replace(model, title=title(model_id), chat=chat, added=place)


def _own_head(model: Model, place: Path) -> str | None:
    """Return the head in a folder's files if its values differ from those of the embedding, although
    config.json says that the embedding is the head. Compiling does not need the files, and checks/tensors.py
    reports their faults."""
    try:
        listed = tensors_in(place) or {}
        prefix = prefix_of(model.family, listed)
        pair = None if prefix is None else spare_head(model.family, model.architecture, listed, prefix)
        if pair is None:
            return None
        files = files_of(place)
        head, embedding = (read_header(files, listed[name].file).tensors[name] for name in pair)
        return None if same_values(files, head, embedding) else pair[0]
    except (OSError, ValueError, UserError):
        return None


def _of(listed: Mapping[str, Listed] | None) -> Shapes | None:
    return None if listed is None else {name: tensor.shape for name, tensor in listed.items()}


E0813 = Code(
    "E0813",
    "checkpoint is stored quantized",
    cause="Its config.json, or the names and types of its tensors, are those of AWQ, GPTQ, "
    "bitsandbytes, compressed-tensors or another method that is not read. Of FP8, only the form "
    "with `weight_scale_inv` tensors and its quantization_config is read.",
    cure="Use the original. `model.quantization` quantizes it during training.",
)


def of_hub(
    model_id: str, config: Any, origin: str, listed: Callable[[], Shapes | None] = lambda: None
) -> Model:
    """Return the model that a config.json from the hub describes; arguments as for `read`.

    Raises:
        UnknownModel: as for `read`, or config.json says that the weights are stored quantized in a format
            that the family does not read.
        UnsupportedCheckpoint: as for `find`.
    """
    method = quantized_checkpoints.by_config(config)
    if method is not None and not quantized_checkpoints.is_read(config):
        message = f"`{model_id}` has weights that are stored quantized ({method})"
        raise UnknownModel(E0813, message, instead_of_quantized(model_id))
    return read(model_id, config, origin, listed)


def instead_of_quantized(model_id: str) -> str:
    """Return what to train instead of a quantized checkpoint: its original, by id where that is known."""
    original = original_of(model_id)
    return f"id: {original}" if original else "train the checkpoint that it was made from"


def folder_of(name: str, folder: Path) -> Path | None:
    """Return the local folder of a model's or a tokenizer's files: its directory, or that of an added model.

    Args:
        name: an id, or a directory relative to `folder`.
    """
    try:
        if is_directory(name):
            place = folder / Path(name).expanduser()
            return place if place.is_dir() else None
        model = added.find(name, folder)
        return model.place if model else None
    except (OSError, ValueError, RuntimeError):  # a NUL, an unknown ~user, an invalid lock
        return None


def known(model_id: str, folder: Path) -> Model | None:
    """Return the model that a recipe in `folder` names, as `find` does; None if it cannot be determined."""
    try:
        return find(model_id, folder)
    except (UnknownModel, UnsupportedCheckpoint):
        return None


E0818 = Code(
    "E0818",
    "tensors are not known",
    cause="The headers of a folder's safetensors files cannot be read. Or these files are missing "
    "next to a config.json of no known family, for which they give the names and shapes of the "
    "tensors.",
    cure="Put the whole checkpoint into that folder, or use a model of one of the families.",
)


def _shapes(model_id: str, config: Mapping[str, Any], listed: Callable[[], Shapes | None]) -> Shapes:
    """Return the shapes of a checkpoint's tensors, for a model that no family describes.

    Args:
        listed: returns the shapes, or None for a folder that does not list them.

    Raises:
        UnknownModel: the shapes cannot be read.
        UnsupportedCheckpoint: transformers has no such model.
    """
    refuse(config)
    model_type = config.get("model_type")
    if model_type not in causal_models():
        why = "which neither a family nor transformers itself has as a causal model"
        error = UnsupportedCheckpoint(f"config.json: model_type is {model_type!r}, {why}", "model_type")
        raise _by_own_code(config, error)
    again = "download the whole checkpoint there: while compiling, the headers of its safetensors are read"
    try:
        shapes = listed()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UnknownModel(E0818, f"the tensors of `{model_id}` cannot be read: {reason}", again) from None
    if shapes is None:
        raise UnknownModel(
            E0818,
            f"no family describes {model_type!r}, and `{model_id}` has no safetensors that tell its tensors' "
            "names and shapes",
            again,
        )
    return shapes


E0802 = Code(
    "E0802",
    "no readable config.json",
    cause="model.id is a directory, relative to the recipe's folder, without a readable config.json.",
    cure="Correct the path, or copy config.json there.",
)


def read(
    model_id: str, config: Any, origin: str, listed: Callable[[], Shapes | None] = lambda: None
) -> Model:
    """Return the model that a config.json describes.

    Args:
        config: the file's parsed content, which may be any JSON value.
        origin: the file's name in messages.
        listed: returns the shapes of the checkpoint's tensors by their names, None where they are not known.

    Raises:
        UnknownModel: the content is not a JSON object.
        UnsupportedCheckpoint: as for `find`.
    """
    if not isinstance(config, dict):
        raise UnknownModel(E0802, f"`{origin}` is not a JSON object", AGAIN)
    try:
        family = family_of(config)
    except UnsupportedCheckpoint as error:
        raise _by_own_code(config, error) from None
    format_of(family, config)  # refuses values that it does not know
    shapes = {} if family.tunix else _shapes(model_id, config, listed)
    try:
        architecture = family.architecture_of(config, shapes)
        sizes = {n for parameter in arrays(family, architecture) for n in parameter.shape}
        if not all(isinstance(n, int) and n > 0 for n in sizes):
            raise TypeError("a size is not a positive whole number")
    except UnsupportedCheckpoint:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise UnsupportedCheckpoint(f"config.json: a value is of the wrong type: {error}") from None
    return Model(model_id, model_id, family, architecture, config, origin, None)


def _by_own_code(config: Mapping[str, Any], error: UnsupportedCheckpoint) -> UnsupportedCheckpoint:
    """Return the refusal of a model type; it names the Python code that the checkpoint ships for the type."""
    code = config.get("auto_map")
    if error.key != "model_type" or not isinstance(code, dict) or not code:
        return error
    return UnsupportedCheckpoint(
        f"config.json: model_type is {config.get('model_type')!r}, whose code is part of the checkpoint "
        f"({code.get('AutoConfig') or next(iter(code.values()))}): such code is never run",
        "model_type",
    )


def _read_config(model_id: str, folder: Path) -> Any:
    """Read the config.json of a directory."""
    try:
        path = folder / Path(model_id).expanduser() / "config.json"
        if not folder.is_dir():  # a new recipe's folder: `FOLDER/..` fails until it exists
            path = Path(os.path.normpath(path))
        if path.is_file() and path.stat().st_size > MAX_CONFIG:
            raise ValueError(f"it has more than {MAX_CONFIG:,} bytes")
        if path.exists() and not path.is_file():  # opening a pipe would block
            raise ValueError("it is not a regular file")
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnknownModel(
            E0802,
            f"there is no config.json in `{model_id}`",
            "model.id names a checkpoint's directory, relative to the recipe's own; "
            "its config.json is read while compiling",
        ) from None
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~user unknown, or nested too deeply
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UnknownModel(E0802, f"`{model_id}/config.json` cannot be read: {reason}", AGAIN) from None
    return config


def _way_out(model_id: str, folder: Path) -> str:
    """Suggest a similar id of the same publisher, and say how to name any other model."""
    close = nearest(model_id)
    hint = f"did you mean `{close}`? " if close else ""
    named = added.add_command(model_id if "/" in model_id else "OWNER/NAME", folder)
    return (
        f"{hint}for a model that is not in it, {named} downloads the files that a compile needs from the "
        "hub; "
        "or write id: ./checkpoint, a directory with its config.json"
    )
