"""The products of all experts of a layer at once, and which device computes which token.

No token is dropped. Each device sends its own rows through all experts, sorted by expert, so that the rows of
an expert are one block of a ragged product. The experts' weights are gathered over fsdp for this, like all
other weights; features within an expert are split over tp. Over ep the experts themselves are split: rows are
sent to the devices that hold their experts, and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .partition_rules import row_axes
from .quantize import dequantize, dequantized
from .sharding import mesh_in_scope, on_tpu

SPLIT = "tp"
"""The mesh axis that features of an expert are split over."""
SPLIT_AXIS = {"gate_up": 3, "down": 1, "gate_up_bias": 2, "gate_up_lora_b": 3, "down_lora_a": 1}
"""The axis of each array along which an expert's features lie."""
EXPERTS = "ep"
"""The mesh axis that experts are split over."""

TILE = (512, 1024, 512)
"""Tile of `outer`'s kernel: rows, in and out; 12 MiB of VMEM in float32, of the 16 that a kernel has."""
LEAST_TILE = 128
"""The smallest tile, in rows."""
LANES = 128
"""Values side by side in a tile of a TPU's memory."""
BY_ROWS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
"""The products of `outer` in XLA's terms."""

Activation = Callable[..., jax.Array]
"""(gate, up) -> the features of an expert; without a gate, (up) -> these."""
Stored = Any
"""An array, or the QArray that quantize.py stores for it."""


def run(
    x: jax.Array,
    weights: jax.Array,
    choices: jax.Array,
    arrays: Mapping[str, Stored],
    activation: Activation,
    on_inputs: bool = False,
) -> jax.Array:
    """Return the weighted sum of each token's experts.

    Args:
        x: [B, T, D].
        weights: float32[B, T, K].
        choices: int32[B, T, K].
        arrays: `gate_up` [E, D, 2, F], or [E, D, 1, F] without a gate, `down` [E, F, D] and, if experts have
            biases, `gate_up_bias` [E, 2, F] and `down_bias` [E, D]; if experts are adapted, the arrays of
            `experts.adapters_of` too. Codes and scales of quantized weights are gathered as such, and each
            device dequantizes its own.
        on_inputs: whether the weights are multiplied with the experts' inputs.

    Returns:
        [B, T, D] in x's dtype.
    """
    compute = partial(_run, activation=activation, on_inputs=on_inputs)
    mesh = mesh_in_scope()
    if mesh is None:
        return compute(x, weights, choices, dict(arrays))
    rows, axes = row_axes(x.shape[0], mesh.shape), mesh.shape
    split = SPLIT if SPLIT in axes and _splits(arrays, axes[SPLIT]) else None
    # If the devices do not divide the rows, each device holds all rows: then it holds all experts too.
    apart = EXPERTS if EXPERTS in (rows or ()) and arrays["down"].shape[0] % axes[EXPERTS] == 0 else None
    placed = {name: _placed(name, array, split, apart) for name, array in arrays.items()}
    tokens = PartitionSpec(rows)
    sharded = jax.shard_map(
        partial(compute, axes=(split, apart)),
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, placed),
        out_specs=tokens,
        check_vma=False,
    )
    return sharded(x, weights, choices, dict(arrays))


def _splits(arrays: Mapping[str, Stored], devices: int) -> bool:
    """Return whether features can be split over so many devices. Blocks that share a scale are not cut."""
    return all(
        leaf.shape[axis] % devices == 0 or leaf.shape[axis] == 1
        for name, axis in SPLIT_AXIS.items()
        for leaf in jax.tree.leaves(arrays.get(name))
    )


def _placed(name: str, array: Stored, split: str | None, apart: str | None) -> Any:
    """Return the PartitionSpec of an array, or of its codes and scales; a shared scale is not split."""
    if name == "down_bias":  # added to the sums, on the devices whose tokens they are
        return PartitionSpec()
    axis = SPLIT_AXIS.get(name)
    if axis is None:
        return PartitionSpec(apart)
    return jax.tree.map(
        lambda leaf: PartitionSpec(apart, *(None,) * (axis - 1), split if leaf.shape[axis] > 1 else None),
        array,
    )


def _run(
    x: jax.Array,
    weights: jax.Array,
    choices: jax.Array,
    arrays: Mapping[str, Stored],
    *,
    activation: Activation,
    on_inputs: bool,
    axes: tuple[str | None, str | None] = (None, None),
) -> jax.Array:
    """Compute `run` for the rows of one device, with its share of the experts and of their features.

    Args:
        axes: the mesh axes that features and experts are split over, None for none.
    """
    hidden, (split, apart) = x.shape[-1], axes
    experts = arrays["down"].shape[0] * (1 if apart is None else jax.lax.axis_size(apart))
    chosen = choices.reshape(-1)
    order = jnp.argsort(chosen)
    inverse = jnp.argsort(order)
    sizes = jnp.bincount(chosen, length=experts).astype(jnp.int32)
    tokens = x.reshape(-1, hidden)
    rows = _take(tokens if apart is None else _tiles(tokens), order, inverse)
    if on_inputs:
        rows = (rows * _over(rows, weights.reshape(-1)[order])).astype(x.dtype)
    share = (jnp.ones_like(weights) if on_inputs else weights).reshape(-1, weights.shape[-1])
    places = order, inverse, sizes
    if apart is None:
        out = _summed(_products(arrays, activation, rows, sizes), share, places)
    else:
        out = _exchanged(activation, apart, rows, share, places, dict(arrays))
    out = out.reshape(*x.shape)
    if split is not None:
        out = jax.lax.psum(out, split)
    if "down_bias" in arrays:
        out = out + jnp.einsum(
            "BTKD,BTK->BTD", arrays["down_bias"].astype(jnp.float32)[choices], share.reshape(weights.shape)
        )
    return out.astype(x.dtype)


Places = tuple[jax.Array, jax.Array, jax.Array]
"""For the rows that tokens send to their experts, [T * K]: the order by expert and its inverse, int32[T * K],
and the number of rows of each expert, int32[E]."""


def _summed(rows: jax.Array, share: jax.Array, places: Places) -> jax.Array:
    """Sum the experts' outputs of each token, times the experts' shares.

    Args:
        rows: [T * K, ...], sorted by expert.
        share: float32[T, K].

    Returns:
        float32[T, ...].
    """
    order, inverse, _ = places
    outputs = _take(rows, inverse, order).reshape(*share.shape, *rows.shape[1:])
    return jnp.sum(outputs * _over(outputs, share), axis=1)


def _products(
    arrays: Mapping[str, Stored], activation: Activation, rows: jax.Array, sizes: jax.Array
) -> jax.Array:
    """Return each expert's output for its rows.

    Args:
        arrays: of the experts on this device.
        rows: [M, D], sorted by expert; rows after the last expert's belong to no expert.
        sizes: int32[E], rows of each expert.

    Returns:
        [M, D].
    """
    return _product(_features(arrays, activation, rows, sizes), "down", arrays, sizes)


def _features(
    arrays: Mapping[str, Stored], activation: Activation, rows: jax.Array, sizes: jax.Array
) -> jax.Array:
    """Return the inputs of the last product in `_products`: [M, F]."""
    both = _product(rows, "gate_up", arrays, sizes)
    if (bias := arrays.get("gate_up_bias")) is not None:
        of_row = jnp.repeat(jnp.arange(len(bias)), sizes, total_repeat_length=len(rows))
        both = both + bias.reshape(len(bias), -1)[of_row]
    return activation(*jnp.split(both, both.shape[-1] // arrays["down"].shape[1], -1))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _exchanged(
    activation: Activation,
    axis: str,
    rows: jax.Array,
    share: jax.Array,
    places: Places,
    arrays: dict[str, Stored],
) -> jax.Array:
    """Send rows to the devices that have their experts, and sum the results that come back.

    This takes as many turns as the largest transfer between two devices needs: one turn if the experts are
    used about equally. No row is dropped. The number of turns is not known when a program is compiled, so the
    gradient takes the same turns, and recomputes what each turn needs. It does not need the results that came
    back: a share's gradient is the product of an expert's output and its gradient. It is computed on the
    expert's device, from the expert's features, because an output without bias is linear in them. So a layer
    that is recomputed does not repeat the exchange.

    Args:
        rows: [T * K, ...], this device's `_tiles`, sorted by expert.
        share: float32[T, K], the share of each of a token's experts in the sum.
        places: includes the number of rows for each expert on all devices.
        arrays: as in `_products`, for the experts of this device.

    Returns:
        float32[T, ...].
    """
    rows, weights = _factors(rows, arrays)
    exchange = _Exchange.of(rows, places[2], axis)

    def turn(number: jax.Array, out: jax.Array) -> jax.Array:
        sent = exchange.turn(number)
        received, sorting = sent.there(rows), sent.by_expert()

        def block(of: _Block, results: jax.Array) -> jax.Array:
            read = of.rows(received)
            return of.put(_products(weights, activation, _flat(read), of.sizes).reshape(read.shape), results)

        results = sorting.blocks(block, sent.room(rows))
        return sent.back(results[sorting.inverse], out)

    return _summed(jax.lax.fori_loop(0, exchange.turns, turn, jnp.zeros_like(rows)), share, places)


def _exchanged_forward(
    activation: Activation, axis: str, rows: Any, share: Any, places: Any, arrays: dict[str, Any]
) -> tuple[jax.Array, Any]:
    """Take the arguments of `_exchanged`, where each leaf says whether its gradient is needed."""
    values = {name: jax.tree.map(lambda leaf: leaf.value, array) for name, array in arrays.items()}
    trained = {
        name for name, array in arrays.items() if any(leaf.perturbed for leaf in jax.tree.leaves(array))
    }
    kept = {name: array for name, array in values.items() if name in trained}
    frozen = {name: array for name, array in values.items() if name not in trained}
    where = tuple(place.value for place in places)
    out = _exchanged(activation, axis, rows.value, share.value, where, values)
    return out, (rows.value, share.value, where, kept, frozen)


def _exchanged_backward(activation: Activation, axis: str, kept: Any, gradient: jax.Array) -> Any:
    rows, share, places, trained, frozen = kept
    order, inverse, sizes = places
    gradient, fixed = _factors(gradient.astype(rows.dtype), frozen, backward=True)
    exchange = _Exchange.of(rows, sizes, axis)
    of_tokens = gradient[order // share.shape[-1]]
    shared = (of_tokens * _over(of_tokens, share.reshape(-1)[order])).astype(rows.dtype)

    def turn(number: jax.Array, sums: Any) -> Any:
        sent = exchange.turn(number)
        received, of_outputs, sorting = sent.there(rows), sent.there(shared), sent.by_expert()

        def block(of: _Block, results: Any) -> Any:
            read = of.rows(received)
            features, pull = jax.vjp(
                lambda rows, trained: _features({**fixed, **trained}, activation, rows, of.sizes),
                _flat(read),
                trained,
            )
            _, pull_down = jax.vjp(
                lambda features, trained: _product(features, "down", {**fixed, **trained}, of.sizes),
                features,
                trained,
            )
            of_features, of_down = pull_down(_flat(of.rows(of_outputs)))
            of_rows, of_trained = pull(of_features)
            # The gradient of share * output, repeated over as many equal lanes as a row of a tile has.
            of_shares = jnp.sum(
                of_features.astype(jnp.float32) * features.astype(jnp.float32), -1, keepdims=True
            )
            of_shares = jnp.broadcast_to(of_shares[..., None], (len(of_shares), 1, LANES))
            return (
                of.put(of_rows.reshape(read.shape), results[0]),
                of.put(of_shares, results[1]),
                jax.tree.map(lambda *leaves: sum(leaves), results[2], of_down, of_trained),
            )

        results = sent.room(rows), sent.room(zeros[1]), sums[2]
        of_rows, of_shares, of_trained = sorting.blocks(block, results, whole=trains_weights)
        return (
            sent.back(of_rows[sorting.inverse], sums[0]),
            sent.back(of_shares[sorting.inverse], sums[1]),
            of_trained,
        )

    zeros = (
        jnp.zeros_like(rows),
        jnp.zeros((len(rows), 1, LANES), jnp.float32),
        jax.tree.map(jnp.zeros_like, trained),
    )
    # Each block adds to all gradients of the experts. Those of whole weights are larger than a block's rows.
    trains_weights = not trained.keys().isdisjoint(WEIGHTS)
    of_rows, of_shares, of_trained = jax.lax.fori_loop(0, exchange.turns, turn, zeros)
    # A share is 0 if the expert's score is 0; the score then gets no gradient.
    of_shares = of_shares[inverse, 0, 0].reshape(share.shape) / jnp.where(share == 0, 1, share)
    return of_rows, of_shares, None, {**dict.fromkeys(frozen), **of_trained}


_exchanged.defvjp(_exchanged_forward, _exchanged_backward, symbolic_zeros=True)

WEIGHTS = ("gate_up", "down")
"""The arrays of experts that adapters stand next to."""
TURNED = "_turned"
"""After the name of such an array: with its last two axes exchanged."""
BLOCK = 4096
"""Rows of a block that the experts of a device compute together, if this divides the room."""
ROOM = 2
"""Room for rows on a device in a turn, as a multiple of its rows if all experts get equally many."""


@dataclass(frozen=True)
class _Exchange:
    """How many rows each device has for each other device.

    Attributes:
        axis: the mesh axis that the experts are split over.
        every: int32[P, P, E], rows by sender, receiver and the receiver's expert.
        most: the most rows that a device sends to another in a turn.
        turns: int32, the number of turns.
    """

    axis: str
    every: jax.Array
    most: int
    turns: jax.Array

    @classmethod
    def of(cls, rows: jax.Array, sizes: jax.Array, axis: str) -> _Exchange:
        devices = jax.lax.axis_size(axis)
        every = jax.lax.all_gather(sizes, axis).reshape(devices, devices, -1)
        most = min(rows.shape[0], -(-ROOM * rows.shape[0] // devices // 8) * 8)
        return cls(axis, every, most, -(-every.sum(-1).max() // most))

    def turn(self, number: jax.Array) -> _Turn:
        """Return the rows of a turn: the next `most` rows of each sender for each receiver."""
        amounts = self.every.sum(-1)
        starts = jnp.cumsum(amounts, 1) - amounts
        first = number * self.most
        ends = jnp.cumsum(self.every, 2)
        below, above = (jnp.clip(edge, first, first + self.most) for edge in (ends - self.every, ends))
        counts = above - below
        return _Turn(self.axis, self.most, counts, starts + jnp.minimum(first, amounts))


@dataclass(frozen=True)
class _Turn:
    """The rows that one turn exchanges.

    Attributes:
        axis, most: as in _Exchange.
        counts: int32[P, P, E], rows by sender, receiver and the receiver's expert.
        starts: int32[P, P], where the receiver's rows begin among the sender's.
    """

    axis: str
    most: int
    counts: jax.Array
    starts: jax.Array

    def room(self, rows: jax.Array) -> jax.Array:
        """Return an array for as many such rows as this device can receive: [P * most, ...]. Rows that
        nothing is written to are not used."""
        most = self.counts.shape[0] * self.most
        # Without a kernel, `outer` passes over these rows too, and NaN times 0 is NaN.
        make = jax.lax.empty if _kernel_tile(_block(most)) else jnp.zeros
        return make((most, *rows.shape[1:]), rows.dtype)

    def there(self, rows: jax.Array) -> jax.Array:
        """Return the rows that this device receives from all devices, in a `room`."""
        return _all_to_all(rows, self.room(rows), self.starts, self._amounts, self._places, self.axis)

    def back(self, rows: jax.Array, out: jax.Array) -> jax.Array:
        """Return `out` [M, ...] with the other devices' results for its rows of this turn."""
        return _all_to_all(rows, out, self._places.T, self._amounts.T, self.starts.T, self.axis)

    def by_expert(self) -> _Sorting:
        """Return the order by expert of the rows in a `room`, which lie by sender."""
        counts = self.counts[:, jax.lax.axis_index(self.axis)]
        return _Sorting(*_regrouped(counts, self.counts.shape[0] * self.most), counts.sum(0))

    @property
    def _amounts(self) -> jax.Array:
        return self.counts.sum(-1)

    @property
    def _places(self) -> jax.Array:
        """[P, P]: where the sender's rows begin among the rows that the receiver gets."""
        return jnp.cumsum(self._amounts, 0) - self._amounts


@dataclass(frozen=True)
class _Sorting:
    """The order of received rows by expert.

    Attributes:
        order, inverse: int32[R], and its inverse.
        counts: int32[E], the rows of each expert of this device.
    """

    order: jax.Array
    inverse: jax.Array
    counts: jax.Array

    def blocks(self, compute: Callable[[_Block, Any], Any], results: Any, whole: bool = False) -> Any:
        """Return compute(block, results so far) after all blocks that have rows.

        A room is larger than the rows that usually arrive, and most of the time of experts goes to reading
        and writing rows. So what stands after the last row is skipped, a block at a time. The rows between
        two operations of a block are also few enough for a TPU's VMEM.

        Args:
            whole: one block has all rows.
        """
        rows = len(self.order)
        size = rows if whole else _block(rows)
        if size == rows:
            return compute(_Block(jnp.int32(0), self.order, self.counts), results)
        ends = jnp.cumsum(self.counts)

        def block(number: jax.Array, results: Any) -> Any:
            start = number * size
            below, above = (jnp.clip(edge - start, 0, size) for edge in (ends - self.counts, ends))
            order = jax.lax.dynamic_slice_in_dim(self.order, start, size)
            of = _Block(start, order, above - below)
            return jax.lax.cond(start < ends[-1], lambda: compute(of, results), lambda: results)

        return jax.lax.fori_loop(0, rows // size, block, results)


@dataclass(frozen=True)
class _Block:
    """Consecutive rows of a `_Sorting`.

    Attributes:
        start: int32, the first one.
        order: int32[B], where each lies among the received rows.
        sizes: int32[E], the rows of each expert in the block.
    """

    start: jax.Array
    order: jax.Array
    sizes: jax.Array

    def rows(self, received: jax.Array) -> jax.Array:
        """Return the block's rows of an array in the order of arrival: [B, ...]."""
        return received[self.order]

    def put(self, rows: jax.Array, results: jax.Array) -> jax.Array:
        """Return an array in the order by expert, with the block's rows replaced."""
        return jax.lax.dynamic_update_slice_in_dim(results, rows, self.start, 0)


def _block(rows: int) -> int:
    """Return the size of a block, which divides the rows: BLOCK or a large part of it, else all."""
    size = math.gcd(rows, BLOCK)
    return size if size >= BLOCK // 4 else rows


def _factors(
    rows: jax.Array, arrays: Mapping[str, Stored], backward: bool = False
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return weights as products take them, once for all blocks: as numbers, [E, in, out].

    A product takes another layout than the one that is stored. Without the barrier XLA would make the copies
    of all layers in the forward pass, and keep them for the backward pass.

    Args:
        rows: to be used in place of the argument; weights that are stored quantized get its dtype.
        backward: add the weights [E, out, in] that gradients of rows are multiplied by.
    """
    rows, stored = jax.lax.optimization_barrier((rows, dict(arrays)))
    out = {
        name: dequantize(array, rows.dtype) if hasattr(array, "qvalue") else array
        for name, array in stored.items()
    }
    flat = {name: out[name].reshape(*out[name].shape[:2], -1) for name in WEIGHTS if name in out}
    turned = {f"{name}{TURNED}": array.swapaxes(1, 2) for name, array in flat.items() if backward}
    return rows, {**out, **flat, **turned}


def _regrouped(counts: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Compute the order that regroups rows by expert, from rows by sender, and by expert within a sender.

    Args:
        counts: int32[P, E], the rows of each sender and expert; rows after the last keep their places.
        rows: R.

    Returns:
        The order and its inverse, int32[R].
    """
    lengths = counts.reshape(-1)
    starts = (jnp.cumsum(lengths) - lengths).reshape(counts.shape)
    by_expert = counts.T.reshape(-1)
    targets = (jnp.cumsum(by_expert) - by_expert).reshape(counts.T.shape).T
    shifts = targets - starts

    def shifted(shifts: jax.Array, lengths: jax.Array) -> jax.Array:
        unused = rows - lengths.sum()
        by_row = jnp.repeat(jnp.append(shifts, 0), jnp.append(lengths, unused), total_repeat_length=rows)
        return jnp.arange(rows, dtype=jnp.int32) + by_row.astype(jnp.int32)

    return shifted(-shifts.T.reshape(-1), by_expert), shifted(shifts.reshape(-1), lengths)


def _all_to_all(
    rows: jax.Array, room: jax.Array, starts: jax.Array, amounts: jax.Array, places: jax.Array, axis: str
) -> jax.Array:
    """Send blocks of rows between the devices of an axis, by ragged_all_to_all where it exists.

    Args:
        rows: [M, ...].
        room: [R, ...], the array that receives the blocks; its other rows stay.
        starts, amounts, places: int32[P, P], by sender and receiver: where a block begins in the sender's
            rows, its length, and where it begins in the receiver's room.
    """
    here = jax.lax.axis_index(axis)
    if _on_tpu():
        sizes = starts[here], amounts[here], places[here], amounts[:, here]
        return jax.lax.ragged_all_to_all(rows, room, *sizes, axis_name=axis)
    every = jax.lax.all_gather(rows, axis)  # XLA has no ragged exchange on CPUs
    place = jnp.arange(room.shape[0])[:, None] - places[:, here]  # [R, P]: of each device's block
    mine = (place >= 0) & (place < amounts[:, here])
    sender = jnp.argmax(mine, axis=1)
    row = jnp.take_along_axis(starts[:, here] + place, sender[:, None], axis=1)[:, 0]
    received = every[sender, jnp.clip(row, 0, rows.shape[0] - 1)]
    return jnp.where(_over(room, mine.any(1)), received, room)


def _tiles(rows: jax.Array) -> jax.Array:
    """Return rows [M, D] as [M, D / 128, 128], if 128 divides D. A row is taken and sent as whole tiles of a
    TPU's memory then."""
    return rows.reshape(rows.shape[0], -1, LANES) if rows.shape[1] % LANES == 0 else rows


def _over(array: jax.Array, of_rows: jax.Array) -> jax.Array:
    """Return values of an array's first axes with as many axes as the array."""
    return of_rows.reshape(*of_rows.shape, *(1,) * (array.ndim - of_rows.ndim))


def _flat(tiles: jax.Array) -> jax.Array:
    return tiles.reshape(len(tiles), -1)


def _product(rows: jax.Array, name: str, arrays: Mapping[str, Stored], sizes: jax.Array) -> jax.Array:
    """Multiply rows by the weight of their expert, and add (rows A) B of that expert if it has an adapter.

    Args:
        rows: [N, in], sorted by expert.
        sizes: int32[E], the rows of each expert.

    Returns:
        [N, out] in the rows' dtype.
    """
    product = _grouped(rows, arrays[name], sizes, turned=arrays.get(f"{name}{TURNED}"))
    if f"{name}_lora_a" not in arrays:
        return product
    a, b = arrays[f"{name}_lora_a"], arrays[f"{name}_lora_b"]
    # In the sum's dtype: a ragged product writes its result to memory, in float32 twice the bytes.
    delta = _grouped(_grouped(rows, a, sizes), b, sizes, product.dtype)
    return (product.astype(jnp.float32) + delta).astype(product.dtype)


def _grouped(
    rows: jax.Array, weight: Stored, sizes: jax.Array, dtype: Any = None, turned: jax.Array | None = None
) -> jax.Array:
    """Multiply each row by its own expert's weight.

    Args:
        weight: [E, in, ...], the outputs' axes last.
        dtype: of the result, by default the weight's.
        turned: a frozen weight as [E, out, in], if it is at hand.
    """

    def compute(rows: jax.Array, weight: jax.Array) -> jax.Array:
        return _ragged(dtype or weight.dtype, rows, weight.reshape(*weight.shape[:2], -1), turned, sizes)

    if not hasattr(weight, "qvalue"):
        return compute(rows, weight)
    return dequantized(compute, rows, weight, rows.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged(
    dtype: Any, rows: jax.Array, weight: jax.Array, turned: jax.Array | None, sizes: jax.Array
) -> jax.Array:
    """Compute `jax.lax.ragged_dot` with `outer` as the gradient of the weight.

    Args:
        dtype: of the result.
        rows: [N, in], sorted by expert.
        weight: [E, in, out].
        turned: a frozen weight as [E, out, in], for the gradient of the rows. None to turn it there.
        sizes: int32[E], the rows of each expert.

    Returns:
        [N, out].
    """
    return _dot(rows, weight, sizes, dtype)


def _dot(rows: jax.Array, weight: jax.Array, sizes: jax.Array, dtype: Any) -> jax.Array:
    rows, weight = _operands(rows, weight)
    wide = jnp.promote_types(rows.dtype, dtype)
    return jax.lax.ragged_dot(rows, weight, sizes, preferred_element_type=wide).astype(dtype)


def _operands(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the operands of a product in one dtype.

    A TPU rounds the operands of a float32 product to bfloat16, unless a precision is set. So they become
    bfloat16 at once: a ragged product reads its operands from memory, and they take half of it.
    """
    wide = jnp.promote_types(left.dtype, right.dtype)
    if wide == jnp.float32 and _on_tpu() and jax.config.jax_default_matmul_precision is None:
        wide = jnp.dtype(jnp.bfloat16)
    return left.astype(wide), right.astype(wide)


def _ragged_forward(dtype: Any, rows: Any, weight: Any, turned: Any, sizes: Any) -> tuple[jax.Array, Any]:
    """Keep only what the needed gradients use: for a frozen weight no rows."""
    back = (weight.value, None) if turned is None else (None, turned.value)
    kept = rows.value if weight.perturbed else None, back if rows.perturbed else (None, None), sizes.value
    of_both = jnp.zeros(0, rows.value.dtype), jnp.zeros(0, weight.value.dtype)
    return _ragged(dtype, rows.value, weight.value, None, sizes.value), (*kept, *of_both)


def _ragged_backward(
    dtype: Any, kept: Any, gradient: jax.Array
) -> tuple[jax.Array | None, jax.Array | None, None, None]:
    rows, (weight, turned), sizes, like, like_weight = kept
    if weight is not None:
        turned = weight.swapaxes(1, 2)
    to_rows = None if turned is None else _dot(gradient, turned, sizes, like.dtype)
    to_weight = None
    if rows is not None:
        rows, of_out = _operands(rows, gradient)
        to_weight = outer(rows, of_out, sizes, on_tpu=_on_tpu()).astype(like_weight.dtype)
    return to_rows, to_weight, None, None


_ragged.defvjp(_ragged_forward, _ragged_backward, symbolic_zeros=True)


def outer(
    rows: jax.Array, gradient: jax.Array, sizes: jax.Array, on_tpu: bool, interpret: bool = False
) -> jax.Array:
    """Return each expert's rows^T gradient.

    On TPUs XLA multiplies all rows once per expert; megablox's kernel reads each row once.

    Args:
        rows: [N, in], sorted by expert.
        gradient: [N, out].
        sizes: int32[E], the rows of each expert.
        on_tpu: whether to use the kernel, which takes whole tiles of rows.
        interpret: run the kernel without a TPU.

    Returns:
        float32[E, in, out].
    """
    if on_tpu and (tile := _kernel_tile(rows.shape[0])):
        from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

        tiling = (tile, *TILE[1:])
        return tgmm(rows.T, gradient, sizes, jnp.float32, tiling=tiling, interpret=interpret)
    return jax.lax.ragged_dot_general(rows, gradient, sizes, BY_ROWS, preferred_element_type=jnp.float32)


def _kernel_tile(rows: int) -> int:
    """Return the rows of a tile of `outer`'s kernel, 0 if it cannot divide so many rows."""
    tile = math.gcd(rows, TILE[0])
    return tile if tile >= LEAST_TILE else 0


def _on_tpu() -> bool:
    return on_tpu(mesh_in_scope())


@jax.custom_vjp
def _take(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Take row order[i] // K of x as row i, where each row of x is taken K times.

    `inverse` is the inverse permutation of `order`. It makes the gradient a gather too; the gradient of
    indexing would be a scatter.

    Args:
        x: [N, ...].
        order, inverse: int32[N * K].
    """
    return x[order // (order.size // x.shape[0])]


def _take_forward(x: jax.Array, order: jax.Array, inverse: jax.Array) -> tuple[jax.Array, Any]:
    return _take(x, order, inverse), (inverse, x.shape)


def _take_backward(kept: Any, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    inverse, (rows, *width) = kept
    return gradient[inverse].reshape(rows, -1, *width).sum(1), None, None


_take.defvjp(_take_forward, _take_backward)
