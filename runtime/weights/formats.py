"""The formats in which a checkpoint may store its weights quantized, by its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..model.families.base import Family
from ..progress import readable_size
from .agreement import QUANTIZATION
from .checkpoint_files import AGAIN, Files
from .headers import Tensor
from .packed import Format, Unpaired

if TYPE_CHECKING:
    from .checkpoint import HFCheckpoint


def format_of(family: Family, config: Mapping[str, Any]) -> Format | None:
    """Return the format that a config.json names; None if it names none that the family reads.

    Raises:
        UnsupportedCheckpoint: a value of the format is wrong.
    """
    described = config.get(QUANTIZATION)
    if described is None or not family.reads(described):
        return None
    if described["quant_method"] == "mxfp4":
        from .mxfp4 import Mxfp4

        return Mxfp4()
    from .fp8 import Fp8

    return Fp8.of(described)


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without the description of stored quantization."""
    return {key: value for key, value in config.items() if key != QUANTIZATION}


def read_unpacked(store: Files, form: Format, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors, with quantized ones as the tensors that they represent.

    Raises:
        UserError: when codes or scales are missing, or do not fit.
    """
    try:
        return form.unpacked(tensors, form.packed)
    except Unpaired as error:
        fault = error.fault
        where = store.name if fault.file is None else store.path(fault.file)
        raise UserError(f"{where}: {fault.text}", fault.help or AGAIN) from error


def sentence(checkpoint: HFCheckpoint) -> str:
    """Return a sentence about the tensors that are stored quantized, of which there is at least one."""
    packed = [checkpoint.tensors[name] for name in checkpoint.dequantized]
    held = sum(part.size for tensor in packed for part in tensor.stored)
    size = sum(tensor.size for tensor in packed)
    return (
        f"{len(packed)} tensors of the checkpoint are stored in {packed[0].form}, in "
        f"{readable_size(held)}; they are read as bfloat16, which takes {readable_size(size)}"
    )
