"""Axolotl's optimizers, and the defaults of the classes that it constructs itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from recipec.port.engine import Says
from recipec.port.keys import Keys
from recipec.port.meaning import training, training_arguments
from recipec.port.refusals import E1144, E1160


def say_optimizer(keys: Keys) -> Says:
    """State the optimizer and its arguments."""
    rate = keys.number("learning_rate")
    if rate is None and not keys.stands("learning_rate"):
        message = "`learning_rate` is missing, and Axolotl has no default for it"
        yield keys.refuse("learning_rate", E1144, message, "learning_rate: 2e-4")
    yield keys.same("learning_rate", {"train.optimizer.learning_rate": rate} if rate and rate > 0 else None)
    name = keys.text("optimizer") or "adamw_torch_fused"
    translation = training.optimizer_of(name)
    yield from training.say_optimizer(keys, "optimizer", name, translation, "adamw_torch")
    decay = keys.number("weight_decay")
    note = training_arguments.DECAYED if decay and keys.ledger.value("lora", "") is None else ""
    yield keys.say("weight_decay", {"train.optimizer.weight_decay": decay} if decay is not None else {}, note)
    norm = (keys.number("max_grad_norm") or None) if keys.given("max_grad_norm") else 1.0
    yield keys.default("max_grad_norm", 1.0, {"train.optimizer.max_grad_norm": norm}, "the Trainer's default")
    try:
        arguments = training.arguments(keys.value("optim_args"))
    except (ValueError, AttributeError):
        message = "`optim_args` is not of the form NAME=VALUE"
        yield keys.refuse("optim_args", E1160, message, "optim_args: momentum=0.9")
        arguments = {}
    if translation.name == "rmsprop":
        yield from keys.passive(ADAM, "rmsprop does not read it")
        yield from training_arguments.say_rmsprop(keys, arguments)
        return
    class_name = training.BY_AXOLOTL.get(name)
    defaults = training.TORCH_DEFAULTS[class_name or "adamw"]
    if translation.name in ("adamw", "lion"):
        yield from _moments(keys, defaults, name if class_name else "")
    if translation.name == "adamw":
        eps = (keys.number("adam_epsilon") if keys.given("adam_epsilon") else None) or defaults["eps"]
        yield keys.default(
            "adam_epsilon", defaults["eps"], {"train.optimizer.eps": eps}, _whose(class_name, name)
        )
    yield from keys.passive(ADAM, f"{translation.name} does not have this setting")
    yield from _arguments(keys, name, class_name, translation.name, arguments)


ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")


def _whose(class_name: str | None, name: str) -> str:
    return f"the default of {name}'s class" if class_name else "the Trainer's default"


def _moments(keys: Keys, defaults: Mapping[str, Any], class_name: str) -> Says:
    """State the decays of the moments. Axolotl gives its own classes both of them or neither."""
    names = ("adam_beta1", "adam_beta2")
    values = [keys.number(key) if keys.given(key) else None for key in names]
    alone = class_name and not all(values)
    for key, path, value, default in zip(names, ("b1", "b2"), values, defaults["betas"], strict=True):
        used = default if alone or value is None else value
        sets = {f"train.optimizer.{path}": used}
        if alone and keys.given(key):
            yield keys.same(
                key, sets, f"Axolotl gives {class_name} both betas or neither: the class's default applies"
            )
        yield keys.default(key, default, sets, _whose(class_name, class_name))


EXAMPLES = {"momentum": "0.9", "eps": "1e-8"}


def _arguments(
    keys: Keys, name: str, class_name: str | None, rule: str, arguments: Mapping[str, str]
) -> Says:
    """State `optim_args`, arguments of the class. Transformers passes on those of a few optimizers."""
    read = (
        {"momentum": "momentum"}
        if rule == "sgd"
        else {"eps": "eps"}
        if class_name and rule == "adamw"
        else {}
    )
    sets: dict[str, Any] = {}
    for key, text in arguments.items():
        if key in read:
            try:
                sets[f"train.optimizer.{read[key]}"] = float(text)
            except ValueError:
                message = f"optim_args: {key} is {text}, which is not a number"
                yield keys.refuse("optim_args", E1160, message, f"optim_args: {key}={EXAMPLES[key]}")
    lost = [key for key in arguments if key not in read]
    if lost and (class_name or rule == "sgd"):
        note = f"{', '.join(lost)}: recipec's optimizer does not have these settings"
        yield keys.say("optim_args", sets, note)
    yield keys.same("optim_args", sets, f"{name} does not read them" if lost else "")
