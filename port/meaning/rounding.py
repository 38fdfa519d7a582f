"""Quantization-aware training by torchao, as `train.qat`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipec.compiler.catalog import Model
from recipec.port.engine import Says
from recipec.port.keys import Keys
from recipec.port.refusals import E1145, E1160

SYMMETRIC = {"train.qat.weights": "int4", "train.qat.activations": "int8"}
"""torchao's Int8DynActInt4WeightQATQuantizer."""
SPREAD = {"train.qat.weights": "int4_asymmetric", "train.qat.activations": "int8"}
"""torchao's IntxFakeQuantizeConfig for activations, and its Int4WeightFakeQuantizeConfig for bfloat16."""
MX = {"train.qat.weights": "mxfp4", "train.qat.activations": "mxfp4"}
"""torchao's MXFakeQuantizedLinear."""

LATER = "fake_quant_after_n_steps"


def say_group(keys: Keys, key: str, default: int) -> Says:
    """State the size of a group of weights."""
    size = keys.integer(key) or default
    keys.defaults = {**keys.defaults, key: default}
    if size < 2:
        yield keys.refuse(key, E1160, f"torchao has no groups of {size}", f"{key}: 32")
    yield keys.say(key, {"train.qat.group_size": size})


def say_later(keys: Keys, from_zero: bool = False) -> Says:
    """State the steps before rounding begins.

    Args:
        from_zero: whether the tool rounds from the first step at 0; otherwise it then never does.
    """
    steps = keys.integer(LATER)
    if steps == 0 and keys.given(LATER) and not from_zero:
        message = f"`{LATER}: 0` switches the rounding off at the first step, and never on again"
        yield keys.refuse(LATER, E1145, message, f"{LATER}: null rounds from the first step")
    yield keys.say(LATER, {"train.qat.start_step": steps} if steps else {})


def has_own_head(model: Model | None) -> bool:
    """Return whether a model's output head has weights of its own."""
    if model is None:
        return False
    sources = (s for p in model.family.parameters(model.architecture) for s in p.sources)
    return any(source.module == "lm_head" for source in sources)


def rounds(head: bool, of: Mapping[str, str]) -> dict[str, Any]:
    """Return what a key sets that switches the rounding on."""
    return {**of, "train.qat.head": True} if head else dict(of)
