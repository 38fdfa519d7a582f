"""What a run leaves for `recipe parity`: its first gradients, the loss of each step, and its last adapters.

Every backend's script writes one with `--trace FILE`, in Hugging Face's layout, so that runs on other
machines and by other libraries can be held against each other. Numpy alone.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import UserError

VERSION = 1


@dataclass
class Trace:
    """A run, as far as two runs are compared.

    Attributes:
        backend: "tunix", "trl" or "torchax".
        recipe: name of the artifact.
        about: what else identifies the run: package versions, device, dtype; plain JSON values.
        losses: of each optimizer step, from step 1 on: of the step as a whole, as the recipe's
            loss_normalization has it.
        targets: tokens that carry loss in each optimizer step.
        gradients: of the first optimizer step, accumulated and before clipping, float32, by
            "layers.0.self_attn.q_proj.lora_A" [rank, in] and "....lora_B" [out, rank]; of full fine-tuning by
            the tensor's name in the checkpoint.
        trained: the same arrays after the last step: values, not gradients.
    """

    backend: str
    recipe: str
    about: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    trained: dict[str, np.ndarray] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Writes it as one .npz, whole or not at all."""
        head = {
            "version": VERSION,
            "backend": self.backend,
            "recipe": self.recipe,
            "about": self.about,
        }
        arrays: dict[str, Any] = {
            "head": np.frombuffer(json.dumps(head).encode(), np.uint8),
            "losses": np.asarray(self.losses, np.float64),
            "targets": np.asarray(self.targets, np.int64),
        }
        arrays |= _prefixed("gradient/", self.gradients) | _prefixed("trained/", self.trained)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        with partial.open("wb") as stream:
            np.savez(stream, **arrays)
        partial.replace(path)


def check_writable(path: Path) -> None:
    """Checks, before a run, that a trace can be written at its end.

    Raises:
        UserError: when the path is a folder's, or its own folder cannot be made.
    """
    if path.is_dir():
        raise UserError(f"--trace {path}: is a folder", f"name a file: --trace {path / 'trace.npz'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--trace {path}: {error.strerror or error}", "name a file in a folder") from None


def count_targets(batch: Mapping[str, Any]) -> int:
    """The tokens of a micro-batch that carry loss: those that are predicted from within their own segment."""
    segments = np.asarray(batch["segment_ids"])
    within = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return int(np.count_nonzero(np.asarray(batch["loss_mask"])[:, 1:] & within))


def read_trace(path: Path) -> Trace:
    """Reads a trace.

    Raises:
        UserError: when the file is none.
    """
    try:
        if path.exists() and not path.is_file():  # a device may never end
            raise ValueError("no regular file")
        # Of an array's file alone, np.load would give the array.
        with path.open("rb") as stream:
            if not zipfile.is_zipfile(stream):
                raise ValueError("no .npz file")
        with np.load(path, allow_pickle=False) as arrays:
            head = json.loads(bytes(arrays["head"]).decode())
            if head.get("version") != VERSION:
                raise UserError(
                    f"{path}: a trace of version {head.get('version')}; this one reads {VERSION}",
                    "write it again with the scripts of one recipec",
                )
            return Trace(
                head["backend"],
                head["recipe"],
                head["about"],
                arrays["losses"].tolist(),
                arrays["targets"].tolist(),
                _without("gradient/", arrays),
                _without("trained/", arrays),
            )
    except FileNotFoundError:
        raise UserError(f"{path}: no such file", _WRITTEN) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise UserError(f"{path}: is no trace ({_reason(error)})", _WRITTEN) from None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise UserError(f"{path}: is damaged ({_reason(error)})", _WRITTEN) from None


_WRITTEN = "--trace FILE of a script writes one"


def _reason(error: Exception) -> str:
    """One line of an error."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__


def _prefixed(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{prefix}{name}": np.asarray(array, np.float32) for name, array in arrays.items()}


def _without(prefix: str, arrays: Any) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): arrays[name] for name in arrays.files if name.startswith(prefix)}
