"""How the frozen base weights are stored, as the recipe's `lora.quantize`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quantization:
    """What a quantised base means here.

    Attributes:
        value: of `lora.quantize`: "nf4", "int8", or None for weights in model.dtype.
        note: how it differs, "" where the weights are the same.
    """

    value: str | None
    note: str = ""


NESTED = (
    "scales are stored in float32 here, not quantised a second time: the weights are a little more precise, "
    "with 0.4 bits more for each"
)
INT8 = (
    "int8 with a scale for each output channel, and activations in model.dtype, in place of bitsandbytes' "
    "LLM.int8() with its activations in int8 and outliers in float16"
)
FP4 = "nf4 in its place: the same size and blocks, other code points"


def translate(bits: int | None, kind: str = "nf4", nested: bool = False) -> Quantization:
    """The recipe's quantisation for bitsandbytes'.

    Args:
        bits: 4 or 8; None or 16 and more for none.
        kind: of 4 bits: "nf4" or "fp4".
        nested: whether the scales are quantised too (`bnb_4bit_use_double_quant`).

    Raises:
        ValueError: for other bits, or another kind.
    """
    if bits is None or bits >= 16:
        return Quantization(None)
    if bits == 8:
        return Quantization("int8", INT8)
    if bits != 4 or kind not in ("nf4", "fp4"):
        raise ValueError(f"{kind} in {bits} bits")
    notes = ([FP4] if kind == "fp4" else []) + ([NESTED] if nested else [])
    return Quantization("nf4", "; ".join(notes))
