"""The size of the key/value cache as vLLM-TPU lays it out on each device.

The layout is from the sources of tpu-inference. In each layer, the keys and values of a token are interleaved
in slots: one key slot and one value slot for every head that the device stores. This holds even if the
checkpoint has one projection for both, because keys and values are normalized and rotated differently. Slots
are padded to the 32 bits of a word, and heads to 128 numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from recipec.compiler.errors import ArtifactError
from recipec.compiler.plan.roofline.results import Cache
from recipec.compiler.plan.roofline.weights import (
    LANES,
    latent_of,
    layer_head_dim,
    padded_head,
    runs_jax_model,
    shares_cache,
)
from recipec.compiler.serving.blocks import (
    SMALL_HEAD,
    batched_kernel,
    decode_blocks,
    default_block,
    read_tokens,
)
from recipec.runtime.model.families.base import HYBRID, LINEAR

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.spec.language import Serve

WORD_BYTES = 4
LATENT = "latent"
"""The name of a cache of compressed keys and values."""
DTYPES: Mapping[str, tuple[str, int]] = {
    "auto": ("bfloat16", 2),
    "bfloat16": ("bfloat16", 2),
    "fp8": ("float8_e4m3fn", 1),
    "fp8_e4m3": ("float8_e4m3fn", 1),
    "fp8_e5m2": ("float8_e5m2", 1),
}
"""By serve.kv_cache_dtype: the type that JAX stores, and its bytes."""


def slot_bytes(heads: int, head_dim: int, number_bytes: int) -> int:
    """Return the bytes of a token's keys and values in one layer on one device.

    Args:
        heads: heads that the device stores.
        head_dim: size of a head.
        number_bytes: 2 for bfloat16, 1 for eight bits.
    """
    # Heads of 64 have key and value in one slot.
    packing = WORD_BYTES // number_bytes
    slots, lanes = (heads, 2 * SMALL_HEAD) if head_dim == SMALL_HEAD else (2 * heads, padded_head(head_dim))
    return -(-slots // packing) * packing * lanes * number_bytes


def caches(program: Program) -> list[Cache]:
    """Return the layers by kind: their window, and the number and size of the heads that they store."""
    a, serve = program.architecture, program.recipe.server
    if latent_of(a) is not None:
        return [_latents(program)]
    tp, number_bytes = serve.tensor_parallel_size, DTYPES[serve.kv_cache_dtype][1]
    kinds: dict[tuple[int | None, int, int], list[int]] = {}
    for layer in filter(a.scores, range(a.num_layers)):
        kinds.setdefault((a.window(layer), a.kv_heads(layer), layer_head_dim(a, layer)), []).append(layer)
    out = []
    for (window, heads, head_dim), layers in kinds.items():
        storing = [layer for layer in layers if not shares_cache(a, layer)]
        device_heads = -(-heads // tp)
        one = slot_bytes(device_heads, head_dim, number_bytes)
        out.append(
            Cache(
                name="all" if len(layers) == a.num_layers else "local" if window else "global",
                layers=len(storing),
                shared=len(layers) - len(storing),
                window=window,
                heads=heads,
                head_dim=head_dim,
                device_heads=device_heads,
                bytes_per_token=len(storing) * one,
                unpadded_bytes_per_token=len(storing) * 2 * heads * head_dim * number_bytes / tp,
                read_bytes_per_token=len(layers) * one,
            )
        )
    return [*out, *_states(program)]


def _latents(program: Program) -> Cache:
    """Return the compressed keys and values of latent attention, whole on each device. tpu-inference pads
    the part that rotates and the part that does not to multiples of 128."""
    a, number_bytes = program.architecture, DTYPES[program.recipe.server.kv_cache_dtype][1]
    latent = latent_of(a)
    assert latent is not None
    one = sum(-(-part // LANES) * LANES for part in (latent.keys, latent.turned)) * number_bytes
    return Cache(
        name=LATENT,
        layers=a.num_layers,
        shared=0,
        window=None,
        heads=1,
        head_dim=latent.keys + latent.turned,
        device_heads=1,
        bytes_per_token=a.num_layers * one,
        unpadded_bytes_per_token=a.num_layers * (latent.keys + latent.turned) * number_bytes,
        read_bytes_per_token=a.num_layers * one,
    )


def _states(program: Program) -> list[Cache]:
    """Return the states of gated delta nets or Mamba mixers: a float32 matrix for each head, and the
    convolution's past inputs. Short convolutions have only these."""
    a, tp = program.architecture, program.recipe.server.tensor_parallel_size
    state = a.state
    if state is None:
        return []
    layers, heads = a.layer_types.count(LINEAR) + a.layer_types.count(HYBRID), -(-state.heads // tp)
    one = heads * state.width * state.head_dim * 4 + state.convolved / tp * (state.taps - 1) * 2
    kept = Cache(
        name="linear",
        layers=layers,
        shared=0,
        window=None,
        heads=state.heads,
        head_dim=state.head_dim,
        device_heads=heads,
        bytes_per_token=0.0,
        unpadded_bytes_per_token=0.0,
        read_bytes_per_token=0.0,
        bytes_per_sequence=layers * one,
    )
    return [kept]


def windows_bound(program: Program, kinds: Sequence[Cache]) -> bool:
    """Return whether layers with a window keep only the window.

    tpu-inference's JAX models keep every token in every layer. vLLM's models on torchax keep only the window,
    unless heads differ in size between layers or vLLM's hybrid cache manager is switched off.
    """
    serve = program.recipe.server
    names = {str(name).replace("_", "-") for name, value in serve.extra_args.items() if value is not False}
    return (
        not runs_jax_model(program)
        and any(kind.window for kind in kinds)
        and len({padded_head(kind.head_dim) for kind in kinds}) == 1
        and "disable-hybrid-kv-cache-manager" not in names
    )


def sequence_bytes(kinds: Sequence[Cache], tokens: float, bounded: int | None) -> float:
    """Return the bytes of a sequence's cache on each device of its replica, without rounding up to blocks.

    Args:
        bounded: tokens of one step of the server, which layers with a window keep in addition to the window.
            None if these layers keep every token.
    """
    total = 0.0
    for kind in kinds:
        kept = tokens
        if bounded is not None and kind.window is not None:
            kept = min(tokens, kind.window - 1 + bounded)
        total += kind.bytes_per_token * kept + kind.bytes_per_sequence
    return total


def read_bytes(kinds: Sequence[Cache], context: float) -> float:
    """Return the bytes of a sequence's cache that a decode step reads on each device, only within windows."""
    tokens = sum(kind.read_bytes_per_token * min(context, kind.window or context) for kind in kinds)
    return tokens + 2 * sum(kind.bytes_per_sequence for kind in kinds)


def read_by_blocks(kinds: Sequence[Cache], serve: Serve, context: float) -> float:
    """Return the same in the decode kernel's blocks. A block that is partly before a window is read whole."""
    return sum(
        kind.read_bytes_per_token * read_tokens(context, kind.window, decode_block(kind, serve))
        + 2 * kind.bytes_per_sequence
        for kind in kinds
    )


def decode_block(kind: Cache, serve: Serve) -> int | None:
    """Return the tokens of the decode kernel's block, or None where it is not known and no block is skipped.

    Raises:
        ArtifactError: when the recipe's environment sets invalid sizes.
    """
    if batched_kernel(serve) or kind.head_dim == SMALL_HEAD or kind.name == LATENT:
        return None
    try:
        sizes = decode_blocks(serve)
    except ValueError as error:
        raise ArtifactError(f"serve.env: {error}", "write four, as in decode_block_sizes") from None
    if sizes is not None:
        return sizes[1]
    number_bytes = DTYPES[serve.kv_cache_dtype][1]
    return default_block(serve, kind.device_heads, padded_head(kind.head_dim), number_bytes)
