"""Quantize linear weights to eight bits: fp8 (e4m3) or int8, with one scale per output channel.

The layout is that of compressed-tensors: the quantized `X.weight` [out, in] and, next to it, `X.weight_scale`
[out, 1] in float32, so that W is about weight * weight_scale. The linear weights of the text layers'
attention and MLP are quantized, trained or not. Embeddings, norms, routers, experts, the output head and the
vision and audio parts stay unchanged.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from ..model.families.family import LAYERS
from ..weights.checkpoint import HFCheckpoint
from .arithmetic import host

LINEAR = re.compile(
    rf"{LAYERS}\.\d+\.((self_attn|attention|self_attention)\.([qkvo]_proj|query_key_value|dense)|"
    r"mlp\.((gate|up|down)_proj|fc1|fc2|dense_h_to_4h|dense_4h_to_h))\.weight"
)
"""A quantized tensor's name, after the checkpoint's prefix: the same in every family."""
WEIGHT, SCALE = ".weight", ".weight_scale"
LEAST_ABSOLUTE = float(np.finfo(np.float32).tiny) * 1024
"""Rows whose values are all smaller become zeros: their scale would not be a normal number."""


@dataclass(frozen=True)
class Quantization:
    """A way to turn a float32 weight [out, in] into tensors of the output: a symmetric type, a scale per row.

    Attributes:
        name: its name in a recipe.
        code: safetensors' name of the type.
        dtype: numpy's type.
        largest: its largest value; the largest value of a row maps to it.
        kind, format: compressed-tensors' names of the type and of its file format.
    """

    name: str
    code: str
    dtype: np.dtype
    largest: int
    kind: str
    format: str

    def applies(self, base: HFCheckpoint, name: str) -> bool:
        """Return whether to quantize a tensor of the base, by its full name."""
        suffix = name.removeprefix(base.prefix)
        return name.startswith(base.prefix) and LINEAR.fullmatch(suffix) is not None

    def outputs(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return (name, safetensors type, shape) of each output of a tensor, in the order of `encode`."""
        return [(name, self.code, shape), (name.removesuffix(WEIGHT) + SCALE, "F32", (shape[0], 1))]

    def encode(self, blocks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Quantize one weight.

        Args:
            blocks: its rows in order, in blocks [rows, in] of float32, all finite.

        Returns:
            The bytes of `outputs`: one quantized block for each block, then the scales of all rows.
        """
        largest_of, divided = _kernels(self.name)
        scales = []
        for block in blocks:
            absolute = np.asarray(largest_of(jax.device_put(block, host())))
            scale = np.where(absolute < LEAST_ABSOLUTE, 1, absolute / np.float32(self.largest))
            scales.append(scale.astype(np.float32, copy=False))
            values = divided(*jax.device_put((block, scales[-1]), host()))
            yield np.asarray(values).view(self.dtype)
        yield np.concatenate(scales)

    def config(self, base: HFCheckpoint, quantized: Collection[str]) -> dict[str, Any]:
        """Return the `quantization_config` of config.json, given the full names of quantized tensors."""
        both = {"num_bits": 8, "type": self.kind, "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**both, "strategy": "channel", "dynamic": False},
            "input_activations": {**both, "strategy": "token", "dynamic": True},
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignored(base, quantized),
            "kv_cache_scheme": None,
        }


def ignored(base: HFCheckpoint, quantized: Collection[str]) -> list[str]:
    """Return patterns of modules that are not quantized but that loaders may treat as linear layers.

    Each pattern matches the name of a module, or of a part of the model, at any place: transformers, vLLM and
    vLLM-TPU use different names for the parts of a multimodal model.
    """
    parts = {base.family.names.head}  # transformers has the module even if the weight is the embedding
    for name, tensor in base.tensors.items():
        if name in quantized or len(tensor.shape) < 2:
            continue
        if name.startswith(base.prefix):
            path = re.sub(rf"^{LAYERS}\.\d+\.", "", name.removeprefix(base.prefix)).split(".")
        else:  # "model.vision_tower.x", or "language_model.lm_head.weight" next to "language_model.model."
            path = list(itertools.dropwhile(base.prefix.split(".").__contains__, name.split(".")))
        parts.add(path[0])
    return [rf"re:(.*\.)?{re.escape(part)}(\..*)?$" for part in sorted(parts)]


FORMATS = {
    "fp8": Quantization("fp8", "F8_E4M3", np.dtype(ml_dtypes.float8_e4m3fn), 448, "float", "float-quantized"),
    "int8": Quantization("int8", "I8", np.dtype("int8"), 127, "int", "int-quantized"),
}


@functools.cache
def _kernels(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return two functions: the largest absolute value of each row, and rows / scales, rounded."""

    def largest_of(rows: Any) -> Any:
        return jnp.max(jnp.abs(rows), axis=1, keepdims=True, initial=0)

    def quotient(rows: Any, scales: Any) -> Any:
        # Without the barrier XLA multiplies by the reciprocal, which changes the last bit.
        return rows / lax.optimization_barrier(jnp.broadcast_to(scales, rows.shape))

    def fp8(rows: Any, scales: Any) -> Any:
        return _fp8_bits(jnp.clip(quotient(rows, scales), -448, 448))

    def int8(rows: Any, scales: Any) -> Any:
        return jnp.clip(jnp.round(quotient(rows, scales)), -127, 127).astype(jnp.int8)

    return jax.jit(largest_of), jax.jit({"fp8": fp8, "int8": int8}[name])


def _fp8_bits(values: Any) -> Any:
    """Return the bits of float32 values of at most 448 as float8_e4m3fn, rounded to nearest, ties to even.

    XLA's own cast on CPU gives the same result and takes twice the time. The format has four exponent bits of
    bias 7 and three mantissa bits: float32's bits without the lower 20, rebiased. Below 2^-6 the step is
    2^-9, which is float32's own step at 2^14: adding 2^14 rounds to it.
    """
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    absolute = bits & 0x7FFFFFFF
    normal = ((absolute + 0x7FFFF + ((absolute >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    stepped = lax.bitcast_convert_type(lax.bitcast_convert_type(absolute, jnp.float32) + 2.0**14, jnp.uint32)
    small = stepped - 0x46800000  # the bits of 2^14
    result = jnp.where(absolute < 0x3C800000, small, normal)  # the bits of 2^-6
    return (result | (bits >> 24 & 0x80)).astype(jnp.uint8)
