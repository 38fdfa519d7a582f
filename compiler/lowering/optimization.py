"""Build a recipe's schedule and optimizer as optax expressions. train.py contains them, a plan evaluates
them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from recipec.compiler.lowering.sizes import needs_master_weights
from recipec.compiler.python_text import Call, Name, Value, source

if TYPE_CHECKING:
    from recipec.runtime.model.families.family import Parameter
    from recipec.spec.language import Optimizer, Recipe, Train


Sides = tuple[tuple[int, ...], tuple[int, ...]]
"""The axes of an array that are a matrix's inputs, and those that are its outputs."""


def hyperparameters(train: Train) -> dict[str, Value]:
    """Return the constants that the schedule and the optimizer use."""
    optimizer, schedule = train.optimizer, train.schedule
    out: dict[str, Value] = {"LEARNING_RATE": optimizer.learning_rate}
    if schedule.warmup_ratio:
        out["WARMUP_RATIO"] = schedule.warmup_ratio
    elif schedule.warmup_steps:
        out["WARMUP_STEPS"] = schedule.warmup_steps
    if schedule.name != "constant":
        out["MIN_LR_RATIO"] = schedule.min_lr_ratio
    return out | _of_optimizer(optimizer)


def _of_optimizer(optimizer: Optimizer) -> dict[str, Value]:
    """Return the optimizer's constants; the learning rate belongs to the schedule."""
    out: dict[str, Value] = {}
    if optimizer.name in ("adamw", "lion", "muon"):
        out |= {"B1": optimizer.b1, "B2": optimizer.b2}
    if optimizer.name == "rmsprop":
        out["B2"] = optimizer.b2
    if optimizer.name in ("adamw", "rmsprop", "muon"):
        out["EPS"] = optimizer.eps
    if optimizer.name == "muon" or (optimizer.name in ("rmsprop", "sgd") and optimizer.momentum):
        out["MOMENTUM"] = optimizer.momentum
    if optimizer.name in ("adamw", "lion") or optimizer.weight_decay:
        out["WEIGHT_DECAY"] = optimizer.weight_decay
    if optimizer.max_grad_norm is not None:
        out["MAX_GRAD_NORM"] = optimizer.max_grad_norm
    return out


def schedule(train: Train) -> Call:
    """Return the optax schedule, with the semantics of transformers' get_*_schedule_with_warmup."""
    peak, final = Name("LEARNING_RATE"), Name("MIN_LR_RATIO * LEARNING_RATE")
    warmup = Name("warmup" if train.schedule.warmup_ratio else "WARMUP_STEPS")
    ramp = Call("optax.linear_schedule", {"*0": 0.0, "*1": peak, "*2": warmup})
    # optax refuses a decay of zero steps, which a run that ends within its warm-up would have.
    end = Name(f"max(steps, {warmup.text} + 1)" if may_end_in_warmup(train) else "steps")
    if train.schedule.name == "constant":
        constant = Call("optax.constant_schedule", {"*0": peak})
        return _joined(ramp, constant, warmup) if _has_warmup(train) else constant
    if train.schedule.name == "linear":
        if not _has_warmup(train):
            return Call("optax.linear_schedule", {"*0": peak, "*1": final, "*2": Name("steps")})
        length = Name(f"{end.text} - {warmup.text}")
        return _joined(ramp, Call("optax.linear_schedule", {"*0": peak, "*1": final, "*2": length}), warmup)
    if not _has_warmup(train):
        arguments: dict[str, Value] = {"*0": peak, "*1": Name("steps"), "alpha": Name("MIN_LR_RATIO")}
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


def may_end_in_warmup(train: Train) -> bool:
    """Return whether the run may have no step after its warm-up."""
    unknown = train.steps is None or bool(train.schedule.warmup_ratio)
    steps = (train.steps or 0) - (train.continue_from or 0)
    return unknown or steps <= (train.schedule.warmup_steps or 0)


def _has_warmup(train: Train) -> bool:
    return bool(train.schedule.warmup_steps or train.schedule.warmup_ratio)


def _joined(first: Call, second: Call, boundary: Name) -> Call:
    return Call("optax.join_schedules", {"*0": [first, second], "*1": [boundary]})


def optimizer(recipe: Recipe) -> Call:
    """Return the optax optimizer, which uses `schedule` and the hyperparameters."""
    settings = recipe.train.optimizer
    links = []
    if settings.max_grad_norm is not None:
        links.append(Call("optax.clip_by_global_norm", {"*0": Name("MAX_GRAD_NORM")}))
    if settings.name in ("rmsprop", "sgd") and settings.weight_decay:
        # As in torch.optim: the decay is added to the gradient, and so to the momentum.
        links.append(Call("optax.add_decayed_weights", {"*0": Name("WEIGHT_DECAY")}))
    links += _LINKS[settings.name](settings) if settings.name in _LINKS else [_rule(settings)]
    if recipe.lora is not None and recipe.lora.loraplus_lr_ratio is not None:
        links.append(Call("faster_b", {"*0": Name("LORA.loraplus_lr_ratio")}))
    chain = links[0] if len(links) == 1 else Call("optax.chain", {f"*{i}": x for i, x in enumerate(links)})
    return Call("master_weights", {"*0": chain}) if needs_master_weights(recipe) else chain


def own_rules(recipe: Recipe) -> list[str]:
    """Return the functions of runtime.training.optimizers that `optimizer` calls."""
    chain = source(optimizer(recipe))
    return [name for name in ("faster_b", "master_weights", "scale_by_muon") if f"{name}(" in chain]


def _adafactor(settings: Optimizer) -> list[Call]:
    """Return optax.adafactor's links, as transformers' Adafactor with scale_parameter and relative_step off.

    optax's own adafactor does not multiply the weight decay by the learning rate.
    """
    decay = [Call("optax.add_decayed_weights", {"*0": Name("WEIGHT_DECAY")})] if settings.weight_decay else []
    return [
        Call("optax.scale_by_factored_rms", {}),
        Call("optax.clip_by_block_rms", {"*0": 1.0}),
        *decay,
        Call("optax.scale_by_learning_rate", {"*0": Name("schedule")}),
    ]


def _rmsprop(settings: Optimizer) -> list[Call]:
    """Return the links of torch.optim.RMSprop.

    optax.rmsprop multiplies by the learning rate before the momentum, PyTorch after it. They differ where
    the rate changes.
    """
    momentum = [Call("optax.trace", {"*0": Name("MOMENTUM")})] if settings.momentum else []
    return [
        Call("optax.scale_by_rms", {"decay": Name("B2"), "eps": Name("EPS"), "eps_in_sqrt": False}),
        *momentum,
        Call("optax.scale_by_learning_rate", {"*0": Name("schedule")}),
    ]


def _muon(settings: Optimizer) -> list[Call]:
    """Return the links of LLaMA-Factory's Muon, which decays all parameters."""
    arguments: dict[str, Value] = {"*0": Name("MATRICES"), "momentum": Name("MOMENTUM")}
    arguments |= {"b1": Name("B1"), "b2": Name("B2"), "eps": Name("EPS")}
    decay = [Call("optax.add_decayed_weights", {"*0": Name("WEIGHT_DECAY")})] if settings.weight_decay else []
    return [
        Call("scale_by_muon", arguments),
        *decay,
        Call("optax.scale_by_learning_rate", {"*0": Name("schedule")}),
    ]


def matrices(parameters: Iterable[Parameter]) -> dict[str, Sides]:
    """Return the axes of the arrays that muon orthogonalizes, by their paths with * for a layer's number.

    These are the tensors with two dimensions in the checkpoint, except embeddings and the head, by the names
    by which the tools recognize them. Arrays of the same name in several layers have the same axes.
    """
    out: dict[str, Sides] = {}
    for parameter in parameters:
        if axes := _matrix_axes(parameter):
            out[NUMBER.sub("*", parameter.path)] = axes
    return out


def _matrix_axes(parameter: Parameter) -> Sides | None:
    """Return the axes of a parameter's inputs and of its outputs, None if it is not of matrices."""
    source = next(iter(parameter.sources), None)
    if source is None or len(source.shape) != 2 or any(part in source.name for part in UNTURNED):
        return None
    outputs, size = 0, 1
    while size < source.shape[0]:
        size *= source.reshape[outputs]
        outputs += 1
    free = [axis for axis in range(len(parameter.shape)) if axis not in parameter.stacked]
    of_output = [place < outputs for place in source.transpose]
    return (
        tuple(axis for axis, is_output in zip(free, of_output, strict=True) if not is_output),
        tuple(axis for axis, is_output in zip(free, of_output, strict=True) if is_output),
    )


NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
UNTURNED = ("embed", "lm_head")
"""Parts of the names of matrices whose updates the tools do not orthogonalize."""
_LINKS = {"adafactor": _adafactor, "rmsprop": _rmsprop, "muon": _muon}


def _rule(settings: Optimizer) -> Call:
    schedule = Name("schedule")
    if settings.name == "sgd":
        momentum: dict[str, Value] = {"momentum": Name("MOMENTUM")} if settings.momentum else {}
        return Call("optax.sgd", {"*0": schedule, **momentum})
    arguments: dict[str, Value] = {"*0": schedule, "b1": Name("B1"), "b2": Name("B2")}
    if settings.name == "adamw":
        arguments["eps"] = Name("EPS")
    return Call(f"optax.{settings.name}", {**arguments, "weight_decay": Name("WEIGHT_DECAY")})
