"""Axolotl's quantization-aware training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipec.compiler.port.keys import Keys
from recipec.compiler.port.meaning import rounding

ROUGHER = "recipec rounds as torchao 0.18 does; torchao 0.17 rounds small ranges more coarsely"


def say_qat(keys: Keys, defaults: Mapping[str, Any]) -> None:
    """Record quantization-aware training, which rounds every torch.nn.Linear."""
    if not keys.mapping("qat"):
        keys.same("qat", note="off")
        return
    section = keys.below("qat", {**defaults, "weight_dtype": "int8"})
    kinds = {key: str(section.value(key)).lower() for key in ("weight_dtype", "activation_dtype")}
    kinds = {key: "fp8" if kind.startswith("float8") else kind for key, kind in kinds.items()}
    weights, activations = kinds["weight_dtype"], kinds["activation_dtype"]
    if keys.text("adapter"):
        note = "recipec rounds the projections with an adapter, and Axolotl all linear layers"
        keys.learned("qat", (), note)
        return
    if weights == "nvfp4":
        message = (
            "Axolotl asks torchao for nvfp4 of only the weights, which torchao cannot train: the run stops"
        )
        keys.refuse("qat", "E1145", message, "qat: {weight_dtype: int4, activation_dtype: int8}")
        return
    if weights == "int8" or (weights, activations) == ("int4", "int4"):
        message = f"torchao does not train {weights} weights with {activations} activations: Axolotl stops"
        keys.refuse("qat", "E1145", message, "qat: {weight_dtype: int4, activation_dtype: int8}")
        return
    head = not _fused_head(keys)
    if weights == "mxfp4":
        _mxfp4(section, head)
        return
    if (weights, activations) != ("int4", "int8"):
        also = "" if activations == "none" else f" and {activations} activations"
        note = "recipec rounds to int4 weights with int8 activations, and to mxfp4"
        keys.learned("qat", (), f"{note}, not to {weights} weights{also}")
        return
    section.say("weight_dtype", rounding.rounds(head, rounding.SPREAD))
    section.say("activation_dtype", {}, ROUGHER)
    if head:
        section.same("weight_dtype", note="the output head is a linear layer too")
    rounding.say_group(section, "group_size", 32)
    section.learned("quantize_embedding", (False,), "recipec does not round the embedding")
    rounding.say_later(section)


def _mxfp4(section: Keys, head: bool) -> None:
    """Record rounding to the MX format of 4 bits, which torchao's linear layers cannot switch off."""
    section.say("weight_dtype", rounding.rounds(head, rounding.MX))
    section.same("activation_dtype", note="Axolotl rounds activations as the weights")
    if section.integer("group_size") != 32:
        message = "Axolotl stops at mxfp4 with another group_size than 32"
        section.refuse("group_size", "E1145", message, "group_size: 32")
    section.say("group_size", {"train.qat.group_size": 32})
    section.learned("quantize_embedding", (False,), "recipec does not round the embedding")
    section.unused((rounding.LATER,), "Axolotl does not delay the rounding to mxfp4")


def _fused_head(keys: Keys) -> bool:
    """Return whether the loss reads the output head's weight, which training then does not round."""
    if keys.flag("liger_fused_linear_cross_entropy"):
        return True
    cut = any("CutCrossEntropyPlugin" in name for name in keys.texts("plugins") or ())
    return keys.flag("cut_cross_entropy") if keys.given("cut_cross_entropy") else cut
