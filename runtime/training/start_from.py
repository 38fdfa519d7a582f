"""Start adapters from the PEFT adapter that lora.start_from names, as PEFT's
`PeftModel.from_pretrained(..., is_trainable=True)` does. Step, optimizer and data start from the beginning.

The adapter is read at the beginning of a run, and described next to the checkpoints. A resumed run does not
need the adapter, unless its objective's reference is the model that training starts from.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..addresses import path_of, reached
from ..checkpoints.record import write_next_to
from ..errors import UserError
from ..model.loading import Built, put, variables_of
from ..peft.adapter import PeftAdapter, located, open_adapter
from ..peft.fitting import fitting
from ..peft.importing import arrays_of, notes, origin
from ..peft.known import ADAPTER_CONFIG
from ..settings import RunSettings
from .objectives import keeps_copy

if TYPE_CHECKING:
    import numpy as np
    from jax.sharding import Mesh

    from .session import Session

RECORD = "start_from.json"
"""The file next to the checkpoints with the adapter's name, its digests, and what it was trained on."""


def start_from(session: Session, built: Built, settings: RunSettings) -> None:
    """Replace the fresh adapters' values with the adapter's, before a checkpoint's values replace those.

    Raises:
        UserError: when the adapter cannot be read or does not fit, or is needed and differs from the one
            that the run began with.
    """
    lora = settings.lora
    assert lora is not None and lora.start_from is not None
    address = located(lora.start_from, session.arguments.data_dir)
    known, resumed = _recorded(session.directory), session.found.step is not None
    if resumed and not keeps_copy(settings.train, lora):
        # If the adapter is not needed, its address is not contacted.
        if known and isinstance(address, Path) and (address / ADAPTER_CONFIG).is_file():
            _tell(open_adapter(address), known)
        return
    found = fitting(open_adapter(address), session.base, lora)
    if resumed and known and _changed(found, known):
        raise UserError(
            f"{found.files.name}: is not the adapter that the run began with, with which "
            f"{settings.train.objective} compares at every step",
            "restore it, or start a new run in another --output",
        )
    _tell(found, known)
    arrays = arrays_of(found, session.base, lora)
    session.hosts.same(
        "adapter",
        hashlib.sha256(json.dumps(dict(found.sha256)).encode()).hexdigest(),
        "starts from another adapter than process 0",
        "put the same files on every host, or at an address that all of them read",
    )
    _replace(built, arrays, session.mesh)
    if not session.hosts.first or resumed:
        return
    for note in notes(found, session.base, lora, (settings.model.id, settings.model.revision)):
        print(f"note: {note}", file=sys.stderr)
    write_next_to(session.directory, RECORD, (json.dumps(origin(found), indent=2) + "\n").encode())
    print(f"starting from the adapter {found.files.name}: {len(found.tensors)} modules", file=sys.stderr)


def _recorded(directory: str) -> Mapping[str, Any]:
    """Return the description of the adapter that a run began with, {} if it has not begun."""
    path = path_of(directory) / RECORD
    with reached(directory):
        try:
            return dict(json.loads(path.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return {}


def _changed(found: PeftAdapter, known: Mapping[str, Any]) -> bool:
    return dict(found.sha256) != known.get("sha256")


def _tell(found: PeftAdapter, known: Mapping[str, Any]) -> None:
    if known and _changed(found, known):
        print(f"note: {found.files.name} has changed since the run began", file=sys.stderr)


def _replace(built: Built, arrays: Mapping[str, np.ndarray], mesh: Mesh) -> None:
    """Replace the trained values of a model with adapters.

    Args:
        arrays: by path, of lora.dtype.
    """
    specs = {path: spec for adapter in built.adapters for path, _, spec in adapter.arrays}
    specs |= {parameter.path: parameter.spec for parameter in built.whole}
    variables = variables_of(built.model)
    for path, array in arrays.items():
        variables[path].set_raw_value(put(array, specs[path], mesh))
