"""What several scripts state: where they come from, and the runtime's settings."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from recipec.compiler.emitters.python_text import WIDTH, Call, Name, Value

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.runtime.model.adapters import LoraSettings

LONG_RANGE = 8
"""Consecutive layers from which on they are written as a range."""


def about(program: Program) -> str:
    """The lines of a script's docstring that say where it comes from."""
    text = f"Made by recipec from the recipe {program.name}: edit recipe.yaml and build again."
    return textwrap.fill(text, WIDTH, break_on_hyphens=False, break_long_words=False)


def kind(program: Program) -> str:
    """What the run is called: "LoRA fine-tuning", "QLoRA DPO training"."""
    lora, objective = program.recipe.lora, program.recipe.train.objective
    size = "Full" if lora is None else "QLoRA" if lora.quantize else "LoRA"
    return f"{size} fine-tuning" if objective == "sft" else f"{size} {objective.upper()} training"


def devices(program: Program) -> str:
    """What the run is on: "v5p-8", "2 slices of v5p-16"."""
    accelerator = program.accelerator
    name, slices = accelerator.name, accelerator.slices
    return name if slices == 1 else f"{slices} slices of {name}"


def base_settings(program: Program) -> Call:
    """`ModelSettings(...)` that says which checkpoint it is, for a script that does not train."""
    return Call("ModelSettings", _identity(program) | {"family": program.family.name})


def _identity(program: Program) -> dict[str, Value]:
    model = program.recipe.model
    return {"id": model.id} if model.revision is None else {"id": model.id, "revision": model.revision}


def model_settings(program: Program) -> Call:
    """`ModelSettings(...)` of the recipe."""
    recipe, arguments = program.recipe, _identity(program)
    if recipe.model.tokenizer is not None:
        arguments["tokenizer"] = recipe.model.tokenizer
    arguments |= {
        "family": program.family.name,
        "dtype": recipe.model.dtype,
        "attention": recipe.model.attention,
        "remat": recipe.remat.policy,
    }
    return Call("ModelSettings", arguments)


def lora_settings(lora: LoraSettings) -> Call:
    """`LoraSettings(...)` of the recipe."""
    arguments: dict[str, Value] = {
        "rank": lora.rank,
        "alpha": float(lora.alpha),
        "dropout": lora.dropout,
        "targets": tuple(lora.targets),
    }
    if lora.layers is not None:
        arguments["layers"] = layer_numbers(lora.layers)
    if lora.rslora:
        arguments["rslora"] = True
    if lora.rank_pattern:
        arguments["rank_pattern"] = dict(lora.rank_pattern)
    if lora.alpha_pattern:
        arguments["alpha_pattern"] = dict(lora.alpha_pattern)
    arguments |= {"init": lora.init, "dtype": lora.dtype, "kv": lora.kv}
    if lora.quantize is not None:
        arguments["quantize"] = lora.quantize
    return Call("LoraSettings", arguments)


def layer_numbers(layers: Sequence[int]) -> Value:
    """A tuple of layers, or a range where that is shorter."""
    first, last = layers[0], layers[-1]
    if len(layers) >= LONG_RANGE and tuple(layers) == tuple(range(first, last + 1)):
        return Name(f"tuple(range({first}, {last + 1}))")
    return tuple(layers)
