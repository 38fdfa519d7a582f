"""The tools whose files can be ported: a module for each; axolotl_data and the like are its parts.

A dialect module has:
    NAME        its name for --from, "axolotl"
    TITLE       for messages, "Axolotl"
    MARKS       keys that tell it from the others: the more of them stand in a file, the likelier it is
    port(ledger)    goes through ledger.sources and says of every key what became of it; raises Refused where
                    nothing can be made of the file
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from recipec.compiler.port.ledger import Ledger


class Module(Protocol):
    """What a dialect module has."""

    NAME: str
    TITLE: str
    MARKS: Collection[str]

    def port(self, ledger: Ledger) -> None: ...


@dataclass(frozen=True)
class Known:
    """A dialect before its module is imported.

    Attributes:
        module: its name in this package.
        telling: keys to name where none of a dialect's marks is found.
        roles: files of other kinds that belong to it.
        interpolates: whether it reads `${key}` as the value of another key of the file.
        folder: its key for where results go.
        scripts: whether its files are for one of several scripts, which --script names.
    """

    module: str
    telling: str
    roles: tuple[str, ...] = ()
    interpolates: bool = False
    folder: str = "output_dir"
    scripts: bool = False


_GPUS = ("accelerate", "deepspeed")

KNOWN = {
    "axolotl": Known("axolotl", "base_model, datasets, micro_batch_size, sequence_len", _GPUS),
    "llamafactory": Known(
        "llamafactory", "stage, finetuning_type, template, dataset, cutoff_len", (*_GPUS, "dataset_info")
    ),
    "llamafactory_v1": Known(
        "llamafactory_v1",
        "model_class, train_dataset, peft_config, dist_config",
        ("deepspeed", "v1_datasets"),
    ),
    "trl": Known("trl", "dataset_name, use_peft, max_length, attn_implementation", _GPUS, scripts=True),
    "trainer": Known(
        "trainer", "per_device_train_batch_size, adam_epsilon, logging_first_step", ("adapter_config", *_GPUS)
    ),
    "torchtune": Known("torchtune", "model._component_, tokenizer._component_", interpolates=True),
    "automodel": Known(
        "automodel",
        "step_scheduler.global_batch_size, model.pretrained_model_name_or_path, dataset._target_",
        folder="checkpoint.checkpoint_dir",
    ),
    "swift": Known("swift", "tuner_type, split_dataset_ratio, attn_impl, loss_scale, rlhf_type", _GPUS),
    "oumi": Known(
        "oumi",
        "model.model_name, data.train.datasets, training.trainer_type",
        interpolates=True,
        folder="training.output_dir",
    ),
    "litgpt": Known("litgpt", "checkpoint_dir, data.class_path, train.global_batch_size", folder="out_dir"),
    "maxtext": Known(
        "maxtext",
        "base_config, model_name, max_target_length, per_device_batch_size",
        folder="base_output_directory",
    ),
    "tunix": Known(
        "tunix",
        "model_config.model_id, tokenizer_config.tokenizer_type, optimizer_config.opt_type",
        folder="training_config.checkpoint_root_directory",
    ),
}
"""By the name for --from."""


def load(name: str) -> Module:
    """A dialect's module."""
    return cast(Module, import_module(f"recipec.compiler.port.dialects.{KNOWN[name].module}"))


def every() -> list[Module]:
    """All dialects."""
    return [load(name) for name in KNOWN]
