"""The tools whose files can be ported. Each has a module. Some have further modules, like axolotl_data.

A dialect module has:
    NAME        its name for --from, "axolotl"
    TITLE       its name in messages, "Axolotl"
    MARKS       keys that distinguish it from the others; the tool with the most of them in a file is chosen
    RULES       the rules, which say what every key becomes, in their order; see engine.py
    opened(ledger)  returns the run whose keys they read

A rule or `opened` raises Refused if the file cannot be ported at all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

from recipec.port import engine
from recipec.port.engine import Rule
from recipec.port.ledger import Ledger
from recipec.port.meaning.run import Run


class Module(Protocol):
    """The interface of a dialect module."""

    NAME: str
    TITLE: str
    MARKS: Collection[str]

    RULES: Sequence[Rule[Any]]

    def opened(self, ledger: Ledger) -> Run: ...


@dataclass(frozen=True)
class Known:
    """What is known of a dialect before its module is imported.

    Attributes:
        module: the module's name in this package.
        telling: keys that a message names if a file has none of the dialect's marks.
        roles: the kinds of other files that it reads.
        interpolates: whether it reads `${key}` as the value of another key of the file.
        folder: its key for the folder of results.
        scripts: whether its files are for one of several scripts, which --script names.
        extra: whether the tool accepts keys that it does not have. The others stop at one.
    """

    module: str
    telling: str
    roles: tuple[str, ...] = ()
    interpolates: bool = False
    folder: str = "output_dir"
    scripts: bool = False
    extra: bool = False


_GPUS = ("accelerate", "deepspeed")

KNOWN = {
    "axolotl": Known("axolotl", "base_model, datasets, micro_batch_size, sequence_len", _GPUS, extra=True),
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
        "trainer",
        "per_device_train_batch_size, adam_epsilon, logging_first_step",
        ("adapter_config", *_GPUS),
    ),
    "torchtune": Known(
        "torchtune", "model._component_, tokenizer._component_", interpolates=True, extra=True
    ),
    "automodel": Known(
        "automodel",
        "step_scheduler.global_batch_size, model.pretrained_model_name_or_path, dataset._target_",
        folder="checkpoint.checkpoint_dir",
        extra=True,
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
    "open_instruct": Known(
        "open_instruct",
        "dataset_mixer_list, use_lora, num_unique_prompts_rollout, with_tracking",
        _GPUS,
        scripts=True,
    ),
    "tunix": Known(
        "tunix",
        "model_config.model_id, tokenizer_config.tokenizer_type, optimizer_config.opt_type",
        folder="training_config.checkpoint_root_directory",
        extra=True,
    ),
}
"""The dialects by their names for --from."""


def load(name: str) -> Module:
    """Import a dialect's module."""
    return cast(Module, import_module(f"recipec.port.dialects.{KNOWN[name].module}"))


def every() -> list[Module]:
    """Import all dialects."""
    return [load(name) for name in KNOWN]


def apply(dialect: Module, ledger: Ledger) -> None:
    """Record in the ledger what every key of its files becomes.

    Raises:
        Refused: the files cannot be ported at all.
    """
    engine.apply(dialect.RULES, dialect.opened(ledger))
