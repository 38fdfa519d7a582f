"""A model's matrix products, and the lower bounds of a step's time and memory that follow from their shapes.

Nothing is compiled. Weights are counted for the whole model; a product with n weights takes 2 n FLOPs a
token. A search compiles the configurations with the best bounds first. It skips those whose bound is worse
than a compiled configuration.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from recipec.compiler.lowering.assumed_pictures import row_patches
from recipec.compiler.lowering.program import Program, trained_size
from recipec.compiler.lowering.runtime_settings import attention_block
from recipec.compiler.lowering.sizes import BYTES, beside_bytes
from recipec.compiler.wording import split_layer
from recipec.runtime.model.adapters import arrays_of
from recipec.runtime.model.families import Architecture
from recipec.runtime.model.families.family import CHUNKED, EXPERTS, Parameter, matrices
from recipec.runtime.model.families.vision import PATH as VISION
from recipec.runtime.model.partition_rules import resolved, shards
from recipec.runtime.training.objectives import OBJECTIVES, compares, stores
from recipec.spec.language import Train

if TYPE_CHECKING:
    from recipec.compiler.catalog import Model

LOOKED_UP = ("embedder.input_embedding", "embedder.per_layer_input_embedding")
"""Embeddings, which are looked up and not multiplied. The first is also the output head if the model has no
other."""
HEAD = "lm_head"
AFTER = (HEAD, "final_norm")
"""Beginnings of the names of arrays behind the last layer."""

VECTORS = ("bias", "norm.w")
"""Ends of the names of biases and norms. These arrays have two dimensions for several heads or experts."""
OUTPUT = "self_attn.o_proj"
DOWN = "mlp.down_proj"
"""Attention's output projection and the down projection, whatever a family's names for them."""


@dataclass
class Layer:
    """One decoder layer, per token.

    Attributes:
        weights: numbers in its matrices; of experts, only those that a token is routed to.
        trained: the part of `weights` that is trained itself, without adapters.
        tails: the part of `weights` in attention's output projection and in the down projection, by
            projection.
        products: numbers in the results of the matrices that can carry LoRA, by projection.
        attended: numbers in its queries, all heads together.
        pairs: query-key pairs of a row under the causal mask and the layer's window.
    """

    weights: float = 0.0
    trained: float = 0.0
    tails: dict[str, float] = field(default_factory=dict)
    products: dict[str, float] = field(default_factory=dict)
    attended: float = 0.0
    pairs: float = 0.0


@dataclass(frozen=True)
class Shapes:
    """The sizes of a model's matrix products.

    Attributes:
        layers: the layers in order.
        head: numbers in the output head.
        outside: numbers in matrices before the layers.
        trained: the parts of `head` and of `outside` that are trained themselves.
        first_trained: index of the first layer that is trained, where the backward pass ends.
    """

    layers: tuple[Layer, ...]
    head: float
    outside: float
    trained: tuple[float, float]
    first_trained: int


def shapes(program: Program, row_length: int) -> Shapes:
    """Return the sizes of the matrix products of a program's model.

    Args:
        row_length: tokens of a row, padding included.
    """
    a = program.architecture
    layers = tuple(Layer() for _ in range(a.num_layers))
    head = float(a.vocab_size * a.hidden_size)
    outside = trained_head = trained_outside = 0.0
    for parameter in program.parameters:
        path, number = split_layer(parameter.path)
        trained = program.lora is None and parameter.trainable
        if trained and path in (LOOKED_UP[0], f"{HEAD}.w"):
            trained_head = head  # the embedding comes first, and is the head where there is no other
        elif path == f"{HEAD}.w":
            trained_head = 0.0
        # The model does not read arrays without sources, so they are in no product.
        if not multiplies(parameter) or not parameter.sources or path in LOOKED_UP or path.startswith(HEAD):
            continue
        if path.startswith(f"{VISION}."):
            continue  # no token goes through the tower
        size = float(math.prod(parameter.shape))
        if number is None:
            outside += size
            trained_outside += size * trained
        else:
            layers[number].weights += size * _used_share(program, path)
            layers[number].trained += size * _used_share(program, path) * trained
    by_path = {parameter.path: parameter.shape for parameter in program.parameters}
    family = program.family
    names, feed_forward = family.names, family.feed_forward(a)
    common = {f"{names.attention}.{names.out}": OUTPUT}
    common |= {f"{feed_forward}.{name}": DOWN for name in ("down_proj", names.plain[1])}
    for target in family.lora_targets(a):
        assert target.layer is not None  # those without one are a vision tower's
        layer, shape = layers[target.layer], by_path[target.weight]
        inputs = math.prod(shape[axis] for axis in target.contract)
        name = common.get(target.projection, target.projection)
        layer.products[name] = math.prod(shape) / inputs
        if name in (OUTPUT, DOWN):
            layer.tails[name] = float(math.prod(shape))
        if name == OUTPUT:
            layer.attended = float(inputs)
    for number, layer in enumerate(layers):
        layer.pairs = seen_pairs(a, number, row_length)
    return Shapes(layers, head, outside, (trained_head, trained_outside), first_trained(program))


def multiplies(parameter: Parameter) -> bool:
    """Return whether an array is a factor of matrix products. Norms and biases are not."""
    return len(parameter.shape) > 1 and not parameter.path.endswith(VECTORS)


def seen_pairs(architecture: Architecture, layer: int, length: float) -> float:
    """Return the query-key pairs of a layer with attention by scores, in a row of one text."""
    chunked = architecture.layer_types[layer] == CHUNKED
    return (chunked_pairs if chunked else causal_pairs)(length, architecture.window(layer))


def causal_pairs(length: float, window: int | None) -> float:
    """Return the query-key pairs of a row of one text, where each token sees the last `window` tokens,
    itself included."""
    seen = min(window or length, length)
    return length * seen - seen * (seen - 1) / 2


def chunked_pairs(length: float, chunk: int | None) -> float:
    """Return the same as `causal_pairs` where each token sees only its own chunk."""
    whole, rest = divmod(length, chunk or length)
    return whole * causal_pairs(chunk or length, None) + causal_pairs(rest, None)


def _used_share(program: Program, path: str) -> float:
    """Return the share of a matrix that a token is multiplied with."""
    experts, used = program.architecture.routing
    return used / experts if EXPERTS.search(path) else 1.0


def first_trained(program: Program) -> int:
    """Return the index of the first layer that is trained, where the backward pass ends."""
    if program.lora is not None:
        if program.trains_projector:
            return 0
        return min((adapter.target.layer or 0 for adapter in program.adapters), default=0)
    places = (split_layer(parameter.path) for parameter in program.parameters if parameter.trainable)
    last = program.architecture.num_layers
    return min((last if path.startswith(AFTER) else number or 0 for path, number in places), default=0)


FORWARD, BACKWARD = 2, 2
"""FLOPs for each weight and token: of the forward pass, and of the gradient of the activations. The gradient
of a trained weight takes as many again."""

FUSED = 1024
"""The value in runtime.model.attention, repeated here because that module imports JAX."""

KERNEL_BACKWARD, KERNELS_BACKWARD = 5, 7
"""Matrix products of splash attention's backward pass in one kernel, and in two (3 for dQ, 4 for dK and dV).
Both recompute the scores. The forward kernel has 2. Plain attention has 2, and 4 in the backward pass."""

RECOMPUTED: dict[str, tuple[str, ...]] = {
    "decoder": (DOWN,),
    "block": (OUTPUT, DOWN),
    "save_attention": (DOWN,),
}
"""Policies that recompute a layer, with the projections that need no recomputation in some families, because
the backward pass does not read their results: those before a sum with the residual stream."""

KEPT_ON_DEVICE: dict[str, tuple[bool, bool]] = {
    "none": (True, True),
    "save_attention": (True, False),
    "save_dots": (True, True),
}
"""Whether a policy keeps each attention's result, and the results of the other products. A policy that is
missing here is assumed to keep only a layer's input."""

STORED = {"nf4": 0.5 + 4 / 64, "int8": 1.0, "fp8": 1.0, None: None}
"""Bytes of a quantized number. With nf4, 64 numbers share a float32 scale; a channel's scale is small."""


@dataclass(frozen=True)
class Bound:
    """Lower bounds for every compile of a step, per device and micro-batch.

    Attributes:
        seconds: all matrix products at the device's peak.
        memory_bytes: weights, trained state, and the activations that the backward pass needs. This is no
            bound when a step does not fit and the compiler recomputes activations by itself.
    """

    seconds: float
    memory_bytes: float


def bound(program: Program, row_length: int) -> Bound:
    """Return the lower bounds of a program's step.

    Args:
        row_length: tokens of a row, padding included: data.max_length.
    """
    accelerator, model = program.accelerator, shapes(program, row_length)
    tokens = rows(program) * row_length
    flops = _least_flops(program, model, row_length) * tokens
    flops += teacher_flops(program, row_length) * tokens + tower_flops(program)
    seconds = flops / accelerator.devices / accelerator.peak_flops_per_device
    return Bound(seconds, state_bytes(program) + kept_bytes(program, model, row_length))


def kept_bytes(program: Program, model: Shapes, row_length: int) -> float:
    """Return the bytes of activations on one device that the forward pass keeps for the backward pass."""
    kept = sum(_kept(program, layer, row_length) for layer in model.layers[model.first_trained :])
    tokens = rows(program) * row_length
    return kept * tokens * BYTES[program.recipe.model.dtype] / program.accelerator.devices


def rows(program: Program) -> int:
    """Return the rows of tokens in a micro-batch over all devices; a preference has two."""
    return program.micro_batch_rows * OBJECTIVES[program.recipe.train.objective].rows


def model_flops(program: Program, tokens: float) -> float:
    """Return the FLOPs that the algorithm needs for a micro-batch, without recomputation.

    This is the numerator of model FLOPs utilization (PaLM, Chowdhery et al. 2022, appendix B). PaLM counts
    6 N a token (2 forward, 2 for the gradient of the activations, 2 for the gradient of the weights), and
    12 L H Q T for attention. Here attention counts only the pairs that the mask leaves. N is the number of
    weights in matrix products, with the output head and without the embedding. Frozen weights need 4 N from
    the first trained layer on and 2 N before it, and each adapter weight needs 6. DPO's reference and a
    teacher add a forward pass, and KTO's unrelated answers add one of each model.

    Args:
        tokens: tokens of the micro-batch over all devices, padding included.
    """
    length = program.recipe.data.max_length
    model = shapes(program, length)
    forward = _forward_passes(program.recipe.train)
    head, outside = model.trained
    flops = (FORWARD * forward + BACKWARD) * model.head + 2 * head
    flops += FORWARD * forward * model.outside + (BACKWARD + 2) * outside
    if program.lora is not None:
        flops += 6.0 * program.used_adapter_parameters
    for number, layer in enumerate(model.layers):
        product = 2 * layer.attended * layer.pairs / length
        flops += forward * (FORWARD * layer.weights + 2 * product)
        if number >= model.first_trained:
            flops += BACKWARD * layer.weights + 2 * layer.trained + 4 * product
    return (flops + teacher_flops(program, length)) * tokens + tower_flops(program)


def tower_flops(program: Program) -> float:
    """Return the FLOPs of a micro-batch's pictures in the vision tower, 0 without pictures.

    A frozen tower has a forward pass alone.

    Each patch is multiplied with all matrices of the tower. It sees the patches of its picture, or of its row
    where pictures differ in size.
    """
    vision, patches = program.architecture.vision, row_patches(program)
    if vision is None or not patches:
        return 0.0
    matrices = sum(
        float(math.prod(parameter.shape)) for parameter in vision.parameters() if multiplies(parameter)
    )
    seen = vision.patches or patches
    layers = vision.layers
    attended = 0.0 if layers is None else 2.0 * layers.count * layers.num_heads * layers.head_dim * seen
    flops = FORWARD * (matrices + attended)
    if program.trains_tower:
        flops += BACKWARD * matrices + 2 * FORWARD * attended
    flops += 6.0 * sum(map(trained_size, program.tower_adapters))
    return rows(program) * patches * flops


def teacher_flops(program: Program, length: int) -> float:
    """Return the FLOPs a token of the teacher's forward pass, 0 without one.

    Args:
        length: tokens of a row.
    """
    if program.teacher is None or stores(program.recipe.train):
        return 0.0
    model = shapes(_of_teacher(program, program.teacher), length)
    layers = sum(
        FORWARD * layer.weights + 4 * layer.attended * layer.pairs / length for layer in model.layers
    )
    return FORWARD * (model.head + model.outside) + layers


def teacher_bytes(program: Program) -> float:
    """Return the bytes of the teacher's weights on one device, 0 without one."""
    if program.teacher is None or program.recipe.train.distill is None or stores(program.recipe.train):
        return 0.0
    teacher, axes = _of_teacher(program, program.teacher), program.recipe.mesh.axes
    linear = matrices(teacher.family, teacher.architecture, teacher.parameters)
    quantized = STORED[program.recipe.train.distill.teacher.quantization]
    size = BYTES[program.recipe.model.dtype]
    return sum(
        math.prod(parameter.shape)
        / math.prod(shards(axis, axes) for axis in parameter.spec)
        * (quantized if quantized is not None and parameter.path in linear else size)
        for parameter in teacher.parameters
    )


def _of_teacher(program: Program, teacher: Model) -> Program:
    """Return a program of the teacher, on the student's mesh and without adapters."""
    parameters = resolved(teacher.family.parameters(teacher.architecture), (), program.recipe.mesh.axes)
    return replace(
        program,
        family=teacher.family,
        architecture=teacher.architecture,
        config=teacher.config,
        parameters=parameters,
        lora=None,
        adapters=(),
        rules=(),
        teacher=None,
    )


def _least_flops(program: Program, model: Shapes, length: int) -> float:
    """Return the fewest FLOPs a token that the compiled step has.

    Products in eight bits count by their time, as a share of bfloat16's. The backward pass of the first
    trained layer is left out, because its cost depends on which of its projections are trained.
    """
    recipe = program.recipe
    policy, splash = recipe.remat.policy, recipe.model.attention == "splash"
    block = attention_block(program) or 0
    kernel = KERNEL_BACKWARD if block >= FUSED else KERNELS_BACKWARD
    forward = _forward_passes(recipe.train)
    once, back = _faster(program)
    flops = (FORWARD * forward + BACKWARD) * model.head + 2 * model.trained[0] + FORWARD * model.outside
    if recipe.lora is not None:
        flops += (FORWARD + 2.0) * program.used_adapter_parameters
    for number, layer in enumerate(model.layers):
        product = 2 * layer.attended * (layer.pairs / length if splash else length)
        flops += forward * (FORWARD * layer.weights * once + 2 * product)
        if number > model.first_trained:
            flops += (BACKWARD * layer.weights + 2 * layer.trained) * back + (
                kernel if splash else 4
            ) * product
            flops += _again(policy, splash, layer, product, once)
    return flops


def _faster(program: Program) -> tuple[float, float]:
    """Return a frozen weight's product time as a share of bfloat16's: forward, and for a gradient."""
    passes, accelerator = program.recipe.model.quantized_matmul, program.accelerator
    rate = accelerator.eight_bit_tflops if passes else None
    share = (accelerator.bf16_tflops or 0) / rate if rate else 1.0
    return share, share if passes == "both" else 1.0


def _again(policy: str, splash: bool, layer: Layer, product: float, once: float) -> float:
    """Return the FLOPs a token that a policy recomputes in a layer.

    Args:
        product: FLOPs a token of one matrix product of the layer's attention.
        once: the weight of a FLOP in the layer's frozen products, below 1 for eight bits.
    """
    if policy == "none":
        return 0.0
    if policy not in RECOMPUTED:
        return 0.0 if splash else product  # plain attention's scores
    weights = layer.weights - sum(layer.tails.get(name, 0.0) for name in RECOMPUTED[policy])
    if policy == "save_attention":
        return FORWARD * weights * once + (0.0 if splash else product)
    return FORWARD * weights * once + 2 * product


def _kept(program: Program, layer: Layer, length: int) -> float:
    """Return the numbers a token that a layer keeps for the backward pass, over all devices."""
    recipe = program.recipe
    hidden = float(program.architecture.hidden_size)
    attention, products = KEPT_ON_DEVICE.get(recipe.remat.policy, (False, False))
    kept = hidden
    if attention:
        kept += layer.attended
    if products:
        kept += sum(
            size for name, size in layer.products.items() if not name.startswith((OUTPUT, DOWN))
        )  # whether the backward pass needs the results of these two depends on the family
    if recipe.remat.policy == "none" and recipe.model.attention == "dot":
        kept += program.architecture.num_heads * length  # attention probabilities
    return kept


def state_bytes(program: Program) -> float:
    """Return the bytes of weights, adapters, optimizer state and teacher on one device."""
    recipe, axes = program.recipe, program.recipe.mesh.axes
    quantized = STORED[recipe.model.quantization]
    linear = matrices(program.family, program.architecture, program.parameters) if quantized else {}
    size = BYTES[recipe.model.dtype]

    @functools.cache
    def parts(spec: Sequence[str | None]) -> int:
        return math.prod(shards(axis, axes) for axis in spec)

    def local(shape: Sequence[int], spec: Sequence[str | None]) -> float:
        return math.prod(shape) / parts(tuple(spec))

    total = teacher_bytes(program)
    width = BYTES[program.lora.dtype] if program.lora else size
    whole = {parameter.path for parameter in program.whole}
    beside = 0 if program.lora else _trained_bytes(program, size)
    for parameter in program.parameters:
        stored = quantized if quantized and parameter.path in linear else size
        trained = beside if parameter.trainable else 0
        if parameter.path in whole:
            stored, trained = width, _trained_bytes(program, width)
        total += local(parameter.shape, parameter.spec) * (stored + trained)
    for rows in program.token_rows:
        total += local(rows.shape, rows.spec) * (width + _trained_bytes(program, width))
    numbers = sum(local(shape, spec) for shape, spec in arrays_of(program.adapters).values())
    total += numbers * (width + _trained_bytes(program, width))
    return total


def _trained_bytes(program: Program, size: int) -> float:
    """Return the bytes of state for each trained number: moments, float32 copy, accumulated gradients, which
    are float32."""
    accumulated = 4 if program.accumulation_steps > 1 else 0
    return float(beside_bytes(program.recipe, size) + accumulated)


def _forward_passes(train: Train) -> int:
    """Return the number of forward passes of a micro-batch through the model."""
    objective = OBJECTIVES[train.objective]
    return (2 if compares(train) else 1) * (2 if train.loss_type in objective.mismatched else 1)
