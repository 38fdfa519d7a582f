"""The values that a run's adapters start with, where they are not random: computed from the base's weights
(PiSSA, OLoRA, LoftQ), or those of the PEFT adapter that lora.start_from names.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..addresses import path_of, reached
from ..checkpoints.first_adapters import read_initial, write_initial
from ..checkpoints.record import write_next_to
from ..checkpoints.trained_weights import hugging_face
from ..errors import UserError
from ..merging.arithmetic import host
from ..model.adapters import build_adapters
from ..model.initial import Start
from ..model.loading import Built, read_shards, replace_adapters
from ..model.partition_rules import resolved
from ..model.quantize import Layout, dequantize, layouts, quantize
from ..peft.adapter import PeftAdapter, located, open_adapter
from ..peft.fitting import fitting
from ..peft.importing import arrays_of, notes, origin
from ..peft.peft_names import ADAPTER_CONFIG
from ..settings import RunSettings
from ..weights.checkpoint import HFCheckpoint
from .first_values import computed, residual, values_of
from .objectives import keeps_copy

if TYPE_CHECKING:
    from .session import Session


def first_values(session: Session, settings: RunSettings) -> tuple[HFCheckpoint, Start | None]:
    """Return the checkpoint whose weights a run freezes, and the first values of its adapters.

    Unless these are a part of the base's weights, the checkpoint is the base and the values are None.

    Process 0 computes the values on its host when the run begins, and stores them next to the checkpoints.
    Every process reads them there, so a run continues from the same numbers on any mesh.

    Raises:
        UserError: when they cannot be written or read.
    """
    base, lora = session.base, settings.lora
    if lora is None or not lora.principal:
        return base, None

    def start() -> Start:
        if lora.init != "loftq":
            return computed(base, lora, settings.train.seed)
        return values_of(lora, quantization_errors(base, settings), settings.train.seed)

    if session.resumed.step is None:
        session.hosts.agree("initial", lambda: write_initial(session.directory, start()))
    values = read_initial(session.directory)
    return residual(base, lora, values), values


def quantization_errors(base: HFCheckpoint, settings: RunSettings) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each projection's weight [out, in] minus the values of its quantized codes, in float32.

    LoftQ's adapters approximate this difference.
    The host computes this, one weight at a time, in the blocks of the run's own mesh.
    """
    lora, model, axes = settings.lora, settings.model, settings.mesh.axes
    dtype = np.dtype(jnp.dtype(model.dtype))
    assert lora is not None and model.quantization is not None
    parameters = resolved(base.family.parameters(base.architecture), settings.rules, axes)
    by_path = {parameter.path: parameter for parameter in parameters}
    how = layouts(base.family, base.architecture, parameters, model.quantization, axes, model.began)
    for adapter in build_adapters(base.family, base.architecture, lora):
        parameter = by_path[adapter.target.weight]
        whole = tuple((0, size) for size in parameter.shape)
        ((_, weight),) = read_shards(base, parameter, [whole], dtype)
        rest = weight.astype(np.float32) - _dequantized(weight, how[parameter.path])
        yield adapter.name, hugging_face(rest, parameter.sources[0])


def _dequantized(weight: np.ndarray, how: Layout) -> np.ndarray:
    """Return the float32 numbers that a weight's codes and scales represent."""
    whole = (None,) * weight.ndim
    mesh = Mesh(np.array([host()]), ("host",))
    codes = quantize(jax.device_put(weight, host()), replace(how, spec=whole, scale_spec=whole), mesh)
    return np.asarray(dequantize(codes, jnp.float32))


RECORD = "start_from.json"
"""The file next to the checkpoints with the adapter's name, its digests, and what it was trained on."""


def start_from(session: Session, built: Built, settings: RunSettings) -> None:
    """Replace the fresh adapters' values with the adapter's, before a checkpoint's values replace those.

    PEFT's `PeftModel.from_pretrained(..., is_trainable=True)` does the same. Step, optimizer and data start
    from the beginning. The adapter is read at the beginning of a run, and described next to the checkpoints.
    A resumed run does not need it, unless its objective's reference is the model that training starts from.

    Raises:
        UserError: when the adapter cannot be read or does not fit, or is needed and differs from the one
            that the run began with.
    """
    lora = settings.lora
    assert lora is not None and lora.start_from is not None
    address = located(lora.start_from, session.arguments.data_dir)
    known, resumed = _recorded(session.directory), session.resumed.step is not None
    if resumed and not keeps_copy(settings.train, lora):
        # If the adapter is not needed, its address is not contacted.
        if known and isinstance(address, Path) and (address / ADAPTER_CONFIG).is_file():
            _tell(open_adapter(address), known)
        return
    adapter = fitting(open_adapter(address), session.base, lora)
    if resumed and known and _changed(adapter, known):
        raise UserError(
            f"{adapter.files.name}: is not the adapter that the run began with, with which "
            f"{settings.train.objective} compares at every step",
            "restore it, or start a new run in another --output",
        )
    _tell(adapter, known)
    arrays = arrays_of(adapter, session.base, lora)
    session.hosts.same(
        "adapter",
        hashlib.sha256(json.dumps(dict(adapter.sha256)).encode()).hexdigest(),
        "starts from another adapter than process 0",
        "put the same files on every host, or at an address that all of them read",
    )
    replace_adapters(built, arrays, session.mesh)
    if not session.hosts.first or resumed:
        return
    for note in notes(adapter, session.base, lora, (settings.model.id, settings.model.revision)):
        print(f"note: {note}", file=sys.stderr)
    write_next_to(session.directory, RECORD, (json.dumps(origin(adapter), indent=2) + "\n").encode())
    print(f"starting from the adapter {adapter.files.name}: {len(adapter.tensors)} modules", file=sys.stderr)


def _recorded(directory: str) -> Mapping[str, Any]:
    """Return the description of the adapter that a run began with, {} if it has not begun."""
    path = path_of(directory) / RECORD
    with reached(directory):
        try:
            return dict(json.loads(path.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return {}


def _changed(adapter: PeftAdapter, known: Mapping[str, Any]) -> bool:
    return dict(adapter.sha256) != known.get("sha256")


def _tell(adapter: PeftAdapter, known: Mapping[str, Any]) -> None:
    if known and _changed(adapter, known):
        print(f"note: {adapter.files.name} has changed since the run began", file=sys.stderr)
