"""Emit probe.py, and the shapes it runs: a miniature of the model, and the model with some of its layers."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from recipec.compiler.emitters.settings_text import about, devices
from recipec.compiler.lowering.assumed_pictures import row_patches
from recipec.compiler.miniature.fewer_layers import with_layers
from recipec.compiler.miniature.small_checkpoint import shrink
from recipec.compiler.miniature.small_recipe import shrink_lora
from recipec.compiler.plan.depth import probed
from recipec.compiler.python_text import docstring
from recipec.compiler.render import render
from recipec.runtime.model.families import family_of

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program

SHAPES = "probe_models.json"
HEADS = (
    *("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads"),
    *("linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"),
)
"""The config.json keys whose values tp splits."""
HEAD_DIM = 32
"""The least size of the miniature's heads. It is the smallest that vLLM's CPU attention takes."""


def has_probe(program: Program) -> bool:
    """Return whether an artifact has a probe: not if its recipe asks for no launcher at all."""
    return program.family.tunix and bool(program.recipe.launch.kind)


def emit_probe(program: Program) -> dict[str, str]:
    """Return the texts of probe.py and of the shapes; {} for an artifact without a probe."""
    if not has_probe(program):
        return {}
    script = render(
        "probe.py",
        title=docstring(f"Compare {devices(program)} with the recipe: devices, numbers, time, a merge."),
        about=about(program),
    )
    return {"probe.py": script, SHAPES: json.dumps(_shapes(program), indent=1) + "\n"}


def _shapes(program: Program) -> dict[str, Any]:
    a, architecture, axes = program.accelerator, program.architecture, program.recipe.mesh.axes
    hbm = None if a.hbm_gib is None else round(a.hbm_gib * 2**30 / a.devices_per_chip)
    return {
        "machine": {
            "accelerator": a.name,
            "devices": a.devices,
            "topology": a.topology,
            "hbm_bytes": hbm,
        },
        "layers": architecture.num_layers,
        "sizes": {
            "parameters": program.base_parameters,
            "layers": architecture.num_layers,
            "hidden_size": architecture.hidden_size,
            "vocab_size": architecture.vocab_size,
        },
        "miniature": _miniature(program, axes),
        "depths": [
            {"layers": list(layers), "config": {**with_layers(program.config, layers), **program.multimodal}}
            for layers in probed(program)
        ],
        **({"patches": patches} if (patches := row_patches(program)) else {}),
    }


def _miniature(program: Program, axes: Any) -> dict[str, Any]:
    """Return the miniature's config.json, its `lora` section, and the number that tp has to divide.

    The miniature's heads can be split over tp as many ways as the model and the devices allow.
    """
    text = program.config.get("text_config", program.config)
    both = axes.get("fsdp", 1) * axes.get("tp", 1)
    tp = math.gcd(both, *(text[key] for key in HEADS if text.get(key)))
    config = shrink(program.config, {**axes, "fsdp": both // tp, "tp": tp}, HEAD_DIM)
    family = family_of(config)
    small = family.architecture(config)
    recipe = program.recipe.model_dump(mode="json", include={"lora"})
    shrink_lora(recipe, program, family, small)
    kept = config.get("text_config", config)
    return {
        "config": config,
        "layers": small.num_layers,
        "lora": recipe["lora"],
        "heads": math.gcd(*(kept[key] for key in HEADS if kept.get(key))),
    }
