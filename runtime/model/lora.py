"""LoRA and DoRA in a model: their arrays and their computation.

Qwix intercepts the model's matrix products; this module adds the adapters to them. The products of all
experts at once (experts.py) are not intercepted: their modules hold the provider, which gives them A and B.
Adapters are attached before rematerialization is switched on. Every adapter must then take part in the
traced computation, so that a missing one is noticed.

DoRA adds to LoRA a magnitude for each output of a projection (Liu et al. 2024), computed as in PEFT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from qwix._src.utils import flax_util

from ..errors import UserError
from .adapters import Adapter, LoraSettings
from .initial import path_hash
from .quantize import Multiply, Product, dequantize, letters
from .remat import PROJECTION


class ProductProvider(qwix.QuantizationProvider):
    """Compute the products of a model's weights by a `Product`."""

    def __init__(self, product: Product) -> None:
        super().__init__([])
        self._product = product

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        return {
            **super().get_intercept_map(),
            "jax.lax.dot_general": self.dot_general,
            "jax.numpy.einsum": self.einsum,
        }

    def einsum(self, equation: str, *operands: Any, **kwargs: Any) -> jax.Array:
        """Replace jax.numpy.einsum while the model runs."""
        if len(operands) != 2:
            return jnp.einsum(equation, *operands, **kwargs)
        return self.multiply(partial(jnp.einsum, equation, **kwargs), equation, *operands)

    def dot_general(self, lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """Replace jax.lax.dot_general while the model runs."""
        # The only such products are dense layers: x's last axis with a matrix's first.
        rows = "abcdefgh"[: lhs.ndim - 1]
        return self.multiply(
            lambda x, w: jax.lax.dot_general(x, w, *args, **kwargs), f"{rows}i,io->{rows}o", lhs, rhs
        )

    def multiply(self, compute: Multiply, equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Return the product of activations and weight, in the calling module."""
        return self._product(compute, equation, x, weight, qwix_current_module())


class AdapterProvider(ProductProvider):
    """Add each adapter's delta to the product of the weight it belongs to.

    A product of activations x and weight W becomes x W + scale * (dropout(x) A) B. The delta is computed in
    the adapters' dtype, and the sum is cast back to the product's. So float32 adapters leave the activations
    of a bfloat16 model in bfloat16.

    Attributes:
        linear: the adapters of linear layers, by the path of the layer's module.
        experts: the adapters of experts, by the path of the module that holds these; experts.py adds them.
        salts: of the rows while dropout is on, else None.
        used: paths of the adapted weights that took part since `used` was last cleared.
    """

    def __init__(self, adapters: Sequence[Adapter], dropout: float, product: Product) -> None:
        super().__init__(product)
        self._all = tuple(adapters)
        self.linear = {
            tuple(adapter.module.split(".")): adapter for adapter in adapters if not adapter.target.experts
        }
        self.experts: dict[tuple[str, ...], list[Adapter]] = {}
        for adapter in adapters:
            if adapter.target.experts:
                self.experts.setdefault(tuple(adapter.module.split(".")), []).append(adapter)
        self._dropout = dropout
        self.salts: jax.Array | None = None
        self.used: set[str] = set()

    @contextmanager
    def training(self, seed: int, index: jax.Array, rows: int) -> Iterator[None]:
        """Turn dropout on while a loss is traced.

        Args:
            seed: of the run.
            index: int32[], the number of the micro-batch in the run.
            rows: of every micro-batch.
        """
        self.salts = row_salts(seed, index, rows) if self._dropout else None
        try:
            yield
        finally:
            self.salts = None

    def check_used(self) -> None:
        """Raise UserError unless every adapter took part in the traced computation."""
        missing = {adapter.target.weight for adapter in self._all} - self.used
        if missing:
            raise UserError(
                f"{len(missing)} of {len(self._all)} adapters take no part in the model's "
                f"computation, among them {min(missing)}",
                "this version of flax or Qwix does not fit the runtime; install the artifact's requirements",
            )

    def multiply(self, compute: Multiply, equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
        module = qwix_current_module()
        product = self._product(compute, equation, x, weight, module)
        adapter = self.linear.get(tuple(map(str, getattr(module, "qwix_path", ()))))
        if adapter is None:
            return product
        return self._adapted(product, (x, weight), module, adapter, letters(equation))

    def _adapted(
        self,
        product: jax.Array,
        operands: Sequence[jax.Array],
        module: Any,
        adapter: Adapter,
        axes: tuple[str, str, str],
    ) -> jax.Array:
        """Add the adapter's delta to the product.

        Args:
            operands: activations and weight.
            axes: their letters and the product's in an einsum.
        """
        self.used.add(adapter.target.weight)
        name = adapter.target.weight.rpartition(".")[2]
        (x, weight), (x_axes, w_axes, output) = operands, axes
        a = getattr(module, f"{name}_lora_a").value
        b = getattr(module, f"{name}_lora_b").value
        contracted = "".join(w_axes[i] for i in adapter.target.contract)
        rest = "".join(axis for axis in w_axes if axis not in contracted)
        hidden = "".join(axis for axis in x_axes if axis not in contracted)
        x, a, b = together(x, a, b)
        x = x.astype(a.dtype)
        down = f"{x_axes},{contracted}r->{hidden}r"
        if self.salts is None:
            inner = jnp.einsum(down, x, a)
        else:
            # Projections that share A also share its product, and so its dropout.
            inner = jnp.einsum(down, dropped(x, self.salts, adapter.lending.name, self._dropout), a)
        inner = checkpoint_name(inner, PROJECTION)
        scale = jnp.asarray(adapter.scale, inner.dtype)
        total = product + jnp.einsum(f"{hidden}r,r{rest}->{output}", inner * scale, b)
        if adapter.dora:
            m = getattr(module, f"{name}_lora_m").value
            by = magnitude_scale(adapter, w_axes, weight, (a, b * scale), m)
            total = jnp.einsum(f"{output},{rest}->{output}", total, by)
        return total.astype(product.dtype)


def magnitude_scale(
    adapter: Adapter, w_axes: str, weight: jax.Array, pair: tuple[jax.Array, jax.Array], m: jax.Array
) -> jax.Array:
    """Return the factor of the outputs of W + B A, [*rest of the weight]: m / |W + B A|.

    The length of each output's column gets no gradient (section 4.3 of the paper). It is computed without
    W + B A itself, as |W|^2 + 2 W.(B A) + |B A|^2.

    Args:
        w_axes: a letter for each axis of the weight.
        pair: A [*contracted, rank] and B [rank, *rest], B with LoRA's scale.
        m: the magnitudes, [*rest].
    """
    weight, a, b = (jax.lax.stop_gradient(x.astype(jnp.float32)) for x in (weight, *pair))
    contracted = "".join(w_axes[axis] for axis in adapter.target.contract)
    rest = "".join(axis for axis in w_axes if axis not in contracted)
    r, q, *_ = (letter for letter in "rqyz" if letter not in w_axes)
    cross = jnp.einsum(f"{contracted}{r},{w_axes}->{r}{rest}", a, weight)
    gram = jnp.einsum(f"{contracted}{r},{contracted}{q}->{r}{q}", a, a)
    squares = jnp.einsum(f"{w_axes},{w_axes}->{rest}", weight, weight)
    squares += (b * (2.0 * cross + jnp.einsum(f"{r}{q},{q}{rest}->{r}{rest}", gram, b))).sum(0)
    return m / jnp.sqrt(squares)


def magnitudes(adapter: Adapter, weight: jax.Array | qwix.QArray, dtype: Any) -> jax.Array:
    """Return the first magnitudes, float32[*rest of the weight]: the lengths of W's columns.

    Args:
        weight: W, or its codes and scales. Then the lengths are those of the numbers that they represent.
        dtype: the model's.
    """
    if isinstance(weight, qwix.QArray):
        weight = dequantize(weight, dtype)
    return jnp.sqrt(jnp.square(weight.astype(jnp.float32)).sum(adapter.target.contract))


@jax.custom_vjp
def together(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """Return inputs and adapters unchanged, but have their gradients computed at the same time.

    A's gradient is a product with x, and only the optimizer waits for it. The TPU's compiler may otherwise
    put such products off until the end, and keep the inputs of all projections of all layers for them.
    """
    return operands


def _together_forward(*operands: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
    return operands, None


def _together_backward(_: None, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(jax.lax.optimization_barrier(gradients))


together.defvjp(_together_forward, _together_backward)


def row_salts(seed: int, index: jax.Array, rows: int) -> jax.Array:
    """Return uint32[rows]: a number for each row of a micro-batch, which decides what dropout drops of it.

    It depends only on the seed and on the row's number in the run, counted over the run's micro-batches. So a
    step's rows are the same for any number of micro-batches per step, and on any mesh.

    Args:
        seed: of the run.
        index: int32[], the number of the micro-batch in the run.
        rows: of every micro-batch.
    """
    number = index.astype(jnp.uint32) * jnp.uint32(rows) + jnp.arange(rows, dtype=jnp.uint32)
    return mix(mix(jnp.uint32(seed & 0xFFFFFFFF)) ^ number)


def dropped(x: jax.Array, salts: jax.Array, projection: str, rate: float) -> jax.Array:
    """Apply dropout to a projection's input: set some elements to zero, and scale the others up.

    Args:
        x: [B, ...], or [B * N, ...] for the N pictures of each row.
        salts: uint32[B], from `row_salts`.
        projection: its Hugging Face name, "layers.0.self_attn.q_proj".
        rate: probability that an element is dropped.
    """
    by_row = (len(salts), -1, *x.shape[1:]) if len(salts) != len(x) else x.shape
    rows = x.reshape(by_row)
    kept = keep_mask(salts ^ jnp.uint32(path_hash(projection)), rows.shape, rate)
    return jnp.where(kept, rows / (1.0 - rate), 0.0).reshape(x.shape)


def keep_mask(salts: jax.Array, shape: Sequence[int], rate: float) -> jax.Array:
    """Return bool of `shape`, False with probability `rate`."""
    return random_bits(salts, shape) >= jnp.uint32(round(rate * 2**32))


def random_bits(salts: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Return uint32 of `shape`: a hash of each element's place in its row and of the row's salt.

    This is a pure function of both, which no sharding changes. It costs a few integer operations an element,
    fused into the product that reads it; jax.random's generators cost far more to run and to compile.

    Args:
        salts: uint32, one for each index of the first dimension.
    """
    # Over the whole shape: XLA would write the places of one row to memory, and read them for each row.
    place = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape[1:], 1):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    salts = salts.reshape(-1, *(1 for _ in shape[1:]))
    return mix(mix(place ^ mix(salts)) + salts)


def mix(x: jax.Array) -> jax.Array:
    """Scramble uint32 by a bijection that hides its input's order: the hash lowbias32 (C. Wellons)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def qwix_current_module() -> Any:
    """Return the flax module that is calling, which Qwix finds on the stack."""
    return flax_util.get_current_module()


def intercepted(model: nnx.Module, provider: ProductProvider) -> nnx.Module:
    """Return the model, whose products the provider computes."""
    return qwix.quantize_model(model, provider, rngs=nnx.Rngs(0), skip_nnx_init=True)


def attach(
    model: nnx.Module, adapters: Sequence[Adapter], settings: LoraSettings, product: Product
) -> tuple[nnx.Module, AdapterProvider]:
    """Add LoRA parameters to an abstract model, and the computation that uses them.

    Args:
        model: with shapes for values, rematerialization and splash attention off.
        product: computes the products with the base's weights.

    Returns:
        The model, with shapes for the new parameters, and the provider that its calls go through.
    """
    provider = AdapterProvider(adapters, settings.dropout, product)
    model = intercepted(model, provider)
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    dtype = jnp.dtype(settings.dtype)
    for adapter in adapters:
        module = modules[adapter.module]
        for path, shape, spec in adapter.arrays:
            holder, _, name = path.rpartition(".")
            if holder != adapter.module:
                variable = getattr(modules[holder], name)
            else:
                variable = nnx.LoRAParam(jax.ShapeDtypeStruct(shape, dtype), out_sharding=spec)
            setattr(module, name, variable)
        if adapter.target.experts:
            module.adapters = provider
    return model, provider
