"""train.py: the recipe's values as constants, its schedule and its optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recipec.compiler.emitters.data_files import template_file
from recipec.compiler.emitters.python_text import Call, Name, Value, assignment, docstring, statement, string
from recipec.compiler.emitters.render import render
from recipec.compiler.emitters.settings import about, devices, kind, lora_settings, model_settings
from recipec.compiler.lowering.sizes import needs_master_weights
from recipec.runtime.training.objectives import OBJECTIVES

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.spec.language import DataSource, Optimizer


def emit_train(program: Program) -> str:
    """The text of train.py."""
    title = docstring(f"{kind(program)} of {program.recipe.model.id} on {devices(program)}.")
    return render("train.py", title=title, torchax=False, **script(program))


def script(program: Program) -> dict[str, Any]:
    """What the template of train.py, and of train_torchax.py, is filled with."""
    template = template_file(program)
    return {
        "about": about(program),
        "math": program.recipe.train.schedule.warmup_ratio is not None,
        "lora": program.lora is not None,
        "chat_template": template and assignment("CHAT_TEMPLATE", Name(f"ARTIFACT / {string(template)}")),
        "constants": [assignment(name, value) for name, value in _constants(program).items()],
        "hyperparameters": [
            assignment(name, value) for name, value in hyperparameter_constants(program).items()
        ],
        "imports": settings_classes(program),
        "master_weights": needs_master_weights(program.recipe),
        "warmup": _warmup(program),
        "schedule": statement("return ", schedule(program), indent=4),
        "optimizer": statement("return ", _chain(program), indent=4),
        "run": _run_arguments(program),
    }


def _run_arguments(program: Program) -> list[str]:
    """The arguments of runtime.training.train.run, in its order."""
    names = ["ARTIFACT", "arguments", "model=MODEL", "mesh=MESH"]
    names += ["lora=LORA"] if program.lora is not None else []
    names += ["data=DATA", "train=TRAIN", "checkpoint=CHECKPOINT"]
    names += ["learning_rate=learning_rate", "optimizer=optimizer"]
    names += ["rules=SHARDING_RULES"] if program.rules else []
    return [*names, "cache=CACHE"] if program.recipe.cache.directory is not None else names


def settings_classes(program: Program) -> list[str]:
    """What the script imports from runtime.settings."""
    names = ["CheckpointSettings", "DataSettings"]
    names += ["LocalCheckpointSettings"] if program.recipe.checkpoint.local is not None else []
    names += ["MeshSettings", "ModelSettings"]
    data = program.recipe.data
    names += ["Source"] if any(_is_more_than_a_path(s) for s in (*data.train, *data.eval)) else []
    return [*names, "TrainSettings"]


def _constants(program: Program) -> dict[str, Value]:
    recipe, lora = program.recipe, program.lora
    out: dict[str, Value] = {"MODEL": model_settings(program), "MESH": _mesh_settings(program)}
    if program.rules:
        out["SHARDING_RULES"] = tuple((match, tuple(spec)) for match, spec in program.rules)
    if lora is not None:
        out["LORA"] = lora_settings(lora)
    out["DATA"] = data_settings(program)
    out["TRAIN"] = train_settings(program)
    checkpoint = recipe.checkpoint
    saving: dict[str, Value] = {
        "directory": checkpoint.directory,
        "every_steps": checkpoint.every_steps,
        "keep": checkpoint.keep,
    }
    if checkpoint.local is not None:
        saving["local"] = Call(
            "LocalCheckpointSettings",
            {"directory": checkpoint.local.directory, "every_steps": checkpoint.local.every_steps},
        )
    out["CHECKPOINT"] = Call("CheckpointSettings", saving)
    if recipe.cache.directory is not None:
        out["CACHE"] = recipe.cache.directory
    return out


def _mesh_settings(program: Program) -> Call:
    """`MeshSettings(...)` of the recipe."""
    accelerator = program.accelerator
    arguments: dict[str, Value] = {
        "platform": accelerator.platform,
        "devices": accelerator.devices,
        "axes": dict(program.recipe.mesh.axes),
    }
    if accelerator.hosts > 1:
        arguments["hosts"] = accelerator.hosts
    return Call("MeshSettings", arguments)


def data_settings(program: Program) -> Call:
    """`DataSettings(...)` of the recipe."""
    data = program.recipe.data
    arguments: dict[str, Value] = {"train": tuple(_source(source) for source in data.train)}
    if data.eval:
        arguments["eval"] = tuple(_source(source) for source in data.eval)
    if data.eval_fraction is not None:
        arguments |= {"eval_fraction": data.eval_fraction, "eval_seed": data.eval_seed}
    arguments["format"] = data.format
    if data.fields:
        arguments["fields"] = dict(data.fields)
    if data.transform is not None:
        path, _, function = data.transform.partition(":")
        file = string(path, quote="'")
        arguments["transform"] = Name(f'f"{{ARTIFACT / {file}}}:{function}"')
    if data.chat_template is not None:
        arguments["chat_template"] = Name('CHAT_TEMPLATE.read_text(encoding="utf-8")')
    arguments |= {
        "loss_on": data.loss_on,
        "max_length": data.max_length,
        "overlong": data.overlong,
        "max_invalid_ratio": data.max_invalid_ratio,
        "packing": data.packing,
        "shuffle_seed": data.shuffle_seed,
    }
    return Call("DataSettings", arguments)


def _source(source: DataSource) -> Value:
    """A source's path, or all of it where there is more to say."""
    if not _is_more_than_a_path(source):
        return source.path
    arguments: dict[str, Value] = {"*0": source.path}
    if source.weight != 1.0:
        arguments["weight"] = source.weight
    if source.split is not None:
        arguments["split"] = source.split
    if source.config is not None:
        arguments["config"] = source.config
    if source.limit is not None:
        arguments["limit"] = source.limit
    return Call("Source", arguments)


def _is_more_than_a_path(source: DataSource) -> bool:
    return source.weight != 1.0 or any(
        value is not None for value in (source.split, source.config, source.limit)
    )


def train_settings(program: Program) -> Call:
    """`TrainSettings(...)` of the recipe."""
    train = program.recipe.train
    arguments: dict[str, Value] = {}
    if train.objective != "sft":
        arguments["objective"] = train.objective
    arguments |= {name: getattr(train, name) for name in OBJECTIVES[train.objective].settings}
    length: Value = train.epochs if train.steps is None else train.steps
    arguments |= {
        "epochs" if train.steps is None else "steps": length,
        "global_batch_size": train.global_batch_size,
        "micro_batch_size": train.micro_batch_size,
        "loss_normalization": train.loss_normalization,
    }
    if program.recipe.data.evaluates:
        arguments["eval_every"] = train.eval_every
    arguments |= {"seed": train.seed, "log_every": train.log.every, "tensorboard": train.log.tensorboard}
    if train.log.wandb_project is not None:
        arguments["wandb_project"] = train.log.wandb_project
    return Call("TrainSettings", arguments)


def hyperparameter_constants(program: Program) -> dict[str, Value]:
    """What the schedule and the optimizer are made of."""
    optimizer, schedule = program.recipe.train.optimizer, program.recipe.train.schedule
    out: dict[str, Value] = {"LEARNING_RATE": optimizer.learning_rate}
    if schedule.warmup_ratio is not None:
        out["WARMUP_RATIO"] = schedule.warmup_ratio
    elif schedule.warmup_steps:
        out["WARMUP_STEPS"] = schedule.warmup_steps
    if schedule.name != "constant":
        out["FINAL_RATIO"] = schedule.final_ratio
    return out | _hyperparameters(optimizer)


def _has_warmup(program: Program) -> bool:
    schedule = program.recipe.train.schedule
    return bool(schedule.warmup_steps or schedule.warmup_ratio)


def _warmup(program: Program) -> str:
    """The statements that the schedule needs before it, "" for none."""
    schedule = program.recipe.train.schedule
    return "warmup = math.ceil(WARMUP_RATIO * steps)" if schedule.warmup_ratio is not None else ""


def schedule(program: Program) -> Call:
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


def _hyperparameters(optimizer: Optimizer) -> dict[str, Value]:
    """The constants that the optimizer is made of; the learning rate is the schedule's."""
    out: dict[str, Value] = {}
    if optimizer.name in ("adamw", "lion"):
        out |= {"B1": optimizer.b1, "B2": optimizer.b2}
    if optimizer.name == "adamw":
        out["EPS"] = optimizer.eps
    if optimizer.name == "sgd" and optimizer.momentum:
        out["MOMENTUM"] = optimizer.momentum
    if optimizer.name in ("adamw", "lion") or optimizer.weight_decay:
        out["WEIGHT_DECAY"] = optimizer.weight_decay
    if optimizer.max_grad_norm is not None:
        out["MAX_GRAD_NORM"] = optimizer.max_grad_norm
    return out


def _chain(program: Program) -> Call:
    """The expression that train.py's `optimizer` returns."""
    settings = program.recipe.train.optimizer
    links = []
    if settings.max_grad_norm is not None:
        links.append(Call("optax.clip_by_global_norm", {"*0": Name("MAX_GRAD_NORM")}))
    if settings.name == "sgd" and settings.weight_decay:
        # As in torch.optim.SGD: the decay is part of the gradient, and of its running sum.
        links.append(Call("optax.add_decayed_weights", {"*0": Name("WEIGHT_DECAY")}))
    links += _adafactor(settings) if settings.name == "adafactor" else [_rule(settings)]
    chain = links[0] if len(links) == 1 else Call("optax.chain", {f"*{i}": x for i, x in enumerate(links)})
    return Call("master_weights", {"*0": chain}) if needs_master_weights(program.recipe) else chain


def _adafactor(settings: Optimizer) -> list[Call]:
    """optax.adafactor's links, as transformers' Adafactor with scale_parameter and relative_step off.

    optax's own does not multiply the weight decay by the learning rate.
    """
    decay = [Call("optax.add_decayed_weights", {"*0": Name("WEIGHT_DECAY")})] if settings.weight_decay else []
    return [
        Call("optax.scale_by_factored_rms", {}),
        Call("optax.clip_by_block_rms", {"*0": 1.0}),
        *decay,
        Call("optax.scale_by_learning_rate", {"*0": Name("schedule")}),
    ]


def _rule(settings: Optimizer) -> Call:
    schedule = Name("schedule")
    if settings.name == "sgd":
        momentum: dict[str, Value] = {"momentum": Name("MOMENTUM")} if settings.momentum else {}
        return Call("optax.sgd", {"*0": schedule, **momentum})
    arguments: dict[str, Value] = {"*0": schedule, "b1": Name("B1"), "b2": Name("B2")}
    if settings.name == "adamw":
        arguments["eps"] = Name("EPS")
    return Call(f"optax.{settings.name}", {**arguments, "weight_decay": Name("WEIGHT_DECAY")})
