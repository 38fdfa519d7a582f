"""The trace of a run, to compare runs: each step's rows and loss, its first gradients, and its adapters
before the first step and after the last.

Every backend's script writes one with `--trace FILE`, in Hugging Face's layout. Runs on other machines, by
other libraries and by your own code can thus be compared. Imports numpy only.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError

VERSION = 1
ROWS = ("tokens", "positions", "segment_ids", "loss_mask", "norm")
"""The arrays that a trace holds of a micro-batch, named as in `runtime.data.batches`."""


@dataclass
class Trace:
    """The parts of a run that a comparison reads.

    Attributes:
        backend: "tunix", "trl" or "torchax".
        recipe: name of the artifact.
        about: other facts that identify the run: package versions, device, dtype, and first_step, the
            number of the trace's first optimizer step (above 1 in a resumed run). Plain JSON values.
        losses: of each optimizer step from first_step on; the loss of the whole step, by the recipe's
            loss_normalization.
        targets: tokens that carry loss in each optimizer step.
        gradients: of the first of these steps, accumulated and before clipping, float32, by
            "layers.0.self_attn.q_proj.lora_A" [rank, in] and "....lora_B" [out, rank], and with DoRA
            "....lora_magnitude" [out]; with full fine-tuning by the tensor's name in the checkpoint.
        trained: values (not gradients) of the same arrays after the last step.
        initial: the same arrays before the first of these steps; {} with full fine-tuning, which begins
            with the checkpoint's tensors, and in a trace that does not hold them.
        rows: of each optimizer step, ROWS by name, with a first axis of the step's micro-batches: tokens,
            positions, segment_ids int32[M, B, T], loss_mask bool[M, B, T], norm float32[M]; [] if missing.
    """

    backend: str
    recipe: str
    about: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    trained: dict[str, np.ndarray] = field(default_factory=dict)
    initial: dict[str, np.ndarray] = field(default_factory=dict)
    rows: list[dict[str, np.ndarray]] = field(default_factory=list)

    @property
    def first_step(self) -> int:
        """Return the number of the trace's first optimizer step, 1 unless the run was resumed."""
        return int(self.about.get("first_step", 1))

    def add(self, step: int, loss: float, targets: int, batches: Sequence[Mapping[str, Any]]) -> None:
        """Add an optimizer step that is done.

        Args:
            step: its number, from 1.
            targets: its tokens that carry loss.
            batches: its whole micro-batches.
        """
        self.about.setdefault("first_step", step)
        self.losses.append(loss)
        self.targets.append(targets)
        self.rows.append({name: np.stack([np.asarray(batch[name]) for batch in batches]) for name in ROWS})

    def write(self, path: Path) -> None:
        """Write the trace as one .npz, completely or not at all. Rows are compressed, weights hardly could
        be."""
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
        for step, rows in enumerate(self.rows, self.first_step):
            arrays |= {f"rows/{step}/{name}": array for name, array in rows.items()}
        for prefix, values in self.weights().items():
            arrays |= {f"{prefix}{name}": np.asarray(array, np.float32) for name, array in values.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        with zipfile.ZipFile(partial, "w") as file:
            for name, array in arrays.items():
                member = zipfile.ZipInfo(f"{name}.npy")
                member.compress_type = (
                    zipfile.ZIP_DEFLATED if name.startswith("rows/") else zipfile.ZIP_STORED
                )
                with file.open(member, "w", force_zip64=True) as stream:
                    np.lib.format.write_array(stream, array, allow_pickle=False)
        partial.replace(path)

    def weights(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the arrays of the trained modules, by the prefix of their names in the file."""
        return {"initial/": self.initial, "gradient/": self.gradients, "trained/": self.trained}


def check_writable(path: Path) -> None:
    """Check, before a run, that a trace can be written at its end.

    Raises:
        UserError: when the path is a folder, or its parent folder cannot be created or written.
    """
    if path.is_dir():
        raise UserError(f"--trace {path}: is a folder", f"name a file: --trace {path / 'trace.npz'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--trace {path}: {error.strerror or error}", "name a file in a folder") from None
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--trace {path}: {path.parent} cannot be written", "name a file in another folder")


def count_targets(batch: Mapping[str, Any]) -> int:
    """Count the tokens of a micro-batch that carry loss: those predicted from within their own segment."""
    segments = np.asarray(batch["segment_ids"])
    within = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return int(np.count_nonzero(np.asarray(batch["loss_mask"])[:, 1:] & within))
