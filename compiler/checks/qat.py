"""Check quantization-aware training against the model, the adapters and the objective."""

from __future__ import annotations

import math
from collections.abc import Iterator

from recipec.compiler.catalog import Model
from recipec.compiler.lowering.facts import Facts
from recipec.compiler.wording import plural
from recipec.runtime.model.adapters import meant, principal
from recipec.runtime.model.families.family import LoraTarget
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.language.train import FakeQuantization

MX_BLOCK = 32
"""The numbers that share a scale in MX formats."""


E0520 = Code(
    "E0520",
    "quantization-aware training of this model",
    cause="`train.qat` rounds the linear layers of attention and of dense feed-forward blocks. "
    "Experts, layers that carry a state from token to token, and the inputs that Gemma 4 E2B and "
    "E4B give each layer have other weights, and a model without a family has no description of its "
    "layers.",
    cure="Remove `qat`, or use a dense model.",
)

W0521 = Code(
    "W0521",
    "rounding that never begins",
    cause="The run has no more steps than `train.qat.start_step`.",
    cure="Use a smaller start_step.",
)

W0522 = Code(
    "W0522",
    "quantized in another way than trained",
    cause="`train.qat` makes the weights robust against rounding to 4 bits in groups. "
    "`merge.quantization` writes 8 bits with one scale for each output.",
    cure="Write `merge.quantization: null`, and quantize the merged checkpoint with a tool that has "
    "the format that was trained for.",
)


def check(facts: Facts) -> Iterator[Diagnostic]:
    section = facts.recipe.train.qat
    if section is None:
        return
    yield from _combinations(facts, section)
    steps = facts.length.steps if facts.length.exact else None
    if steps is not None and section.start_step >= steps:
        yield Diagnostic(
            W0521,
            f"the run has {plural(steps, 'step')}, and none of them rounds",
            "train.qat.start_step",
            f"start_step: {steps // 2}",
        )
    if (kind := facts.recipe.merge.quantization) is not None:
        yield Diagnostic(
            W0522,
            f"merge.py quantizes to {kind} with one scale for each output, and the run is for "
            f"{section.weights} in groups of {section.group_size}",
            "merge.quantization",
            "quantization: null",
        )
    model = facts.model
    if model is None:
        return
    if (part := _beyond(model, full=facts.recipe.lora is None)) is not None:
        yield Diagnostic(
            E0520,
            f"{model.title} has {part}, which qat does not round",
            "train.qat",
            "qat: null",
            at_key=True,
        )
        return
    yield from _groups(facts, section)


def _beyond(model: Model, full: bool) -> str | None:
    """Name the part of a model that is not rounded although torchao rounds it, or rounds it otherwise."""
    architecture = model.architecture
    if not model.family.tunix:
        return "no family"
    if architecture.routing[0]:
        return "experts"
    if architecture.stateful:
        return "layers that carry a state"
    more = full and bool(getattr(architecture, "per_layer_input", 0))
    return "inputs of each layer" if more else None


E0519 = Code(
    "E0519",
    "quantization-aware training with something else",
    cause="`train.qat` rounds the weights of a model in bfloat16 or float32, for supervised "
    "fine-tuning of all weights or of plain LoRA. Weights that are stored quantized are rounded "
    "already. With DoRA, with adapters that start from the base's weights, and with other "
    "objectives, no tool defines what is rounded. With adapters the output head is frozen and not "
    "rounded. mxfp4 rounds weights and activations, or neither.",
    cure="Remove one of the two.",
)


def _combinations(facts: Facts, section: FakeQuantization) -> Iterator[Diagnostic]:
    recipe, lora = facts.recipe, facts.recipe.lora
    conflicts = []
    if recipe.train.objective != "sft":
        conflicts.append(("train.objective", f"objective: {recipe.train.objective}", "objective: sft"))
    if (stored := recipe.model.quantization) is not None:
        conflicts.append(("model.quantization", f"a base that is stored in {stored}", "quantization: null"))
    if lora is not None and lora.kind != "lora":
        conflicts.append(("lora.kind", f"kind: {lora.kind}", "kind: lora"))
    if lora is not None and principal(lora.init):
        conflicts.append(("lora.init", f"init: {lora.init}", "init: peft"))
    if lora is not None and section.head:
        conflicts.append(("train.qat.head", "adapters, which leave the head as it is", "head: false"))
    kinds = {section.weights, section.activations}
    if "mxfp4" in kinds and len(kinds) > 1:
        help = "activations: mxfp4" if section.weights == "mxfp4" else "activations: int8"
        conflicts.append(("train.qat.activations", f"weights: {section.weights}", help))
    for path, what, help in conflicts:
        name = path if path.startswith("train.qat") else "train.qat"
        yield Diagnostic(E0519, f"{name} cannot be combined with {what}", path, f"{help}, or qat: null")


E0518 = Code(
    "E0518",
    "group that does not divide the inputs",
    cause="`train.qat` rounds weights in groups of `group_size` inputs, and every projection that it "
    "rounds needs whole groups. torchao leaves out projections without whole groups, or stops. "
    "mxfp4 has blocks of 32.",
    cure="Use a group_size that divides all inputs, as the help says.",
)


def _groups(facts: Facts, section: FakeQuantization) -> Iterator[Diagnostic]:
    """Check that groups divide the inputs of everything that is rounded."""
    if section.weights == "mxfp4" and section.group_size != MX_BLOCK:
        yield Diagnostic(
            E0518,
            f"mxfp4 has blocks of {MX_BLOCK} inputs",
            "train.qat.group_size",
            f"group_size: {MX_BLOCK}",
        )
        return
    shapes = {parameter.path: parameter.shape for parameter in facts.defaults}
    inputs: dict[int, str] = {}
    for target in facts.lora_targets:
        if _rounded(facts, target):
            size = math.prod(shapes[target.weight][axis] for axis in target.contract)
            inputs.setdefault(size, target.name)
    if section.head and facts.model is not None:
        inputs.setdefault(facts.model.architecture.hidden_size, "the output head")
    uneven = {size: name for size, name in inputs.items() if size % section.group_size}
    if not uneven:
        return
    size, name = next(iter(uneven.items()))
    common = math.gcd(*inputs)
    fitting = max((n for n in range(2, section.group_size) if common % n == 0), default=None)
    yield Diagnostic(
        E0518,
        f"groups of {section.group_size} do not divide the {size:,} inputs of {name}",
        "train.qat.group_size",
        f"group_size: {fitting}" if fitting else "qat: null",
    )


def _rounded(facts: Facts, target: LoraTarget) -> bool:
    lora = facts.recipe.lora
    if lora is None:
        return True
    return target.layer in (facts.layers or ()) and any(meant(name, target) for name in lora.targets)
