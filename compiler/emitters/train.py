"""train.py: the recipe's values as constants, its schedule and its optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiler.emitters.chat_template import template_file
from compiler.emitters.python import Call, Name, Value, assignment, docstring, statement, string
from compiler.emitters.settings import about, lora_settings, model_settings
from compiler.render import render

if TYPE_CHECKING:
    from compiler.program import Program


def emit_train(program: Program) -> str:
    """The text of train.py."""
    recipe = program.recipe
    template = template_file(program)
    return render(
        "train.py",
        title=docstring(f"LoRA fine-tuning of {recipe.model.id} on {program.accelerator.name}."),
        about=about(program),
        math=recipe.train.schedule.warmup_ratio is not None,
        lora=program.lora is not None,
        chat_template=template and assignment("CHAT_TEMPLATE", Name(f"ARTIFACT / {string(template)}")),
        constants=[assignment(name, value) for name, value in _constants(program).items()],
        hyperparameters=[assignment(name, value) for name, value in _hyperparameters(program).items()],
        warmup=_warmup(program),
        schedule=statement("return ", _schedule(program), indent=4),
        optimizer=statement("return ", _optimizer(program), indent=4),
        run=_run_arguments(program),
    )


def _run_arguments(program: Program) -> list[str]:
    """The arguments of runtime.train.run, in its order."""
    settings = ["MODEL", "MESH", "LORA", "DATA", "TRAIN", "CHECKPOINT"]
    names = ["ARTIFACT", "arguments", *settings, "learning_rate", "optimizer"]
    return [*names, "rules=SHARDING_RULES"] if program.rules else names


def _constants(program: Program) -> dict[str, Value]:
    recipe, lora = program.recipe, program.lora
    out: dict[str, Value] = {
        "MODEL": model_settings(program),
        "MESH": Call(
            "MeshSettings",
            {
                "platform": program.accelerator.platform,
                "devices": program.accelerator.devices,
                "axes": dict(recipe.mesh.axes),
            },
        ),
    }
    if program.rules:
        out["SHARDING_RULES"] = tuple((match, tuple(spec)) for match, spec in program.rules)
    if lora is not None:
        out["LORA"] = lora_settings(lora)
    out["DATA"] = _data(program)
    out["TRAIN"] = _train(program)
    checkpoint = recipe.checkpoint
    out["CHECKPOINT"] = Call(
        "CheckpointSettings",
        {
            "directory": checkpoint.directory,
            "every_steps": checkpoint.every_steps,
            "keep": checkpoint.keep,
        },
    )
    return out


def _data(program: Program) -> Call:
    data = program.recipe.data
    arguments: dict[str, Value] = {"train": tuple(source.path for source in data.train)}
    if data.eval:
        arguments["eval"] = tuple(source.path for source in data.eval)
    if data.fields:
        arguments["fields"] = dict(data.fields)
    if data.chat_template is not None:
        arguments["chat_template"] = Name('CHAT_TEMPLATE.read_text(encoding="utf-8")')
    arguments |= {
        "loss_on": data.loss_on,
        "max_length": data.max_length,
        "overlong": data.overlong,
        "packing": data.packing,
        "shuffle_seed": data.shuffle_seed,
    }
    return Call("DataSettings", arguments)


def _train(program: Program) -> Call:
    train = program.recipe.train
    arguments: dict[str, Value] = {
        "epochs": train.epochs,
        "steps": train.steps,
        "global_batch_size": train.global_batch_size,
        "micro_batch_size": train.micro_batch_size,
        "loss_normalization": train.loss_normalization,
    }
    if program.recipe.data.eval:
        arguments["eval_every"] = train.eval_every
    arguments |= {"seed": train.seed, "log_every": train.log.every, "tensorboard": train.log.tensorboard}
    return Call("TrainSettings", arguments)


def _hyperparameters(program: Program) -> dict[str, Value]:
    """What the schedule and the optimizer are made of."""
    optimizer, schedule = program.recipe.train.optimizer, program.recipe.train.schedule
    out: dict[str, Value] = {"LEARNING_RATE": optimizer.learning_rate}
    if schedule.warmup_ratio is not None:
        out["WARMUP_RATIO"] = schedule.warmup_ratio
    elif schedule.warmup_steps:
        out["WARMUP_STEPS"] = schedule.warmup_steps
    if schedule.name != "constant":
        out["FINAL_RATIO"] = schedule.final_ratio
    out |= {
        "B1": optimizer.b1,
        "B2": optimizer.b2,
        "EPS": optimizer.eps,
        "WEIGHT_DECAY": optimizer.weight_decay,
    }
    if optimizer.max_grad_norm is not None:
        out["MAX_GRAD_NORM"] = optimizer.max_grad_norm
    return out


def _has_warmup(program: Program) -> bool:
    schedule = program.recipe.train.schedule
    return bool(schedule.warmup_steps or schedule.warmup_ratio)


def _warmup(program: Program) -> str:
    """The statements that the schedule needs before it, "" for none."""
    schedule = program.recipe.train.schedule
    return "warmup = math.ceil(WARMUP_RATIO * steps)" if schedule.warmup_ratio is not None else ""


def _schedule(program: Program) -> Call:
    """The optax schedule, with the semantics of transformers' get_*_schedule_with_warmup."""
    train = program.recipe.train
    peak, final = Name("LEARNING_RATE"), Name("FINAL_RATIO * LEARNING_RATE")
    warmup = Name("WARMUP_STEPS" if train.schedule.warmup_ratio is None else "warmup")
    ramp = Call("optax.linear_schedule", {"*0": 0.0, "*1": peak, "*2": warmup})
    # optax refuses a decay of no steps, which a run that ends within its warm-up would have.
    may_end_in_warmup = train.steps is None or train.schedule.warmup_ratio is not None
    end = Name(f"max(steps, {warmup.text} + 1)" if may_end_in_warmup else "steps")
    if train.schedule.name == "constant":
        constant = Call("optax.constant_schedule", {"*0": peak})
        return _joined(ramp, constant, warmup) if _has_warmup(program) else constant
    if train.schedule.name == "linear":
        if not _has_warmup(program):
            return Call("optax.linear_schedule", {"*0": peak, "*1": final, "*2": Name("steps")})
        length = Name(f"{end.text} - {warmup.text}")
        return _joined(ramp, Call("optax.linear_schedule", {"*0": peak, "*1": final, "*2": length}), warmup)
    if not _has_warmup(program):
        arguments: dict[str, Value] = {"*0": peak, "*1": Name("steps"), "alpha": Name("FINAL_RATIO")}
        return Call("optax.cosine_decay_schedule", arguments)
    return Call(
        "optax.warmup_cosine_decay_schedule",
        {
            "init_value": 0.0,
            "peak_value": peak,
            "warmup_steps": warmup,
            "decay_steps": end,
            "end_value": final,
        },
    )


def _joined(first: Call, second: Call, boundary: Name) -> Call:
    return Call("optax.join_schedules", {"*0": [first, second], "*1": [boundary]})


def _optimizer(program: Program) -> Call:
    adamw = Call(
        "optax.adamw",
        {
            "*0": Name("schedule"),
            "b1": Name("B1"),
            "b2": Name("B2"),
            "eps": Name("EPS"),
            "weight_decay": Name("WEIGHT_DECAY"),
        },
    )
    if program.recipe.train.optimizer.max_grad_norm is None:
        return adamw
    clip = Call("optax.clip_by_global_norm", {"*0": Name("MAX_GRAD_NORM")})
    return Call("optax.chain", {"*0": clip, "*1": adamw})
