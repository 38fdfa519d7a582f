"""The recipe that backends are compared on: its miniature, in float32 and without what is random."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from recipec.compiler.lowering.program import Program
from recipec.compiler.rehearse.miniature_recipe import NO_PART, MiniatureChange, derive, replacements
from recipec.compiler.rehearse.rehearse import RECIPE, TRAIN_FILE, copy_template, write_yaml
from recipec.runtime.model.partition_rules import data_parallel

LEARNING_RATE = 1e-3
"""Small enough that rounding does not grow from step to step in most models, and large enough that twenty
steps move every adapter by far more than the tolerance."""


def write_recipe(program: Program, steps: int, work: Path) -> list[MiniatureChange]:
    """Writes recipe.yaml beside the miniature of `compiler.rehearse.rehearse`, and returns what it replaces.

    Everything that makes a run what it is stays: packing, accumulation, the loss and what carries it,
    optimizer, clipping, schedule, adapters. The type becomes float32, in which equal means equal; dropout is
    zero, since no two libraries draw the same random numbers.
    """
    config = json.loads((work / "model" / "config.json").read_text(encoding="utf-8"))
    recipe, _ = derive(program, config, "./model", TRAIN_FILE, TRAIN_FILE, steps)
    recipe["model"]["dtype"] = "float32"
    recipe["mesh"]["hosts"] = None  # traces are of one process
    if recipe["lora"] is not None:
        recipe["lora"] |= {"dropout": 0.0, "dtype": "float32", "quantize": None}
    recipe["data"] |= {"eval": [], "eval_fraction": None}
    recipe["train"]["optimizer"]["learning_rate"] = LEARNING_RATE
    recipe["train"]["log"] |= {"tensorboard": False, "wandb_project": None}
    if recipe["train"]["loss_normalization"] == "micro_batches":
        _one_group(recipe)
    recipe["checkpoint"] |= {"every_steps": steps, "local": None}
    recipe["merge"] |= {"dtype": "float32", "quantization": None}
    replaced = replacements(program.recipe.model_dump(mode="json", exclude=NO_PART), recipe)
    del recipe["data"]["eval_seed"]  # which means nothing without eval_fraction
    copy_template(program, recipe, work)
    write_yaml(work / RECIPE, recipe)
    return replaced


def _one_group(recipe: dict[str, Any]) -> None:
    """Takes the axes of data parallelism away.

    TRL runs in one process here, whose micro-batches are those of one device, and a mean of micro-batches'
    means depends on what is in each.
    """
    axes, train = recipe["mesh"]["axes"], recipe["train"]
    train["global_batch_size"] //= data_parallel(axes)
    axes["fsdp"] = 1
    axes.pop("dcn", None)
    recipe["mesh"]["accelerator"] = f"cpu-{math.prod(axes.values())}"
