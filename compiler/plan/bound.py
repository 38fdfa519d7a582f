"""What a step takes at the least, in time and memory: from shapes alone, without compiling anything.

A search compiles first what could be best by these bounds, and leaves out what cannot be any more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.sizes import BYTES, beside_bytes
from recipec.compiler.plan.shapes import DOWN, OUTPUT, Layer, Shapes, shapes
from recipec.runtime.model.families.base import matrices
from recipec.runtime.model.partition_rules import shards
from recipec.runtime.training.objectives import OBJECTIVES

FORWARD, BACKWARD = 2, 2
"""FLOPs for each weight and token: of the forward pass, and of the gradient of the activations. That of the
weights takes as many again, where they are trained."""

FUSED = 1024
"""As runtime.model.attention has it, which needs JAX."""

KERNEL_BACKWARD, KERNELS_BACKWARD = 5, 7
"""Matrix products of splash attention's backward pass in one kernel, and in two (3 for dQ, 4 for dK and dV);
both compute the scores again. The forward kernel has 2, as has plain attention, whose backward pass has 4."""

RECOMPUTED: dict[str, tuple[str, ...]] = {
    "decoder": (DOWN,),
    "block": (OUTPUT, DOWN),
    "save_attention": (DOWN,),
}
"""Policies that compute a layer again, with the projections whose results the backward pass does not need in
every family: those before a sum with the residual stream."""

KEPT_ON_DEVICE: dict[str, tuple[bool, bool]] = {
    "none": (True, True),
    "save_attention": (True, False),
    "save_dots": (True, True),
}
"""Whether a policy keeps each attention's result, and the results of the other products. What is not named
here is taken to keep a layer's input alone."""

STORED = {"nf4": 0.5, "int8": 1.0, "fp8": 1.0, None: None}
"""Bytes of a quantized number, its scale aside."""


@dataclass(frozen=True)
class Bound:
    """What no compile of a step gets below, per device and micro-batch.

    Attributes:
        seconds: all matrix products at the device's peak.
        memory_bytes: weights, trained state, and the activations that the backward pass cannot do without
            unless the compiler computes them again by itself, which it does where a step does not fit.
    """

    seconds: float
    memory_bytes: float


def bound(program: Program, row_length: int) -> Bound:
    """The lower bounds of a program's step.

    Args:
        row_length: tokens of a row, padding included: data.max_length.
    """
    accelerator, model = program.accelerator, shapes(program, row_length)
    tokens = rows(program) * row_length
    flops = _least_flops(program, model, row_length) * tokens
    seconds = flops / accelerator.devices / accelerator.peak_flops_per_device
    return Bound(seconds, state_bytes(program) + kept_bytes(program, model, row_length))


def kept_bytes(program: Program, model: Shapes, row_length: int) -> float:
    """Activations on one device that the forward pass of a micro-batch leaves for the backward pass."""
    kept = sum(_kept(program, layer, row_length) for layer in model.layers[model.first_trained :])
    tokens = rows(program) * row_length
    return kept * tokens * BYTES[program.recipe.model.dtype] / program.accelerator.devices


def rows(program: Program) -> int:
    """Rows of tokens in a micro-batch over all devices; a preference has two."""
    return program.micro_batch_rows * OBJECTIVES[program.recipe.train.objective].rows


def model_flops(program: Program, tokens: float) -> float:
    """FLOPs that the algorithm needs for a micro-batch, nothing recomputed: the numerator of model FLOPs
    utilisation (PaLM, Chowdhery et al. 2022, appendix B).

    There: 6 N a token (2 forward, 2 for the gradient of the activations, 2 for that of the weights), and
    12 L H Q T for attention, here with the pairs that the mask leaves. N are the weights of matrix products,
    the output head's among them and the embedding's not. With LoRA the frozen weights need 4 N, from the
    first trained layer on, and the adapters 6 of their own. DPO's reference adds a
    forward pass, and KTO's other answers one of each model.

    Args:
        tokens: of the micro-batch over all devices, padding included.
    """
    length = program.recipe.data.max_length
    model = shapes(program, length)
    full = program.lora is None
    train = program.recipe.train
    forward = OBJECTIVES[train.objective].forward_passes(train.loss_type)
    backward = BACKWARD + (2 if full else 0)
    flops = (FORWARD * forward + backward) * model.head
    flops += (FORWARD * forward + (backward if full else 0)) * model.outside
    if not full:
        flops += 6.0 * program.used_adapter_parameters
    for number, layer in enumerate(model.layers):
        product = 2 * layer.attended * layer.pairs / length
        flops += forward * (FORWARD * layer.weights + 2 * product)
        if number >= model.first_trained:
            flops += backward * layer.weights + 4 * product
    return flops * tokens


def _least_flops(program: Program, model: Shapes, length: int) -> float:
    """FLOPs a token that the compiled step has at the least, products in eight bits by the time they take.

    Of the first trained layer the backward pass is left out: how much of it there is depends on which of its
    projections are trained.
    """
    recipe, full = program.recipe, program.lora is None
    policy, splash = recipe.remat.policy, recipe.model.attention == "splash"
    block = recipe.model.attention_block or program.accelerator.attention_block or 0
    kernel = KERNEL_BACKWARD if block >= FUSED else KERNELS_BACKWARD
    forward = OBJECTIVES[recipe.train.objective].forward_passes(recipe.train.loss_type)
    once, back = _faster(program)
    backward = BACKWARD + (2 if full else 0)
    flops = (FORWARD * forward + backward) * model.head + FORWARD * model.outside
    if not full:
        flops += (FORWARD + 2.0) * program.used_adapter_parameters
    for number, layer in enumerate(model.layers):
        product = 2 * layer.attended * (layer.pairs / length if splash else length)
        flops += forward * (FORWARD * layer.weights * once + 2 * product)
        if number > model.first_trained:
            flops += backward * layer.weights * back + (kernel if splash else 4) * product
            flops += _again(policy, splash, layer, product, once)
    return flops


def _faster(program: Program) -> tuple[float, float]:
    """The share of bfloat16's time that a frozen weight's product takes: forward, and for a gradient."""
    lora, accelerator = program.recipe.lora, program.accelerator
    rate = accelerator.eight_bit_tflops if lora and lora.products else None
    share = (accelerator.bf16_tflops or 0) / rate if rate else 1.0
    return share, share if lora and lora.products == "both" else 1.0


def _again(policy: str, splash: bool, layer: Layer, product: float, once: float) -> float:
    """FLOPs a token of what a policy computes again of a layer.

    Args:
        product: FLOPs a token of one of its attention's matrix products.
        once: what a FLOP of its weights counts.
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
    """Numbers a token that the forward pass leaves for the backward pass of a layer, over all devices."""
    recipe = program.recipe
    hidden = float(program.architecture.hidden_size)
    attention, products = KEPT_ON_DEVICE.get(recipe.remat.policy, (False, False))
    kept = hidden
    if attention:
        kept += layer.attended
    if products:
        kept += sum(
            size for name, size in layer.products.items() if not name.startswith((OUTPUT, DOWN))
        )  # what those two are needed for depends on the family
    if recipe.remat.policy == "none" and recipe.model.attention == "dot":
        kept += program.architecture.num_heads * length  # its probabilities
    return kept


def state_bytes(program: Program) -> float:
    """Weights, adapters and optimizer state on one device."""
    recipe, axes = program.recipe, program.recipe.mesh.axes
    linear = matrices(program.family, program.architecture, program.parameters)
    quantized = STORED[program.lora.quantize if program.lora else None]
    size = BYTES[recipe.model.dtype]

    def local(shape: Sequence[int], spec: Sequence[str | None]) -> float:
        return math.prod(shape) / math.prod(shards(axis, axes) for axis in spec)

    total = 0.0
    width = BYTES[program.lora.dtype] if program.lora else size
    whole = {parameter.path for parameter in program.whole}
    for parameter in program.parameters:
        stored = quantized if quantized is not None and parameter.path in linear else size
        trained = 0 if program.lora or not parameter.trainable else _trained_bytes(program, size)
        if parameter.path in whole:
            stored, trained = width, _trained_bytes(program, width)
        total += local(parameter.shape, parameter.spec) * (stored + trained)
    for adapter in program.adapters:
        numbers = sum(local(shape, spec) for _, shape, spec in adapter.arrays)
        total += numbers * (width + _trained_bytes(program, width))
    return total


def _trained_bytes(program: Program, size: int) -> float:
    """Bytes of state for each number that is trained: moments, float32 copy, accumulated gradients."""
    accumulated = size if program.accumulation_steps > 1 else 0
    return float(beside_bytes(program.recipe, size) + accumulated)
