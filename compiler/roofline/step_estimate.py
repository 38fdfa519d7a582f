"""Estimate the memory of a training step on one device, without a compile.

A step holds

- its state: weights, adapters and the optimizer's state, and the weights in the layout of rollouts;
- the values that each layer keeps for its backward pass, which `remat.policy` chooses;
- the values of one layer that is computed again, and the logits of a chunk;
- the gathered output head, and copies of the layers' weights that wait to be gathered;
- gradients, in full fine-tuning;
- the code.

The sizes of the values follow from runtime/model/ and runtime/training/. A few constants describe what XLA
does beyond them. They are fitted to libtpu's figures, in recipes/estimates.json and docs/step-memory.json.
docs/planning.md has the errors of the estimate.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from recipec.compiler.lowering.assumed_pictures import masks_pictures, row_patches
from recipec.compiler.lowering.hardware import Accelerator
from recipec.compiler.lowering.libtpu import own_profile, profiles
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.sizes import BYTES
from recipec.compiler.pages.numbers import gib, percent
from recipec.compiler.roofline.rollout import kept_bytes
from recipec.compiler.roofline.training_step import STORED, bound, first_trained, rows, shapes, state_bytes
from recipec.compiler.wording import split_layer
from recipec.runtime.model.families.description import DecoderArchitecture
from recipec.runtime.model.families.family import EXPERTS, Spec, matrices
from recipec.runtime.model.partition_rules import shards
from recipec.runtime.training.objectives import OBJECTIVES

MARGIN, EXCESS = 0.03, 0.08
"""Shares of a device's memory: how far a recorded plan may exceed the estimate, and the estimate a plan."""

GATHERED = ("fsdp", "cp", "dcn")
"""Mesh axes over which a layer's weights are gathered before they are used."""

ASYNCHRONOUS = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
"""The flag of an XLA profile with which weights are gathered while other operations run."""

LANES = 128
"""Values in a row of a TPU's tile. Splash attention writes a token's logsumexp once for each of them. A
smaller last dimension of an array is padded to it."""

CHUNK_LOGITS, LEAST_CHUNKS, SMALL_LOGITS = 256 * 2**20, 8, 32 * 2**20
"""LOGITS_BYTES, LEAST_CHUNKS and SMALL_BYTES of runtime/training/losses.py, which imports JAX."""

TOWER_SCORES = 256 * 2**20
"""SCORES_BYTES of runtime/model/vision/parts.py, which imports JAX."""

DELTA_CHUNK, MAMBA1_CHUNK = 64, 32
"""CHUNK and MAMBA1_CHUNK of runtime/model/mixers.py: a state is kept for so many tokens."""

ROOM = 2
"""ROOM of runtime/model/expert_products.py: rows that a device has room for, relative to its own."""

DOTS = (
    *("stream", "attended", "sums", "middle", "heads", "compressed"),
    *("gate", "projected", "post_norms"),
)
"""What save_dots keeps. Of queries, keys and values with norms, it keeps what the norms read."""

KEPT: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "save_dots": DOTS,
    "save_attention": ("stream", "attended", "sums"),
    "block": ("stream", "middle", "normed"),
    "decoder": ("stream",),
    "offload_dots": DOTS,
}
"""What each policy keeps of a layer, by the names of `layer_values`; None for everything but "normed".

offload_dots keeps what save_dots does: a chip's link to its host is so slow that, when the backward pass
begins, most of it still waits (Qwen3 8B and 14B on v6e, by libtpu's schedules)."""

ACTIVATED_AGAIN = frozenset(("v5e", "tpu7x"))
"""Generations on which XLA computes "activated" twice rather than keep it, if only adapters are trained: seen
in the schedules of 11 models. On v5p and v6e it keeps it."""

PASSING = ("normed", "exchanged")
"""Values that no policy but "block" keeps."""

RECOMPUTING = frozenset(("save_attention", "block", "decoder", "offload_dots"))
"""Policies whose backward pass computes the products of a layer again."""

WORK = {
    "layer": 0.6,
    "feed_forward": 0.5,
    "state": 1.5,
    "logits": 1.5,
    "gathered": 0.5,
    "fused": 2.0,
    "experts": 2.0,
}
"""Fitted: what is held while one layer is computed again. "layer" is relative to the values of the layer;
"feed_forward" and "state" are added for its feed-forward block and for what carries a state. "logits" is
relative to the logits of a chunk. The others are relative to one layer's gathered weights: all of them, those
of several projections in one array, which are copied into another layout, and experts."""

FILLED = 0.94
"""Over several slices, gathered weights stay until the backward pass, as far as this share of the memory
allows: seen in a whole plan, and in one of four layers."""

GRADIENTS = 0.75
"""Fitted: the share of the weights' float32 gradients that is held at the peak of full fine-tuning."""

RELAID = 4
"""Float32 arrays of the optimizer that are copied for a trained embedding or head whose last dimension on a
device is no multiple of LANES: the master weight, two moments and the accumulated gradient."""

EXPERT_ADAPTERS = 6
"""Float32 copies of the experts' adapters, padded to LANES, next to gathered experts."""


@dataclass(frozen=True)
class Need:
    """Bytes that one device needs for a step.

    Attributes:
        state: weights, adapters and the optimizer's state.
        total: of the whole step.
        most: `total` and MARGIN of the device's memory, which no recorded plan of docs/planning.md exceeds.
        least: `total` without EXCESS of the device's memory, which no recorded plan is below.
    """

    state: float
    total: float
    most: float
    least: float


def need(program: Program) -> Need:
    """Estimate the memory of a program's step; on a CPU, only of its state.

    The recipe's `remat.policy` and `model.attention` are resolved: not "auto".
    """
    state = state_bytes(program) + kept_bytes(program)
    accelerator = program.accelerator
    if accelerator.platform == "cpu":
        return Need(state, state, state, state)
    work = max(sum(temporaries(program).values()), tower_bytes(program)) + picture_bytes(program)
    work += tower_kept(program)
    total = state + work + code(program)
    available = accelerator.hbm_bytes_per_device
    least = max(state, total - EXCESS * available)
    return Need(state, total, total + MARGIN * available, least)


def fits(accelerator: Accelerator, needed: float) -> bool:
    """Return whether a step of `needed` bytes fits a device. CPU devices share the host's memory."""
    available = accelerator.hbm_bytes_per_device
    return not available or needed <= available


def layer_values(program: Program) -> list[dict[str, float]]:
    """Return the bytes per token of the values that each layer's backward pass reads, over all devices.

    stream: the layer's input.
    heads: queries, keys and values as attention reads them.
    gathered_heads: keys and values that attention reads from other devices of cp.
    projected_heads: queries, keys and values before their norms.
    compressed: latent queries, keys and values, and what is made of them.
    attended, sums: the output of attention or of a state, and attention's logsumexp.
    probabilities: of attention dot.
    gate: of attention's output; of a layer with a state also its projections.
    state: float32 values of a layer with a state: its inputs, what the tokens of a chunk see of each other,
        the state before each chunk, and of Mamba the two factors of its output.
    middle: the stream after attention.
    normed: the inputs of both blocks.
    projected, activated: the feed-forward block's projections, and the last one's input.
    routed: the same of the chosen experts, and their outputs; over ep only their inputs.
    exchanged: the rows of the experts on this device, and their gradients, while a layer is computed over ep.
    post_norms: outputs of both blocks, if they are normalized.
    own: of a layer's own input.
    """
    a, size = program.architecture, BYTES[program.recipe.model.dtype]
    if not isinstance(a, DecoderArchitecture):
        return _from_products(program)
    numbers = LANES if _wide_sums(program) else LANES // 16
    return [_layer_values(program, a, layer, size, numbers) for layer in range(a.num_layers)]


def _layer_values(
    program: Program, a: DecoderArchitecture, layer: int, size: int, numbers: int
) -> dict[str, float]:
    """Return `layer_values` of one layer.

    Args:
        size: bytes of a number.
        numbers: how often attention's logsumexp of a head and token is kept.
    """
    d = a.hidden_size
    parts, out = a.parts(layer), {"stream": size * d, "normed": 2.0 * size * d}
    if parts != ("mlp",):
        out["middle"] = size * d
    if "attention" in parts:
        out |= _attention(program, a, layer, numbers)
    if "delta" in parts and (delta := a.delta) is not None:
        values, keys = delta.value_heads * delta.value_dim, delta.key_heads * delta.key_dim
        states = values * delta.key_dim / DELTA_CHUNK
        by_chunk = 2 * keys + values + 3 * DELTA_CHUNK * delta.value_heads
        out["state"] = 4.0 * (_padded(by_chunk, DELTA_CHUNK) + states)
        out["gate"] = size * (2 * delta.features + values)
        out["attended"] = size * values
    if "mamba" in parts and (mamba := a.mamba) is not None:
        chunk = MAMBA1_CHUNK if mamba.rank else DELTA_CHUNK
        within = 0 if mamba.rank else 3 * chunk * mamba.heads
        by_chunk = 2 * (mamba.inner + mamba.groups * mamba.state) + within
        gated, states = 2 * mamba.inner, mamba.inner * mamba.state / chunk
        out["state"] = 4.0 * (_padded(by_chunk, chunk) + gated + states)
        out["gate"] = out.get("gate", 0.0) + size * (sum(mamba.projected) + mamba.convolved)
        out["attended"] = out.get("attended", 0.0) + size * mamba.inner
    if "conv" in parts:
        out["gate"] = size * 5.0 * d
    if "mlp" in parts:
        out |= _feed_forward(a, layer, size, program.recipe.mesh.axes.get("ep", 1) > 1)
    if a.per_layer_input:
        out["own"] = size * 3.0 * a.per_layer_input
    return out


def _padded(numbers: float, last: int) -> float:
    """Return what arrays of so many numbers take, whose last dimension is `last`, in a TPU's tiles."""
    return numbers * -(-last // LANES) * LANES / last


def _attention(program: Program, a: DecoderArchitecture, layer: int, numbers: int) -> dict[str, float]:
    size = BYTES[program.recipe.model.dtype]
    n, k, h = a.num_heads, a.kv_heads(layer), a.layer_head_dim(layer)
    values = a.value_dim(layer)
    out: dict[str, float] = {"attended": size * n * values}
    if (latent := a.latent) is not None:
        out["heads"] = size * n * (2 * h + values)
        compressed = latent.keys + latent.turned + latent.queries
        out["compressed"] = size * (compressed + n * (latent.plain + latent.values))
    else:
        both = 0 if a.shares_kv(layer) else 2 * k * h
        out["heads"] = size * _padded(n * h + both, h)
        out["gathered_heads"] = size * both * (program.recipe.mesh.axes.get("cp", 1) - 1)
        normed = (n * h + both / 2) if a.qk_norm else 0
        out["projected_heads"] = size * (normed + (both / 2 if a.value_norm else 0))
    if a.output_gate or a.gate_apart:
        out["gate"] = size * 2.0 * n * values
    if program.recipe.model.attention == "splash":
        out["sums"] = 4.0 * n * numbers
    else:
        out["probabilities"] = size * n * program.recipe.data.max_length
    return out


def _feed_forward(a: DecoderArchitecture, layer: int, size: float, exchanged: bool) -> dict[str, float]:
    out = {}
    experts, both = a.experts_of(layer), 2 if a.gated else 1
    features = 0
    if experts is None or experts.added:
        features = a.mlp_features(layer)
    elif experts.shared:
        features = experts.shared
    if features:
        out = {"projected": size * both * features, "activated": size * features}
    if experts is not None:
        outputs = experts.latent or a.hidden_size
        chosen = size * experts.per_token
        out["routed"] = chosen * (both * experts.size + outputs)
        if exchanged:
            out["exchanged"] = ROOM * 2.0 * out["routed"]
            out["routed"] = chosen * outputs
    if a.places.after_mlp is not None:
        out["post_norms"] = size * 2.0 * a.hidden_size
    return out


def _from_products(program: Program) -> list[dict[str, float]]:
    """Return the values of layers of which only the products are known."""
    size, d = BYTES[program.recipe.model.dtype], program.architecture.hidden_size
    return [
        {
            "stream": size * d,
            "normed": size * 2.0 * d,
            "middle": size * d,
            "attended": size * layer.attended,
            "projected": size * sum(layer.products.values()),
        }
        for layer in shapes(program, program.recipe.data.max_length).layers
    ]


def _wide_sums(program: Program) -> bool:
    """Return whether XLA keeps attention's logsumexp as the kernel writes it, LANES times.

    It does so where the kernel's result waits for gathered weights, in all plans that were looked at.
    """
    if program.lora is None or not gathers(program):
        return False
    return _asynchronous(program) or program.recipe.remat.policy == "none"


def _asynchronous(program: Program) -> bool:
    """Return whether the step's flags let XLA gather weights while it computes."""
    asked = program.recipe.xla.profile
    used = own_profile(program.accelerator.generation) if asked == "auto" else asked
    return bool(profiles()[used].get(ASYNCHRONOUS))


def gathers(program: Program) -> bool:
    """Return whether matrices are gathered before they are used; rules can keep them whole on each device."""
    axes = program.recipe.mesh.axes
    if all(axes.get(axis, 1) == 1 for axis in GATHERED):
        return False
    matrices = [parameter.spec for parameter in program.parameters if len(parameter.shape) > 1]
    return any(axis in GATHERED and shards(axis, axes) > 1 for spec in matrices for axis in spec)


@dataclass(frozen=True)
class Weights:
    """Bytes of the layers' matrices on one device.

    Attributes:
        copied: of matrices that are gathered, as they are stored: this device's part. Of experts too.
        layer: of the largest layer's gathered matrices, without experts.
        fused: of `layer`, projections that are one array.
        experts: of the experts on this device.
        expert_layer: of the largest layer's experts, gathered, dequantized, or over ep in another layout.
        layers: of all layers' gathered matrices, without experts.
        all_experts: of all layers' gate and up projections of experts, gathered.
        relaid: of the gate and up projections of the experts on this device, where they are not gathered.
            Over ep, the copies of a layer are made when it is computed.
    """

    copied: float
    layer: float
    layers: float
    fused: float
    experts: float
    expert_layer: float
    all_experts: float
    relaid: float


def weights(program: Program) -> Weights:
    """Return the sizes of a program's matrices."""
    recipe, axes = program.recipe, program.recipe.mesh.axes
    size, quantized = BYTES[recipe.model.dtype], STORED[recipe.model.quantization]
    linear = matrices(program.family, program.architecture, program.parameters) if quantized else {}

    @functools.cache
    def split(spec: Spec) -> tuple[int, int]:
        """Return the parts of an array, and those that are left once it is gathered."""
        kept = math.prod(shards(axis, axes) for axis in spec if axis not in GATHERED)
        return math.prod(shards(axis, axes) for axis in spec), kept

    apart = axes.get("ep", 1) > 1
    copied = experts = all_experts = relaid = 0.0
    layers: defaultdict[int, float] = defaultdict(float)
    fused: defaultdict[int, float] = defaultdict(float)
    expert_layers: defaultdict[int, float] = defaultdict(float)
    for parameter in program.parameters:
        path, layer = split_layer(parameter.path)
        if layer is None or len(parameter.shape) < 2:
            continue
        stored = quantized if quantized and parameter.path in linear else size
        numbers = math.prod(parameter.shape)
        parts, kept = split(tuple(parameter.spec))
        copied += numbers * stored / parts * (parts > kept)
        if EXPERTS.search(path):
            experts += numbers * stored / parts
            if parts > kept or stored < size or apart:
                expert_layers[layer] += numbers * size / kept
            if path.endswith("gate_up"):
                all_experts += numbers * stored / kept * (parts > kept)
                relaid += numbers * stored / parts * (parts == kept and not apart)
        elif parts > kept:
            layers[layer] += numbers * stored / kept
            fused[layer] += numbers * stored / kept * ("gate_up" in path)
    return Weights(
        copied,
        max(layers.values(), default=0.0),
        sum(layers.values()),
        max(fused.values(), default=0.0),
        experts,
        max(expert_layers.values(), default=0.0),
        all_experts,
        relaid,
    )


def temporaries(program: Program) -> dict[str, float]:
    """Return the bytes of a step's temporaries on one device, by what they are."""
    a, recipe, axes = program.architecture, program.recipe, program.recipe.mesh.axes
    policy, size = recipe.remat.policy, BYTES[recipe.model.dtype]
    tokens = rows(program) * recipe.data.max_length / program.accelerator.devices
    layers = layer_values(program)
    kept = sum(_kept(program, values) for values in layers[first_trained(program) :])
    held = weights(program)
    out = {"kept": kept * tokens, "logits": WORK["logits"] * _chunk_logits(program)}
    if policy in RECOMPUTING:
        out["layer"] = max(map(_work, layers)) * tokens
    out["weights"] = WORK["gathered"] * held.layer + WORK["experts"] * held.expert_layer
    out["weights"] += WORK["fused"] * held.fused
    if gathers(program):
        out["head"] = _head(program) * a.vocab_size * a.hidden_size * size / axes.get("tp", 1)
    if program.lora is None:
        out["gradients"] = GRADIENTS * 4 * _local_numbers(program) + _relaid(program)
    elif _asynchronous(program):
        out["copies"] = held.copied + held.relaid
        if held.all_experts:
            out = _ahead(program, out, held)
    if axes.get("dcn", 1) > 1 and policy in RECOMPUTING:
        available = FILLED * program.accelerator.hbm_bytes_per_device
        room = available - state_bytes(program) - kept_bytes(program) - code(program) - sum(out.values())
        out["gathered layers"] = max(0.0, min(held.layers, room))
    return out


@dataclass(frozen=True)
class Mask:
    """What a step needs more because its attention mask depends on the pictures, by calculation.

    Attributes:
        share: more FLOPs of a step, relative to those with splash attention.
        scores: bytes of a layer's attention scores on one device, which splash attention does not store.
    """

    share: float
    scores: float

    def __str__(self) -> str:
        return (
            "the tokens of a picture see each other, so attention is dot in place of splash: "
            f"{percent(self.share)} more FLOPs a step, and {gib(self.scores)} of scores in each layer "
            "(estimates)"
        )


def mask_of_pictures(program: Program) -> Mask | None:
    """Return what `dot` attention costs in place of splash; None if the mask has no pictures in it."""
    if not masks_pictures(program) or program.accelerator.platform != "tpu":
        return None
    recipe, length = program.recipe, program.recipe.data.max_length
    model = recipe.model.model_copy(update={"attention": "splash"})
    other = replace(program, recipe=recipe.model_copy(update={"model": model}))
    share = bound(program, length).seconds / bound(other, length).seconds - 1
    heads = BYTES[recipe.model.dtype] * program.architecture.num_heads * length
    tokens = rows(program) * length / program.accelerator.devices
    return Mask(share, heads * tokens)


def picture_bytes(program: Program) -> float:
    """Return the bytes of a micro-batch's patches on one device, which are float32."""
    vision, patches = program.architecture.vision, row_patches(program)
    if vision is None:
        return 0.0
    return 4.0 * rows(program) * patches * vision.patch_features / program.data_parallel


def tower_bytes(program: Program) -> float:
    """Return the bytes of temporaries on one device while the vision tower computes, before the decoder does;
    0 without pictures.

    They are the stream and its norm, the inner features of a feed-forward block, the scores of a piece of the
    queries as logits and as weights, and a layer's gathered matrices.
    """
    vision, patches = program.architecture.vision, row_patches(program)
    if vision is None or not patches:
        return 0.0
    axes, size = program.recipe.mesh.axes, BYTES[program.recipe.model.dtype]
    on_device = rows(program) * patches / program.data_parallel
    if vision.layers is None:
        return size * on_device * 2.0 * vision.patch_features
    layers = vision.layers
    features = 6.0 * layers.hidden_size + 2.0 * layers.intermediate_size / axes.get("tp", 1)
    matrices = sum(float(math.prod(parameter.shape)) for parameter in layers.parameters(0, ""))
    return size * (on_device * features + 2.0 * matrices) + 2.0 * TOWER_SCORES


def tower_kept(program: Program) -> float:
    """Return the bytes on one device that a trained vision tower keeps for its backward pass; 0 for a frozen
    one. Unless nothing is recomputed, they are the inputs of its layers."""
    vision, patches = program.architecture.vision, row_patches(program)
    if vision is None or not patches or vision.layers is None or not program.trains_tower:
        return 0.0
    layers, size = vision.layers, BYTES[program.recipe.model.dtype]
    numbers = float(layers.hidden_size)
    if program.recipe.remat.policy == "none":
        heads = (2 * layers.num_heads + 2 * layers.num_kv_heads) * layers.head_dim
        numbers = 4.0 * layers.hidden_size + heads + 3.0 * layers.intermediate_size
    return size * rows(program) * patches / program.data_parallel * layers.count * numbers


def _ahead(program: Program, activations: dict[str, float], held: Weights) -> dict[str, float]:
    """Return the temporaries where the experts' weights are gathered before the layers run.

    This is a second peak, at the beginning of the step: nothing is kept yet. If nothing is recomputed, they
    stay until the backward pass.
    """
    if KEPT.get(program.recipe.remat.policy, ()) is None:
        return {**activations, "gathered experts": held.all_experts}
    numbers = sum(
        math.prod(shape)
        / math.prod(shards(axis, program.recipe.mesh.axes) for axis in spec)
        * LANES
        / shape[-1]
        for adapter in program.adapters
        for _, shape, spec in adapter.arrays
        if adapter.target.experts and shape[-1] < LANES
    )
    first = {
        "gathered experts": held.all_experts,
        "copies": held.copied,
        "experts' adapters": EXPERT_ADAPTERS * 4 * numbers,
        "weights": activations["weights"],
    }
    return max(activations, first, key=lambda parts: sum(parts.values()))


def _work(values: Mapping[str, float]) -> float:
    """Return the bytes per token that are held while a layer is computed again."""
    block = values.get("projected", 0.0) + values.get("activated", 0.0)
    whole = _of(values, None) - values.get("sums", 0.0) - values.get("gathered_heads", 0.0)
    more = WORK["state"] * values.get("state", 0.0) + values.get("exchanged", 0.0)
    return WORK["layer"] * whole + WORK["feed_forward"] * block + more


def _local_numbers(program: Program) -> float:
    """Return the trained numbers on one device."""
    axes = program.recipe.mesh.axes

    @functools.cache
    def parts(spec: Spec) -> int:
        return math.prod(shards(axis, axes) for axis in spec)

    return sum(
        math.prod(parameter.shape) / parts(tuple(parameter.spec))
        for parameter in program.parameters
        if parameter.trainable
    )


def _relaid(program: Program) -> float:
    """Return the bytes of the optimizer's arrays that are copied into another layout."""
    axes, total = program.recipe.mesh.axes, 0.0
    for parameter in program.parameters:
        if not parameter.trainable or len(parameter.shape) < 2 or split_layer(parameter.path)[1] is not None:
            continue
        local = [
            size / shards(axis, axes) for size, axis in zip(parameter.shape, parameter.spec, strict=True)
        ]
        if local[-1] % LANES:
            total += RELAID * 4 * math.prod(local[:-1]) * LANES * math.ceil(local[-1] / LANES)
    return total


def _kept(program: Program, values: Mapping[str, float]) -> float:
    """Return the bytes per token, over all devices, that a step keeps of a layer."""
    recipe = program.recipe
    names = KEPT.get(recipe.remat.policy, ("stream",))
    out = _of(values, names)
    if names is None and program.lora is not None:
        simple = recipe.xla.profile == "none" and gathers(program)  # products are loops over gathered parts
        if program.accelerator.generation in ACTIVATED_AGAIN and not simple:
            out -= values.get("activated", 0.0)
        if recipe.mesh.axes.get("tp", 1) > 1:  # one array as wide as the stream more, in all plans with tp 2
            out += values["stream"]
    return out


def _of(values: Mapping[str, float], names: tuple[str, ...] | None) -> float:
    """Return the bytes per token of the values with these names; None for all but the blocks' inputs."""
    if names is None:
        return sum(size for name, size in values.items() if name not in PASSING)
    return sum(values.get(name, 0.0) for name in names)


def _head(program: Program) -> float:
    """Return how many copies of the gathered output head are held.

    An embedding that is also the head is gathered for both. A trained head has a gradient. Preferences
    compute log-probabilities with and without a gradient. This device's part is copied before it is gathered.
    """
    tied = bool(getattr(program.architecture, "tied", False))
    judged = bool(OBJECTIVES[program.recipe.train.objective].format)
    axes = program.recipe.mesh.axes
    device_part = 1 / math.prod(axes.get(axis, 1) for axis in GATHERED)
    return (2 if tied or judged or program.lora is None else 1) + device_part


def _chunk_logits(program: Program) -> float:
    """Return the bytes of a chunk's float32 logits on one device, as runtime/training/losses.py chooses."""
    axes = program.recipe.mesh.axes
    parallel = program.accelerator.devices / axes.get("tp", 1)
    whole = 4.0 * rows(program) * program.recipe.data.max_length / parallel
    whole *= program.architecture.vocab_size / axes.get("tp", 1)
    return min(CHUNK_LOGITS, max(SMALL_LOGITS, whole / LEAST_CHUNKS), whole)


CODE = {"v5e": 0.71, "v5p": 1.0, "v6e": 1.32, "tpu7x": 1.0}
"""Fitted: the code of a layer relative to v5p's, by generation."""

LAYER_CODE = 16.4 * 2**20
"""Fitted: bytes of code of a layer of seven projections on v5p."""

TOWER_CODE = 0.3
"""Fitted: the code of a frozen tower's layer, only a forward pass, relative to a decoder layer's."""

CODE_FACTORS = {
    "gathers": 1.37,
    "recomputes": 1.3,
    "lora": 1.29,
    "dropout": 1.35,
    "norms": 1.14,
    "post_norms": 1.12,
    "experts": 1.16,
    "state": 1.3,
    "quantized": 1.15,
}
"""Fitted: by how much more code a layer has with each of these."""


def code(program: Program) -> float:
    """Return the bytes of the step's code."""
    a, recipe = program.architecture, program.recipe
    has = {
        "gathers": gathers(program),
        "recomputes": recipe.remat.policy in RECOMPUTING,
        "lora": program.lora is not None,
        "dropout": recipe.lora is not None and recipe.lora.dropout > 0,
        "norms": bool(getattr(a, "qk_norm", "")),
        "post_norms": isinstance(a, DecoderArchitecture) and a.places.after_mlp is not None,
        "experts": bool(a.expert_layers),
        "state": a.stateful,
        "quantized": recipe.model.quantization is not None,
    }
    layer = LAYER_CODE * CODE.get(program.accelerator.generation, 1.0)
    layer *= math.prod(factor for name, factor in CODE_FACTORS.items() if has[name])
    vision = a.vision
    if vision is None or vision.layers is None:
        return layer * a.num_layers
    share = 1.0 if program.tower_adapters else TOWER_CODE
    return layer * (a.num_layers + share * vision.layers.count)
