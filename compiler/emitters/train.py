"""Emit train.py and merge.py: the recipe's values as constants, with the schedule and the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recipec.compiler.artifacts.runtime import requirement
from recipec.compiler.emitters.settings_text import (
    about,
    base_settings,
    chat_template,
    constants,
    devices,
    imports,
    kind,
)
from recipec.compiler.lowering import optimization
from recipec.compiler.lowering.runtime_settings import model_settings, run_settings
from recipec.compiler.python_text import Value, assignment, docstring, statement
from recipec.compiler.render import render

if TYPE_CHECKING:
    from recipec.compiler.lowering.pins import Pins
    from recipec.compiler.lowering.program import Program


def emit_train(program: Program) -> str:
    """Return the text of train.py."""
    title = docstring(f"{kind(program)} of {program.recipe.model.id} on {devices(program)}.")
    return render("train.py", title=title, torchax=False, requirements="train", **script(program))


def script(program: Program) -> dict[str, Any]:
    """Return the values for the templates of train.py and of train_torchax.py."""
    recipe = program.recipe
    values = constants(run_settings(program), program)
    if recipe.cache.directory is not None:
        values["CACHE"] = recipe.cache.directory
    ratio = bool(recipe.train.schedule.warmup_ratio)
    chosen = optimization.hyperparameters(recipe.train)
    if recipe.train.optimizer.name == "muon":
        chosen["MATRICES"] = optimization.matrices(program.parameters)
    return {
        "about": about(program),
        "math": ratio,
        "lora": program.lora is not None,
        "chat_template": chat_template(program),
        "constants": [assignment(name, value) for name, value in values.items()],
        "hyperparameters": [assignment(name, value) for name, value in chosen.items()],
        "imports": imports(values),
        "own_rules": ", ".join(optimization.own_rules(recipe)),
        "continued": recipe.train.continue_from is not None,
        "warmup": "warmup = math.ceil(WARMUP_RATIO * steps)" if ratio else "",
        "schedule": statement("return ", optimization.schedule(recipe.train), indent=4),
        "optimizer": statement("return ", optimization.optimizer(recipe), indent=4),
        "run": _run_arguments(program),
    }


def _run_arguments(program: Program) -> list[str]:
    """Return the arguments of runtime.training.train.run, in its order."""
    names = ["ARTIFACT", "arguments", "model=MODEL", "mesh=MESH"]
    names += ["teacher=TEACHER"] if program.teacher is not None else []
    names += ["lora=LORA"] if program.lora is not None else []
    names += ["data=DATA", "train=TRAIN", "checkpoint=CHECKPOINT"]
    if program.recipe.train.objective == "grpo":
        names += ["rewards=REWARDS", "reward_limits=REWARD_LIMITS"]
    names += ["rollout=ROLLOUT"] if program.generated is not None else []
    names += ["learning_rate=learning_rate", "optimizer=optimizer"]
    names += ["rules=SHARDING_RULES"] if program.rules else []
    return [*names, "cache=CACHE"] if program.recipe.cache.directory is not None else names


def requirements_text(program: Program, packages: Pins, name: str = "train.py") -> str:
    """Return the text of the tested packages of a script and of merge.py."""
    return render(
        "requirements-train.txt",
        scripts=f"{name} and merge.py",
        platform={"tpu": "TPU", "cpu": "CPU"}[program.accelerator.platform],
        runtime=requirement(),
        direct=packages.direct,
        transitive=packages.transitive,
    )


def emit_merge(program: Program) -> str:
    """Return the text of merge.py."""
    recipe = program.recipe
    constants: dict[str, Value] = {
        "MODEL": base_settings(model_settings(recipe, program.family)),
        "CHECKPOINT": recipe.checkpoint.directory,
        "OUTPUT": recipe.merge.output,
        "DTYPE": recipe.merge.dtype,
        "MAX_SHARD_SIZE": recipe.merge.max_shard_size,
    }
    adapter = recipe.merge.adapter and program.lora is not None
    if adapter:
        constants["ADAPTER"] = True
    if recipe.merge.quantization is not None:
        constants["QUANTIZATION"] = recipe.merge.quantization
    return render(
        "merge.py",
        title=docstring(f"{_purpose(program)} {recipe.model.id}."),
        about=about(program),
        adapters=program.lora is not None,
        chat_template=chat_template(program),
        adapter=adapter,
        quantization=recipe.merge.quantization,
        constants=[assignment(name, value) for name, value in constants.items()],
    )


def _purpose(program: Program) -> str:
    if program.lora is None:
        return "Write the weights that train.py makes in the format of"
    return "Merge the adapters that train.py makes into"
