"""Try values of every kind at every key: what would stop a tool is a diagnostic, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipec.port import dialects
from recipec.port.keys import keys_of, tools
from recipec.port.ledger import Ledger
from recipec.port.source import Source, Sources, parts
from tests.port.dialects import base, beside

ODD: tuple[Any, ...] = (None, {}, "x", float("inf"), [1, {}])
GROUPS = 13
TURNS = [0, *(pytest.param(turn, marks=pytest.mark.nightly) for turn in range(1, len(ODD)))]
"""`make test` gives each key one of the odd values, `make nightly` the others."""

BUILDER = "torchtune.models.llama3_2.lora_llama3_2_1b"
OF_OUMI = ("model", "training", "peft", "fsdp", "deepspeed")
OF_AUTOMODEL = ("step_scheduler", "peft", "lr_scheduler")
MAXTEXT = set(tools()["maxtext"]["sections"]) - {"models", "balance", "LoRA", "DPO"}
PLACES: dict[str, dict[str, tuple[str, ...]]] = {
    "axolotl": {"": ("config",), "datasets[0]": ("SFTDataset",)},
    "llamafactory": {"": ("train",)},
    "trl": {"": ("sft", "dpo", "orpo", "cpo", "kto", "script", "model", "mixture")},
    "trainer": {"": ("training_arguments",)},
    "torchtune": {"": ("lora_finetune_distributed", "full_finetune_distributed"), "model": (BUILDER,)},
    "litgpt": {"": ("lora",), "train": ("train",), "eval": ("eval",)},
    "llamafactory_v1": {"": ("args",)},
    "maxtext": {"": (*sorted(MAXTEXT),), "lora": ("LoRA",), "dpo": ("DPO",)},
    "oumi": {
        "": ("config",),
        **{name: (name,) for name in OF_OUMI},
        "data.train": ("split",),
        "data.train.datasets[0]": ("dataset",),
    },
    "automodel": {**{name: (name,) for name in OF_AUTOMODEL}, "dataset": ("chat",)},
    "swift": {"": ("sft", "rlhf")},
    "tunix": {
        "": ("config",),
        "model_config": ("model",),
        "model_config.lora_config": ("lora",),
        "model_config.mesh": ("mesh",),
        "tokenizer_config": ("tokenizer",),
        "optimizer_config": ("optimizer", "adamw", "linear_schedule"),
        "training_config": ("training_config",),
    },
}
"""The sections of data/dialects.json whose keys are tried, by the place in the file."""
INNER = {
    ("trl", "fsdp_config"): ("activation_checkpointing", "version"),
    ("trl", "deepspeed"): ("optimizer", "scheduler", "gradient_clipping", "tensor_parallel"),
    ("torchtune", "dataset"): ("_component_", "source", "column_map", "train_on_input", "split"),
    ("torchtune", "optimizer"): ("_component_", "lr", "betas", "eps", "weight_decay"),
    ("torchtune", "tokenizer"): ("_component_", "max_seq_len", "prompt_template"),
    ("litgpt", "data"): ("class_path", "init_args"),
    ("litgpt", "optimizer"): ("class_path", "init_args"),
    ("llamafactory_v1", "peft_config"): ("r", "lora_alpha", "lora_dropout", "target_modules", "name"),
    ("llamafactory_v1", "quant_config"): ("quantization_bit", "quantization_type", "name"),
    ("automodel", ""): ("recipe", "model", "peft", "dataset", "optimizer", "lr_scheduler", "distributed"),
    ("automodel", "model"): ("_target_", "pretrained_model_name_or_path", "torch_dtype"),
    ("automodel", "optimizer"): ("_target_", "lr", "betas"),
}
"""Keys of sections that have no list."""

SCRIPTS = ("sft", "dpo", "orpo", "cpo", "kto")
SHARED = keys_of("trl", "script", "model", "mixture")


def within(run: dict[str, Any], section: str, key: str, value: Any) -> dict[str, Any]:
    """Return a run with another value of one key of a section, which may be new."""
    made = json.loads(json.dumps(run))
    node = made
    for part in parts(section):
        node = node[part] if isinstance(node, list) else node.setdefault(part, {})
    node[key] = value
    return made  # type: ignore[no-any-return]


def port(dialect: str, content: dict[str, Any], **others: dict[str, Any]) -> Ledger:
    files = {role: Source(Path(role), role, data) for role, data in (others or beside(dialect)).items()}
    script = next((name for name in SCRIPTS if set(content) <= {*keys_of("trl", name), *SHARED}), "sft")
    main = Source(Path("config.yaml"), "config.yaml", content)
    ledger = Ledger(Sources(main, files), script=script)
    dialects.apply(dialects.load(dialect), ledger)
    return ledger


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("dialect", sorted(PLACES))
def test_odd_value_of_any_key_is_reported_without_traceback(dialect: str, turn: int) -> None:
    """Give each key the next odd value in each round: in `make test`, to all keys of a group at once."""
    run = base(dialect)
    places = [
        (section, key) for section, names in PLACES[dialect].items() for key in keys_of(dialect, *names)
    ]
    places += [(section, key) for (tool, section), keys in INNER.items() for key in keys if tool == dialect]
    places.sort(key=lambda place: -len(place[0]))  # a section's own value replaces those of its keys
    groups = GROUPS if turn == 0 else len(places)
    for group in range(groups):
        made = run
        for number, (section, key) in [*enumerate(places)][group::groups]:
            made = within(made, section, key, ODD[(number + turn) % len(ODD)])
        ledger = port(dialect, made)
        paths = {f"{section}.{key}".lstrip(".") for section, key in places[group::groups]}
        assert paths.isdisjoint(ledger.unread(ledger.sources.main)), made


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_odd_values_of_files_beside_a_config_are_reported(value: Any) -> None:
    for number, key in enumerate(keys_of("peft", "lora")):
        if number % 3 == ODD.index(value) % 3:
            adapter = {"base_model_name_or_path": "Qwen/Qwen3-8B", key: value}
            ledger = port("trainer", {"train_file": "a.jsonl"}, adapter_config=adapter)
            assert key not in ledger.unread(ledger.sources.others["adapter_config"])
    run = {"model_name_or_path": "Qwen/Qwen3-8B", "dataset_name": "a/b", "use_peft": True}
    for number, key in enumerate(keys_of("accelerate", "cluster")):
        if number % 3 == ODD.index(value) % 3:
            ledger = port("trl", run, accelerate={"distributed_type": "FSDP", key: value})
            assert key not in ledger.unread(ledger.sources.others["accelerate"])
