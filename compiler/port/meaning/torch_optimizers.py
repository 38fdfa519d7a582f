"""Optimizers that a file names by their class, with the class's arguments: torchtune's and litgpt's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiler.port.keys import Keys
from compiler.port.meaning import optimizers
from compiler.wording import flow

_ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {**_ADAM, "weight_decay": 0.01},
    "adam": {**_ADAM, "weight_decay": 0.0},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
    "lion": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.0},
    "adafactor": {"lr": 1e-2, "weight_decay": 0.0},
}
"""Of torch.optim's, bitsandbytes' and torchao's classes, by what their names begin with after Paged."""

SPEED = "how the same update is computed"


def speak(keys: Keys, name: str, where: Keys, key: str) -> None:
    """Says what becomes of an optimizer's class and of its arguments.

    Args:
        keys: of its arguments; their defaults are set here.
        name: of the class, "torch.optim.AdamW" or "AdamW".
        where, key: the key that names it.
    """
    found = optimizers.translate(name)
    bare = name.rpartition(".")[2].lower().removeprefix("paged")
    begins = next(
        (kind for kind in ("adamw", "adam", "sgd", "lion", "adafactor") if bare.startswith(kind)), "adamw"
    )
    keys.defaults = {**DEFAULTS[begins], **keys.defaults}
    keys.tool = name.rpartition(".")[2]
    decay = keys.number("weight_decay") or 0.0
    if begins == "adam" and decay == 0.0:
        found = optimizers.ADAMW
    optimizers.say(where, key, name, found, "torch.optim.AdamW")
    keys.say("lr", {"train.optimizer.learning_rate": keys.number("lr")})
    keys.say("weight_decay", {"train.optimizer.weight_decay": decay})
    _betas(keys, found.name)
    if found.name == "adamw":
        keys.say("eps", {"train.optimizer.eps": keys.number("eps")})
    if found.name == "sgd":
        keys.say("momentum", {"train.optimizer.momentum": keys.number("momentum") or 0.0})
        keys.unless("nesterov", (False,), "the momentum is not Nesterov's here")
        keys.unless("dampening", (0,), "the momentum is not dampened here")
    keys.unless("amsgrad", (False,), "the second moment is not held at its largest here")
    keys.unless("maximize", (False,), "the loss is made small here")
    keys.passive(("eps", "betas", "momentum"), f"{found.name} has none")
    passive = (
        "fused",
        "foreach",
        "capturable",
        "differentiable",
        "is_paged",
        "block_wise",
        "bf16_stochastic_round",
    )
    keys.passive(
        (*passive, "optim_bits", "min_8bit_size", "percentile_clipping", "args", "offload_gradients"), SPEED
    )


def _betas(keys: Keys, name: str) -> None:
    if name not in ("adamw", "lion"):
        return
    betas = keys.value("betas")
    if isinstance(betas, str):
        betas = [piece for piece in betas.strip("()[] ").replace(",", " ").split()]
    try:
        first, second = (float(beta) for beta in betas)
    except (TypeError, ValueError):
        keys.refuse("betas", "E1160", f"betas are {flow(betas)}, and not two numbers", "betas: [0.9, 0.999]")
        return
    keys.say("betas", {"train.optimizer.b1": first, "train.optimizer.b2": second})
