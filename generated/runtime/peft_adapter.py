"""Reading a PEFT adapter (peft 0.21): its configuration, and which A and B its file has."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from runtime.checkpoint import BaseCheckpoint
from runtime.checkpoint_files import Files, files_of
from runtime.errors import UserError
from runtime.peft_config import AGAIN, CONFIG, MERGE, PeftConfig, parse_config
from runtime.peft_export import WEIGHTS, WRAPPER, keys_as_values
from runtime.safetensors_reader import DTYPES, Tensor, read_header

PICKLED = "adapter_model.bin"
PREFIXES = ("model.language_model.", "language_model.model.", "model.")
"""What stands before the decoder layers of transformers' models, of today and of 2025."""
READ = ("F16", "BF16", "F32")
"""Element types of an adapter."""
_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])(?:\.[^.]+)?\.weight")
LAYER = re.compile(r"layers\.(\d{1,9})\..+")
_ELSE: Mapping[str, tuple[str, str]] = {
    r"\.lora_embedding_[AB]": ("an adapter on an embedding", MERGE),
    r"\.lora_magnitude_vector": ("a magnitude of DoRA", MERGE),
    r"\.lora_[AB](\.[^.]+)?\.bias$": ("a bias of an adapter (lora_bias)", MERGE),
    r"\.modules_to_save\.|\.original_module\.": ("a module that was trained whole", MERGE),
    r"\.(embed_tokens|lm_head)\.(base_layer\.)?weight$": (
        "the base's own embedding",
        "save the adapter with save_embedding_layers=False, unless the embedding was trained or resized",
    ),
}
"""Other tensors of an adapter by their names: what they are, and the way out."""


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter that was read; modules go by their names within the decoder ("layers.0.self_attn.q_proj").

    Attributes:
        path: of its weights, as messages call it.
        config: what its adapter_config.json says.
        full_names: of the modules, in transformers' model.
        tensors: where A and B lie in the file.
        files: its folder.
        sha256: of both files, in hexadecimal digits.
    """

    path: str
    config: PeftConfig
    full_names: Mapping[str, str]
    tensors: Mapping[str, tuple[Tensor, Tensor]]
    files: Files
    sha256: Mapping[str, str]

    def read(self, tensor: Tensor) -> np.ndarray:
        """A or B, as the file has it."""
        data = self.files.view(tensor.file, tensor.start, tensor.end)
        return np.frombuffer(data, DTYPES[tensor.dtype]).reshape(tensor.shape)


def open_adapter(address: Path | str) -> PeftAdapter:
    """Reads an adapter's configuration, and which tensors it has.

    Raises:
        UserError: when it is not an adapter, or has more than A and B of decoder layers' projections.
    """
    files = files_of(address)
    if CONFIG not in files.sizes:
        raise UserError(
            f"{files.name}: no {CONFIG}" if files.exists else f"{files.name}: no such folder",
            "give the folder that PEFT's save_pretrained wrote (of a Trainer, one of its checkpoint-N)",
        )
    content = files.read(CONFIG)
    config = parse_config(content, files.path(CONFIG))
    if WEIGHTS not in files.sizes:
        if PICKLED in files.sizes:
            raise UserError(
                f"{files.path(PICKLED)}: a pickle, which runs what code it likes when it is read",
                "load it with PEFT where you trust it, and save it again: save_pretrained writes safetensors",
            )
        raise UserError(f"{files.name}: no {WEIGHTS}", AGAIN)
    header = read_header(files, WEIGHTS)
    path = files.path(WEIGHTS)
    full_names: dict[str, str] = {}
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in header.tensors.items():
        full, which = _parse_name(name, path)
        module = _decoder_module(full)
        if module is None:
            raise UserError(
                f"{path}: {full} carries an adapter, and is no part of a decoder layer",
                "train.py trains the text decoder's projections alone; train an adapter whose target_modules "
                "are those, or " + MERGE,
            )
        if full_names.setdefault(module, full) != full or which in pairs.setdefault(module, {}):
            raise UserError(f"{path}: {module} has more than one {which}", "save one adapter, by itself")
        if tensor.dtype not in READ:
            raise UserError(
                f"{path}: {name} has type {tensor.dtype}", "save it in float32, bfloat16 or float16"
            )
        pairs[module][which] = tensor
    for module, pair in pairs.items():
        missing = {"A", "B"} - pair.keys()
        if missing:
            raise UserError(f"{path}: {module} has no {missing.pop()}", AGAIN)
    if not pairs:
        raise UserError(f"{path}: holds no adapter", AGAIN)
    digests = {
        CONFIG: hashlib.sha256(content).hexdigest(),
        WEIGHTS: hashlib.sha256(files.view(WEIGHTS, 0, header.size)).hexdigest(),
    }
    tensors = {module: (pair["A"], pair["B"]) for module, pair in pairs.items()}
    return PeftAdapter(path, config, full_names, tensors, files, digests)


def without_copies(found: PeftAdapter, base: BaseCheckpoint) -> PeftAdapter:
    """The adapter without what our export writes twice for vLLM: k_proj's A and B under v_proj's name.

    Only where the base has no such v_proj, and where they are the same: anything else stays, to be refused.
    """
    copies = {
        values
        for keys, values in keys_as_values(base, found.tensors)
        if values in found.tensors
        and all(
            np.array_equal(found.read(ours), found.read(copy))
            for ours, copy in zip(found.tensors[keys], found.tensors[values], strict=True)
        )
    }
    return replace(found, tensors={name: pair for name, pair in found.tensors.items() if name not in copies})


def _parse_name(name: str, path: str) -> tuple[str, str]:
    """The module of a tensor in transformers' model, and which of A and B it is."""
    match = _LORA.fullmatch(name)
    if match is None or not name.startswith(WRAPPER):
        what, help = next(
            (why for pattern, why in _ELSE.items() if re.search(pattern, name)),
            ("not a name of A or B", "save the adapter with PEFT's save_pretrained"),
        )
        raise UserError(f"{path}: holds {name}: {what}", help)
    return match["module"].removeprefix(WRAPPER), match["which"]


def _decoder_module(full: str) -> str | None:
    """A module's name within the decoder, None when it lies elsewhere."""
    for prefix in PREFIXES:
        rest = full.removeprefix(prefix)
        if full.startswith(prefix) and LAYER.fullmatch(rest):
            return rest
    return None
