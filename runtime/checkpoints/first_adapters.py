"""The file of a run's first adapters, next to its checkpoints, if these start from the base's weights.

Without it, what was trained could not be told from the base (runtime.model.initial).
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np

from ..addresses import path_of, reached
from ..errors import UserError
from ..model.adapters import PARTS
from ..model.initial import Start
from .record import write_next_to

INITIAL = "initial_adapters.npz"


def write_initial(directory: str | Path, values: Start) -> None:
    """Store a run's first values next to its checkpoints, in float32.

    Raises:
        UserError: when they cannot be written.
    """
    arrays = {
        f"{name}.lora_{which}": part.astype(np.float32)
        for name, parts in values.items()
        for which, part in zip(PARTS, parts, strict=False)
    }
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    write_next_to(directory, INITIAL, content.getvalue())


def read_initial(directory: str | Path) -> Start:
    """Return the A and B that a run began with.

    Raises:
        UserError: when they are not next to its checkpoints, or are damaged.
    """
    path = path_of(directory) / INITIAL
    try:
        with reached(directory):
            arrays = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
        out: Start = {}
        for name in arrays.files:  # A, B and the magnitudes of a projection follow each other
            module = name.rpartition(".")[0]
            out[module] = (*out.get(module, ()), arrays[name])
        return out
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        missing = isinstance(error, FileNotFoundError)
        raise UserError(
            f"{path}: {'no such file' if missing else f'cannot be read ({error})'}; it holds the adapters' "
            "first values, without which what was trained cannot be told from the base",
            f"copy {INITIAL} from where the run wrote it; training from the beginning makes it again",
        ) from None
