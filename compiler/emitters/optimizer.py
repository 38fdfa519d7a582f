"""The optax chain of a recipe's optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiler.python_text import Call, Name, Value
from compiler.sizes import needs_master_weights

if TYPE_CHECKING:
    from compiler.program import Program
    from spec.language import Optimizer


def hyperparameters(optimizer: Optimizer) -> dict[str, Value]:
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


def optimizer(program: Program) -> Call:
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
