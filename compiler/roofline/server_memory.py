"""Count what vLLM-TPU holds on each device: the weights, and the key/value cache.

The placement of each array is from the sources of tpu-inference. Its JAX models split heads, features and the
vocabulary over the devices of a replica, and keep norms and other small arrays whole on each. vLLM's own
models on torchax do the same, and hold a few arrays more (`_torch`). docs/planning.md compares the sizes with
logs.

The layout of the cache is from the same sources. In each layer, the keys and values of a token are
interleaved in slots: one key slot and one value slot for every head that the device stores. This holds even
if the checkpoint has one projection for both, because keys and values are normalized and rotated differently.
Slots are padded to the 32 bits of a word, and heads to 128 numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recipec.compiler import catalog
from recipec.compiler.catalog import facts_of
from recipec.compiler.errors import ArtifactError
from recipec.compiler.roofline.server_results import Cache, Weights
from recipec.compiler.roofline.training_step import multiplies
from recipec.compiler.vllm import features
from recipec.compiler.vllm.blocks import SMALL_HEAD, batched_kernel, decode_blocks, default_block, read_tokens
from recipec.compiler.vllm.flags import by_flag
from recipec.compiler.wording import split_layer
from recipec.runtime.model.families.family import EXPERTS, HYBRID, LINEAR, Parameter
from recipec.runtime.model.families.vision import PATH as TOWER

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.runtime.model.families.description import Latent
    from recipec.spec.language import Serve

LANES = 128
"""A head's size is padded to a multiple of this. Heads of 64 are not padded: they have their own kernel."""
VOCABULARY = 64
"""vLLM's own models pad the vocabulary to a multiple of this."""

VISION = "vision tower"


@dataclass(frozen=True)
class Tower:
    """The vision tower of a model, and its projection to the text model.

    Attributes:
        split: numbers that are split over the devices.
        whole: numbers that are whole on each device.
        apart: what is whole, in words.
    """

    split: int
    whole: int
    apart: str


def _encoder(
    text: int, hidden: int, intermediate: int, layers: int, heads: int, head_dim: int, positions: int
) -> Tower:
    """Return a vision transformer on patches of 16 x 16 pixels in three colors.

    Args:
        text: hidden size of the text model.
        positions: rows of its position table, of which there is one for each coordinate.
    """
    layer = 4 * hidden * heads * head_dim + 3 * hidden * intermediate
    return Tower(
        layers * layer + 3 * 16**2 * hidden + hidden * text, 2 * positions * hidden, "positions whole"
    )


SMALL, LARGE = (768, 3072, 16, 12, 64, 10_240), (1152, 4304, 27, 16, 72, 10_240)
TOWERS = {
    "Gemma 4 E2B": _encoder(1536, *SMALL),
    "Gemma 4 E4B": _encoder(2560, *SMALL),
    # No encoder: patches of 48 x 48 pixels are projected, and what follows is whole on each device.
    "Gemma 4 12B": Tower(3 * 48**2 * 3840, (2 * 1120 + 3840 + 640) * 3840, "projection whole"),
    "Gemma 4 26B-A4B": _encoder(2816, *LARGE),
    "Gemma 4 31B": _encoder(5376, *LARGE),
}
"""Vision towers by the model's title, from the published config.json. At TP 8, the tower of the 31B takes
0.18 GB a chip, as in the compiled server."""
HEARING = ("Gemma 4 E2B", "Gemma 4 E4B")
"""Models with an audio tower, which tpu-inference's JAX models leave out."""

KEYS = re.compile(r"attn\.(k_proj|v_proj)\.w$")
ATTENTION = re.compile(r"attn\.(q_proj|q_b_proj|kv_b_proj|o_proj)\.w$")
MIXERS = {
    "gated delta nets": re.compile(r"attn\.(in_proj_\w+|out_proj)\.(kernel|w)$"),
    "Mamba mixers": re.compile(r"mamba\.(in_proj|x_proj|dt_proj|out_proj)\.(kernel|w)$"),
    "short convolutions": re.compile(r"conv\.(in_proj|out_proj)\.kernel$"),
}
MLP = re.compile(r"\.mlp\.(shared\.)?\w+_proj\.kernel$|\.mlp\.c_\w+\.kernel$")


def runs_jax_model(program: Program) -> bool:
    """Return whether tpu-inference's own JAX model is used, rather than vLLM's model on torchax."""
    return features.runs_jax_model(program.config, program.recipe.server)


def _config(program: Program) -> Mapping[str, Any]:
    return features.served_config(program.config, program.recipe.server)


def padded_head(head_dim: int) -> int:
    """Return the padded size of a head in the cache, and in the weights of JAX models."""
    return head_dim if head_dim == LANES // 2 else -(-head_dim // LANES) * LANES


def _weight_head(program: Program, head_dim: int) -> int:
    """Return the size of a head in the weights."""
    return padded_head(head_dim) if runs_jax_model(program) else head_dim


def layer_head_dim(architecture: Any, layer: int) -> int:
    """Return the head size of a layer. Gemma 4's global layers have a different size than the others."""
    head_dim_of = getattr(architecture, "layer_head_dim", None)
    return head_dim_of(layer) if head_dim_of else int(architecture.head_dim)


def latent_of(architecture: Any) -> Latent | None:
    """Return the sizes of latent attention, None for other attention."""
    latent: Latent | None = getattr(architecture, "latent", None)
    return latent


def pair_flops(architecture: Any, layer: int) -> float:
    """Return the FLOPs of attention for a query and a key, in all heads of a layer: of scores and of values.

    With latent attention, a server's kernel computes them from the compressed keys and values."""
    latent = latent_of(architecture)
    if latent is None:
        return 4.0 * architecture.heads(layer) * layer_head_dim(architecture, layer)
    return 2.0 * architecture.heads(layer) * (2 * latent.keys + latent.turned)


def shares_cache(architecture: Any, layer: int) -> bool:
    """Return whether a layer reads the keys and values of an earlier one."""
    shares_kv = getattr(architecture, "shares_kv", None)
    return bool(shares_kv and shares_kv(layer))


def keys_serve_as_values(architecture: Any, layer: int) -> bool:
    """Return whether a layer has one projection for keys and values."""
    keys_as_values = getattr(architecture, "keys_as_values", None)
    return bool(keys_as_values and keys_as_values(layer))


def weights(program: Program) -> list[Weights]:
    """Return the weights of one device, with arrays of one kind and placement summed.

    The scales of quantization are left out; they take less than 0.1 %.
    """
    lines: dict[tuple[str, int, str], list[Weights]] = {}
    for weight in (*_text(program), *_vision(program)):
        lines.setdefault((weight.name, weight.number_bytes, weight.placed), []).append(weight)
    figures = ("bytes", "read_bytes", "per_token", "per_sample")
    return [
        Weights(*key, *(sum(getattr(weight, name) for weight in group) for name in figures))
        for key, group in lines.items()
    ]


def missing(program: Program) -> str | None:
    """Return a sentence about parts of the checkpoint that `weights` does not count, or None."""
    more, model = facts_of(program.family.name).served.towers, program.recipe.model.id
    known, title = catalog.entry_of(model), catalog.title(model)
    text_alone = known is not None and "text_config" not in known["config"]
    if more is None or text_alone or title in TOWERS:
        heard = title in HEARING and not runs_jax_model(program)
        return "vLLM's own model has an audio tower, which is not counted" if heard else None
    return f"multimodal checkpoints have {more} whose size is not known here: it is not counted"


def _text(program: Program) -> Iterator[Weights]:
    """Yield the weights of each array of the text model.

    This includes arrays that a checkpoint does not have: key and value projections of layers that share
    another layer's cache, which are unused but in every layer, and what vLLM's own models add (`_torch`).
    """
    serve, merge = program.recipe.server, program.recipe.merge
    plain = 4 if str(serve.extra_args.get("dtype", "")) in ("float32", "float") else 2
    linear = 1 if serve.quantization or merge.quantization else plain
    by_server = 1 if serve.quantization else plain  # for arrays that merge.quantization does not change
    tied = not any(parameter.path == "lm_head.w" for parameter in program.parameters)
    copied = tied and not runs_jax_model(program) and not features.head_is_embedding(_config(program))
    for parameter in program.parameters:
        path, numbers, tp = parameter.path, float(math.prod(parameter.shape)), serve.tensor_parallel_size
        split = f"split over {tp}" if tp > 1 else "whole"
        if path.startswith(f"{TOWER}."):
            continue  # `_vision` has these
        if path.startswith("embedder.") and path.endswith("input_embedding"):
            yield _embedding(parameter, plain, tp, split, tied and not copied)
            if copied and path == "embedder.input_embedding":
                local = _rows(parameter, math.lcm(VOCABULARY, tp)) / tp
                yield Weights("output head", plain, split, local * plain, local * plain, 0.0, local)
        elif path == "lm_head.w":
            alone = facts_of(program.family.name).served.whole_head and runs_jax_model(program) and tp > 1
            local, placed = (numbers, "whole on each") if alone else (numbers / tp, split)
            yield Weights("output head", plain, placed, local * plain, local * plain, 0.0, local)
        elif KEYS.search(path):
            yield _keys(program, parameter, linear, tp)
        elif ATTENTION.search(path):
            # Each of these arrays has one axis of the head size.
            head = layer_head_dim(program.architecture, _layer(path))
            padded = head if latent_of(program.architecture) else _weight_head(program, head)
            local = numbers * padded / head / tp
            yield _used("attention", linear, split, local)
        elif name := next((name for name, pattern in MIXERS.items() if pattern.search(path)), ""):
            yield _used(name, by_server, split, numbers / tp)
        elif MLP.search(path):
            yield _used("MLP", linear, split, numbers / tp)
        elif EXPERTS.search(path.removesuffix("_bias")):
            size = _padded_experts(parameter, serve) * by_server / tp
            experts, used = program.architecture.routing
            matrix = numbers * used / experts / tp if multiplies(parameter) else 0.0
            yield Weights("experts", by_server, split, size, size, matrix, 0.0)
        else:
            size = numbers * plain
            matrix = numbers if multiplies(parameter) else 0.0
            placed = "whole on each" if tp > 1 else "whole"
            yield Weights("norms and small projections", plain, placed, size, size, matrix, 0.0)
    for layer in range(program.architecture.num_layers):
        if shares_cache(program.architecture, layer):
            heads, head = program.architecture.kv_heads(layer), layer_head_dim(program.architecture, layer)
            size = 2.0 * heads * _weight_head(program, head) * program.architecture.hidden_size
            local, placed = _split_keys(program, size, heads, serve.tensor_parallel_size)
            yield Weights("keys and values, not used", linear, placed, local * linear, 0.0, 0.0, 0.0)
    if not runs_jax_model(program):
        yield from _torch(program, linear, plain)


def _torch(program: Program, linear: int, plain: int) -> Iterator[Weights]:
    """Yield what vLLM's own models store in addition to the checkpoint: values of layers whose keys serve as
    values, and sines and cosines of each kind of rotation for all of the model's positions.

    Args:
        linear, plain: bytes of a number in linear layers and elsewhere.
    """
    a: Any = program.architecture
    tp = program.recipe.server.tensor_parallel_size
    for layer in range(a.num_layers):
        if keys_serve_as_values(a, layer):
            size = float(a.hidden_size * a.kv_heads(layer) * layer_head_dim(a, layer))
            local, placed = _split_keys(program, size, a.kv_heads(layer), tp)
            yield _used("keys and values", linear, placed, local)
    rows = catalog.positions_of(program.config, program.model_origin)
    if rows is not None and features.implementation(_config(program)) != "transformers":
        placed = "whole on each" if tp > 1 else "whole"
        rotations = {rope: rope.turned(a.turned_dim(kind)) for kind, rope in getattr(a, "ropes", ())}
        for turned in rotations.values():
            yield Weights("rotary tables", plain, placed, float(rows * turned * plain), 0.0, 0.0, 0.0)


def _padded_experts(parameter: Parameter, serve: Serve) -> float:
    """Return the numbers of an array of experts in memory, over all devices of a replica.

    tpu-inference pads the gate and up projections on each device to a multiple of 128 features, and leaves
    the down projection as it is. With expert parallelism, a device has whole experts.
    """
    *others, width = parameter.shape
    if not parameter.path.removesuffix("_bias").endswith("gate_up"):
        return float(math.prod(parameter.shape))
    parts = 1 if by_flag(serve.extra_args).get("enable-expert-parallel") else serve.tensor_parallel_size
    return float(math.prod(others) * -(-width // (parts * LANES)) * parts * LANES)


def _used(name: str, number_bytes: int, placed: str, local: float) -> Weights:
    """Return the weight of a linear layer, of which one device holds `local` numbers."""
    return Weights(name, number_bytes, placed, local * number_bytes, local * number_bytes, local, 0.0)


def _embedding(parameter: Parameter, number_bytes: int, tp: int, split: str, tied: bool) -> Weights:
    """Return an embedding, whose rows are padded to a multiple of the devices.

    Looking up a row reads almost nothing. The token embedding is read whole if it is also the output head.
    """
    local = _rows(parameter, tp) / tp
    head = tied and parameter.path == "embedder.input_embedding"
    read = local * number_bytes if head else 0.0
    return Weights("embeddings", number_bytes, split, local * number_bytes, read, 0.0, local if head else 0.0)


def _rows(parameter: Parameter, multiple: int) -> float:
    """Return the numbers of an embedding whose rows are padded to a multiple."""
    rows, *row = parameter.shape
    return float(-(-rows // multiple) * multiple * math.prod(row))


def _keys(program: Program, parameter: Parameter, number_bytes: int, tp: int) -> Weights:
    """Return a key or value projection, which is split by heads if the devices divide the heads.

    Otherwise, Gemma 4's JAX model and vLLM's own models split each head over all devices. Other JAX models
    give each device a head, so that several devices hold the same head.
    """
    layer, numbers = _layer(parameter.path), float(math.prod(parameter.shape))
    heads, head = program.architecture.kv_heads(layer), layer_head_dim(program.architecture, layer)
    numbers *= _weight_head(program, head) / head
    local, placed = _split_keys(program, numbers, heads, tp)
    return _used("keys and values", number_bytes, placed, local)


def _split_keys(program: Program, numbers: float, heads: int, tp: int) -> tuple[float, str]:
    """Return how many of a key or value projection's numbers one device holds, and how they are split."""
    if tp == 1:
        return numbers, "whole"
    if heads % tp == 0:
        return numbers / tp, f"split over {tp}"
    if facts_of(program.family.name).served.split_heads or not runs_jax_model(program):
        return numbers / tp, f"each of {heads} heads split over {tp}"
    return numbers / heads * -(-heads // tp), f"{heads} heads repeated over {tp}"


def _layer(path: str) -> int:
    layer = split_layer(path)[1]
    assert layer is not None
    return layer


def _vision(program: Program) -> Iterator[Weights]:
    """Yield the vision tower and its projection, in bfloat16. Text requests read none of it."""
    tower = TOWERS.get(catalog.title(program.recipe.model.id))
    if tower is None and program.architecture.vision is not None:
        arrays = program.architecture.vision.parameters()
        tower = Tower(0, sum(math.prod(array.shape) for array in arrays), "whole on each")
    if tower is None or catalog.architecture_class(_config(program)).endswith("ForCausalLM"):
        return
    tp = program.recipe.server.tensor_parallel_size
    placed = f"split over {tp}, {tower.apart}" if tp > 1 else "whole"
    yield Weights(VISION, 2, placed, 2 * (tower.split / tp + tower.whole), 0.0, 0.0, 0.0)


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
        slot = slot_bytes(device_heads, head_dim, number_bytes)
        out.append(
            Cache(
                name="all" if len(layers) == a.num_layers else "local" if window else "global",
                layers=len(storing),
                shared=len(layers) - len(storing),
                window=window,
                heads=heads,
                head_dim=head_dim,
                device_heads=device_heads,
                bytes_per_token=len(storing) * slot,
                unpadded_bytes_per_token=len(storing) * 2 * heads * head_dim * number_bytes / tp,
                read_bytes_per_token=len(layers) * slot,
            )
        )
    return [*out, *_states(program)]


def _latents(program: Program) -> Cache:
    """Return the compressed keys and values of latent attention, whole on each device. tpu-inference pads
    the part that rotates and the part that does not to multiples of 128."""
    a, number_bytes = program.architecture, DTYPES[program.recipe.server.kv_cache_dtype][1]
    latent = latent_of(a)
    assert latent is not None
    token = sum(-(-part // LANES) * LANES for part in (latent.keys, latent.turned)) * number_bytes
    return Cache(
        name=LATENT,
        layers=a.num_layers,
        shared=0,
        window=None,
        heads=1,
        head_dim=latent.keys + latent.turned,
        device_heads=1,
        bytes_per_token=a.num_layers * token,
        unpadded_bytes_per_token=a.num_layers * (latent.keys + latent.turned) * number_bytes,
        read_bytes_per_token=a.num_layers * token,
    )


def _states(program: Program) -> list[Cache]:
    """Return the states of gated delta nets or Mamba mixers: a float32 matrix for each head, and the
    convolution's past inputs. Short convolutions have only these."""
    a, tp = program.architecture, program.recipe.server.tensor_parallel_size
    state = a.state
    if state is None:
        return []
    layers, heads = a.layer_types.count(LINEAR) + a.layer_types.count(HYBRID), -(-state.heads // tp)
    state_bytes = heads * state.width * state.head_dim * 4 + state.convolved / tp * (state.taps - 1) * 2
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
        bytes_per_sequence=layers * state_bytes,
    )
    return [kept]


CACHED_STATES = 8
"""States that tpu-inference keeps for each request, in order to find cached prefixes."""


def states_per_request(serve: Serve) -> tuple[int, int]:
    """Return the states that each request needs, and those that are set aside for it.

    With speculative decoding, tpu-inference caches no prefixes of models with states.
    """
    speculative = by_flag(serve.extra_args).get("speculative-config")
    if speculative is not None:
        drafted = speculative.get("num_speculative_tokens") if isinstance(speculative, Mapping) else None
        needed = 1 + (drafted if isinstance(drafted, int) else 0)
        return needed, needed
    return (2, CACHED_STATES) if serve.prefix_caching else (1, 1)


def state_pool_bytes(kinds: Sequence[Cache], serve: Serve, available: float) -> float:
    """Return the bytes of each device that tpu-inference sets aside for states of gated delta nets or Mamba
    mixers in a model with attention; 0 for other models.

    The pool is for max_num_seqs requests. If fewer requests of max_model_len fit next to it, it shrinks to as
    many, but keeps what max_num_seqs requests need.

    Args:
        available: bytes of a device that the weights leave.
    """
    state, token = (
        sum(getattr(kind, name) for kind in kinds) for name in ("bytes_per_sequence", "bytes_per_token")
    )
    if not state or not token:
        return 0.0
    (needed, kept), requests = states_per_request(serve), serve.max_num_seqs
    pool, longest = requests * kept + 1, serve.max_model_len * token
    if kept > needed and available - pool * state < requests * longest:
        served = min(requests, int(available // (longest + kept * state)))
        pool = max(requests * needed, served * kept) + 1
    return float(pool * state)


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
