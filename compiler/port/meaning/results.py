"""Where a run's results go: its folder, its logs, the hub."""

from __future__ import annotations

from typing import Any

from compiler.port.keys import Keys
from compiler.wording import listing

FOLDER = "where results are kept; here the artifact's output folder"
UPLOAD = "nothing is uploaded here: `hf upload` takes what merge.py writes"
LOGS = "train.log has TensorBoard and Weights & Biases"
OFF: tuple[Any, ...] = (None, False, "", 0, [], "none", "false")
PROJECT = "train.log.wandb_project"
BY_ENVIRONMENT = "transformers asks WANDB_PROJECT, and else takes `huggingface`, as here"
"""Transformers' own rule, of a run whose environment is not among the files."""


def directory(keys: Keys, key: str) -> None:
    """The folder that results go to: the checkpoints' own where it lies in a bucket."""
    given = keys.source.get(keys.prefix + key, None)
    remote = isinstance(given, str) and given.startswith(("gs://", "gcs://"))
    if remote:
        place = "gs://" + str(given).partition("://")[2].rstrip("/")
        keys.same(key, {"checkpoint.directory": place}, "checkpoints go there; merge.output says where else")
    keys.same(key, note=FOLDER)


def report_to(keys: Keys) -> None:
    """transformers' `report_to`: the loggers by name."""
    given = keys.value("report_to")
    names = given if isinstance(given, list) else [given]
    lost = [str(name) for name in names if name not in (*OFF, "all", "tensorboard", "wandb")]
    notes = [f"nothing is logged to {listing(lost)} here: {LOGS}"] if lost else []
    if "wandb" in names:
        keys.say("report_to", {PROJECT: "huggingface"}, "; ".join([BY_ENVIRONMENT, *notes]))
    elif lost:
        keys.unless("report_to", (), notes[0])
    keys.same("report_to", {"train.log.tensorboard": True} if "tensorboard" in names else None, "a log")


HUB = (
    *("push_to_hub", "hub_model_id", "hub_token", "hub_private_repo", "hub_strategy", "hub_always_push"),
    *("hub_revision", "push_to_hub_model_id", "push_to_hub_organization", "push_to_hub_token"),
)
"""transformers' keys of an upload."""


def hub(keys: Keys) -> None:
    """transformers' upload, with what `push_to_hub` needs."""
    pushes = keys.flag("push_to_hub")
    for key in HUB:
        if pushes:
            keys.unless(key, OFF, UPLOAD)
        else:
            keys.same(key, note="without push_to_hub it says nothing" if keys.value(key) else "off")
