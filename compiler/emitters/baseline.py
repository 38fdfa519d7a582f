"""Emit baseline/: the same run by transformers, TRL and PEFT on GPUs, with a configuration for accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from recipec.compiler.artifacts.runtime import requirement
from recipec.compiler.catalog import class_name
from recipec.compiler.emitters import settings_text
from recipec.compiler.emitters.settings_text import about, chat_template, constructor, imports, kind
from recipec.compiler.lowering import pins
from recipec.compiler.lowering.optimization import hyperparameters, may_end_in_warmup
from recipec.compiler.lowering.runtime_settings import run_settings
from recipec.compiler.lowering.sizes import needs_master_weights
from recipec.compiler.python_text import Call, Name, Value, assignment, docstring, statement
from recipec.compiler.render import render

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.spec.language import Recipe

LAYERS = {
    "Gemma4": "Gemma4TextDecoderLayer",
    "Gemma4Unified": "Gemma4UnifiedTextDecoderLayer",
    "Jamba": "JambaAttentionDecoderLayer,JambaMambaDecoderLayer",
    "Llama4": "Llama4TextDecoderLayer",
    "GPTNeoX": "GPTNeoXLayer",
    "NemotronH": "NemotronHBlock",
    "PaddleOCRVL": "PaddleOCRDecoderLayer",
    "Qwen3VL": "Qwen3VLTextDecoderLayer",
    "Qwen3VLMoe": "Qwen3VLMoeTextDecoderLayer",
}
"""The decoder layer's class, where its name does not follow from the causal model's class; several with
commas."""


def emit_baseline(program: Program) -> dict[str, str]:
    """Return the texts of baseline/'s files, by path in the artifact."""
    return {
        "baseline/train_trl.py": _script(program),
        "baseline/accelerate.yaml": _accelerate(program),
        "baseline/requirements-trl.txt": _requirements(program),
    }


def processes(program: Program) -> int:
    """Return the baseline's GPUs: one per device if the global batch splits over all, else per data-parallel
    one."""
    if program.accelerator.platform == "cpu":
        return 1
    train, devices = program.recipe.train, program.accelerator.devices
    splits = train.global_batch_size % (train.micro_batch_size * devices) == 0
    return devices if splits else program.data_parallel


def _script(program: Program) -> str:
    recipe, constants = program.recipe, _constants(program)
    values = hyperparameters(recipe.train)
    if not recipe.train.schedule.min_lr_ratio:
        values.pop("MIN_LR_RATIO", None)
    schedule = _schedule(program)
    return render(
        "baseline/train_trl.py",
        title=docstring(f"{kind(program)} of {recipe.model.id} by transformers, TRL and PEFT."),
        about=about(program),
        math=any("math." in line for line in schedule),
        adafactor=recipe.train.optimizer.name == "adafactor",
        lora=program.lora is not None,
        generates=recipe.train.objective == "grpo",
        imports=imports(constants),
        chat_template=chat_template(program),
        constants=[assignment(name, value) for name, value in constants.items()],
        hyperparameters=[assignment(name, value) for name, value in values.items()],
        optimizer=statement("return ", _optimizer(program), indent=4),
        schedule=schedule,
        run=_run_arguments(program),
    )


def _constants(program: Program) -> dict[str, Value]:
    """Return the constants of train.py, without those that describe the devices."""
    recipe, run = program.recipe, run_settings(program)
    out = settings_text.constants(run, program)
    for name in ("MESH", "SHARDING_RULES", "CHECKPOINT", "ROLLOUT"):
        out.pop(name, None)
    out["MICRO_BATCH_ROWS"] = program.micro_batch_rows
    saving = replace(run.checkpoint, directory=checkpoint_folder(recipe), local=None)
    out["CHECKPOINT"] = constructor(saving)
    if recipe.cache.directory is not None and "://" not in recipe.cache.directory:
        out["CACHE"] = recipe.cache.directory
    return out


def checkpoint_folder(recipe: Recipe) -> str:
    """Return the folder of the checkpoints. The Trainer writes only to folders, not to addresses."""
    directory = recipe.checkpoint.directory
    return f"{'checkpoints' if '://' in directory else directory.rstrip('/')}-trl"


def _optimizer(program: Program) -> Call:
    settings = program.recipe.train.optimizer
    arguments: dict[str, Value] = {"*0": Name("parameters"), "lr": Name("LEARNING_RATE")}
    if settings.name == "adamw":
        arguments |= {"betas": Name("(B1, B2)"), "eps": Name("EPS"), "weight_decay": Name("WEIGHT_DECAY")}
        return Call("torch.optim.AdamW", arguments)
    if settings.name == "rmsprop":
        arguments |= {"alpha": Name("B2"), "eps": Name("EPS")}
    if settings.name in ("rmsprop", "sgd") and settings.momentum:
        arguments["momentum"] = Name("MOMENTUM")
    if settings.weight_decay:
        arguments["weight_decay"] = Name("WEIGHT_DECAY")
    if settings.name == "adafactor":
        arguments |= {"scale_parameter": False, "relative_step": False}
        return Call("Adafactor", arguments)
    return Call("torch.optim.RMSprop" if settings.name == "rmsprop" else "torch.optim.SGD", arguments)


def _schedule(program: Program) -> list[str]:
    """Return the body of `learning_rate`, with the semantics of transformers' get_*_schedule_with_warmup."""
    train = program.recipe.train
    schedule = train.schedule
    lines, warmup = [], ""
    if schedule.warmup_ratio:
        warmup = "warmup"
        lines.append("warmup = math.ceil(WARMUP_RATIO * steps)")
    elif schedule.warmup_steps:
        warmup = "WARMUP_STEPS"
    if warmup:
        lines += [f"if step < {warmup}:", f"    return LEARNING_RATE * step / {warmup}"]
    if schedule.name == "constant":
        return [*lines, "return LEARNING_RATE"]
    if warmup:
        length = f"max(steps - {warmup}, 1)" if may_end_in_warmup(train) else f"(steps - {warmup})"
        lines.append(f"done = (step - {warmup}) / {length}")
    else:
        lines.append("done = step / steps")
    left = "1 - done" if schedule.name == "linear" else "(1 + math.cos(math.pi * done)) / 2"
    if not schedule.min_lr_ratio:
        brackets = f"({left})" if schedule.name == "linear" else left
        return [*lines, f"return LEARNING_RATE * {brackets}"]
    lines.append(f"left = {left}")
    return [*lines, "return LEARNING_RATE * (MIN_LR_RATIO + (1 - MIN_LR_RATIO) * left)"]


def _run_arguments(program: Program) -> list[str]:
    """Return the arguments of runtime.backends.trl.trl_run.run, in its order."""
    names = ["ARTIFACT", "arguments", "model=MODEL"]
    names += ["lora=LORA"] if program.lora is not None else []
    names += ["data=DATA", "train=TRAIN", "checkpoint=CHECKPOINT"]
    names += ["optimizer=optimizer", "schedule=schedule"]
    names.append("micro_batch_rows=MICRO_BATCH_ROWS")
    if program.recipe.train.optimizer.max_grad_norm is not None:
        names.append("max_grad_norm=MAX_GRAD_NORM")
    if needs_master_weights(program.recipe):
        names.append("master_weights=True")
    if "CACHE" in _constants(program):
        names.append("cache=CACHE")
    if program.recipe.train.objective == "grpo":
        names += ["rewards=REWARDS", "reward_limits=REWARD_LIMITS"]
    return names


def _accelerate(program: Program) -> str:
    recipe, count = program.recipe, processes(program)
    cpu = program.accelerator.platform == "cpu"
    return render(
        "baseline/accelerate.yaml",
        name=program.name,
        device="a CPU" if cpu else "a GPU" if count == 1 else f"{count} GPUs",
        cpu=cpu,
        processes=count,
        rows=recipe.train.global_batch_size,
        master_weights=needs_master_weights(program.recipe),
        bfloat16_base=recipe.model.dtype == "bfloat16" and program.lora is not None,
        layer=decoder_layer(program.config),
        efficient="false" if _loads_everywhere(program) else "true",
    )


def _loads_everywhere(program: Program) -> bool:
    """Return whether each process has to read the checkpoint itself.

    accelerate 1.15 broadcasts only parameters. It leaves out quantized weights, and Gemma 4's layer_scalar,
    which is a buffer of the checkpoint.
    """
    quantized = program.recipe.model.quantization is not None
    return quantized or any(parameter.buffer for parameter in program.parameters)


def _requirements(program: Program) -> str:
    packages = pins.trl(program)
    return render(
        "baseline/requirements-trl.txt",
        runtime=requirement(),
        direct=packages.direct,
        transitive=packages.transitive,
    )


def decoder_layer(config: Mapping[str, Any]) -> str:
    """Return transformers' class of a decoder layer. FSDP gathers the weights of one such layer at a time."""
    name = class_name(config)
    return LAYERS.get(name, f"{name}DecoderLayer")
