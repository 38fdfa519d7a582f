"""Try values of every kind at every key: what would stop a tool is a diagnostic, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.port import dialects
from recipec.compiler.port.keys import keys_of, tools
from recipec.compiler.port.ledger import Ledger
from recipec.compiler.port.source import Source, Sources, parts

ODD: tuple[Any, ...] = (None, {}, "x", float("inf"), [1, {}])
TURNS = [0, *(pytest.param(turn, marks=pytest.mark.nightly) for turn in range(1, len(ODD)))]
"""`make test` gives each key one of the odd values, `make nightly` the others."""

TORCHTUNE = {
    "model": {"_component_": "torchtune.models.llama3_2.lora_llama3_2_1b", "lora_attn_modules": ["q_proj"]},
    "dataset": {"_component_": "torchtune.datasets.instruct_dataset", "source": "a/b"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4},
    "batch_size": 1,
}
OUMI = {
    "model": {"model_name": "Qwen/Qwen3-8B"},
    "data": {"train": {"datasets": [{"dataset_name": "yahma/alpaca-cleaned"}]}},
    "training": {"use_peft": True, "trainer_type": "TRL_SFT"},
}
BASES: dict[str, dict[str, Any]] = {
    "trl": {"model_name_or_path": "Qwen/Qwen3-8B", "dataset_name": "a/b", "use_peft": True},
    "trainer": {"model_name_or_path": "Qwen/Qwen3-8B", "dataset_name": "a/b"},
    "torchtune": TORCHTUNE,
    "litgpt": {"checkpoint_dir": "Qwen/Qwen3-8B", "lora_r": 4},
    "llamafactory_v1": {"model": "Qwen/Qwen3-8B", "peft_config": {"name": "lora"}, "train_dataset": "a/b"},
    "maxtext": {"model_name": "qwen3-8b", "steps": 10, "lora": {"enable_lora": True, "lora_rank": 4}},
    "oumi": OUMI,
    "automodel": {"model": {"pretrained_model_name_or_path": "Qwen/Qwen3-8B"}, "optimizer": {"lr": 1e-4}},
    "swift": {"model": "Qwen/Qwen3-8B", "dataset": ["a.jsonl"], "tuner_type": "lora"},
    "tunix": {
        "model_config": {"model_id": "Qwen/Qwen3-8B", "lora_config": {"module_path": ".*q_proj", "rank": 4}},
        "optimizer_config": {"opt_type": "adamw", "learning_rate": 1e-4},
        "training_config": {"eval_every_n_steps": 5},
    },
}
KEYS: dict[str, list[str]] = {
    "trl": [
        *keys_of("trl", "sft", "dpo", "orpo", "cpo", "kto", "script", "model", "mixture"),
        "env",
        "num_processes",
    ],
    "trainer": [*keys_of("trainer", "training_arguments"), "max_train_samples", "max_seq_length"],
    "torchtune": sorted({*keys_of("torchtune", "lora_finetune_distributed", "full_finetune_distributed")}),
    "litgpt": [*keys_of("litgpt", "lora")],
    "llamafactory_v1": [*keys_of("llamafactory_v1", "args")],
    "maxtext": [
        *keys_of("maxtext", *(set(tools()["maxtext"]["sections"]) - {"models", "balance", "LoRA", "DPO"})),
    ],
    "oumi": [*keys_of("oumi", "config")],
    "automodel": ["recipe", "model", "peft", "dataset", "optimizer", "lr_scheduler", "seed", "distributed"],
    "swift": [
        *(
            "model",
            "dataset",
            "tuner_type",
            "rlhf_type",
            "torch_dtype",
            "target_modules",
            "columns",
            "system",
        ),
        *("global_world_size", "quant_method", "quant_bits", "init_weights", "loss_scale", "template"),
        *(
            "val_dataset",
            "split_dataset_ratio",
            "max_length",
            "truncation_strategy",
            "packing_length",
            "beta",
        ),
        *("gradient_accumulation_steps", "report_to", "model_name", "lora_dtype", "deepspeed", "use_hf"),
    ],
    "tunix": [*keys_of("tunix", "config"), "model_config", "optimizer_config", "training_config"],
}
INNER: dict[str, dict[str, list[str]]] = {
    "trl": {
        "fsdp_config": ["activation_checkpointing", "version"],
        "parallelism_config": ["tp_size"],
        "deepspeed": ["optimizer", "scheduler", "gradient_clipping", "tensor_parallel"],
    },
    "trainer": {},
    "swift": {},
    "automodel": {
        **{name: [*keys_of("automodel", name)] for name in ("step_scheduler", "peft", "lr_scheduler")},
        "dataset": ["_target_", "column_mapping", *keys_of("automodel", "chat")],
        "model": ["_target_", "pretrained_model_name_or_path", "torch_dtype"],
        "optimizer": ["_target_", "lr", "betas"],
    },
    "torchtune": {
        "model": ["_component_", *keys_of("torchtune", "torchtune.models.llama3_2.lora_llama3_2_1b")],
        "dataset": ["_component_", "source", "column_map", "train_on_input", "packed", "split", "data_files"],
        "optimizer": ["_component_", "lr", "betas", "eps", "weight_decay"],
        "loss": ["_component_", "num_output_chunks"],
        "lr_scheduler": ["_component_", "num_warmup_steps", "num_cycles"],
        "tokenizer": ["_component_", "max_seq_len", "prompt_template"],
        "checkpointer": ["checkpoint_dir"],
    },
    "litgpt": {
        "train": [*keys_of("litgpt", "train")],
        "eval": [*keys_of("litgpt", "eval")],
        "data": ["class_path", "init_args"],
        "optimizer": ["class_path", "init_args"],
    },
    "llamafactory_v1": {
        "peft_config": ["r", "lora_alpha", "lora_dropout", "target_modules", "use_dora", "name"],
        "quant_config": ["quantization_bit", "quantization_type", "double_quantization", "name"],
        "dist_config": ["name", "cp_size"],
    },
    "maxtext": {"lora": [*keys_of("maxtext", "LoRA")], "dpo": [*keys_of("maxtext", "DPO")]},
    "tunix": {
        "model_config": [*keys_of("tunix", "model"), "lora_config", "mesh"],
        "model_config.lora_config": [*keys_of("tunix", "lora")],
        "model_config.mesh": [*keys_of("tunix", "mesh")],
        "tokenizer_config": [*keys_of("tunix", "tokenizer")],
        "optimizer_config": [*keys_of("tunix", "optimizer", "adamw", "linear_schedule")],
        "training_config": [*keys_of("tunix", "training_config")],
    },
    "oumi": {
        **{name: [*keys_of("oumi", name)] for name in ("model", "training", "peft", "fsdp", "deepspeed")},
        "data.train": [*keys_of("oumi", "split")],
        "data.train.datasets[0]": [*keys_of("oumi", "dataset")],
        "training.trainer_kwargs": ["packing", "max_length", "loss_type"],
    },
}


SCRIPTS = ("sft", "dpo", "orpo", "cpo", "kto")
SHARED = keys_of("trl", "script", "model", "mixture")


def within(base: dict[str, Any], section: str, key: str, value: Any) -> dict[str, Any]:
    """Return a run with another value of one key of a section, which may be new."""
    made = json.loads(json.dumps(base))
    node = made
    for part in parts(section):
        node = node[part] if isinstance(node, list) else node.setdefault(part, {})
    node[key] = value
    return made  # type: ignore[no-any-return]


def port(dialect: str, content: dict[str, Any], **others: dict[str, Any]) -> Ledger:
    files = {role: Source(Path(role), role, data) for role, data in others.items()}
    script = next((name for name in SCRIPTS if set(content) <= {*keys_of("trl", name), *SHARED}), "sft")
    main = Source(Path("config.yaml"), "config.yaml", content)
    ledger = Ledger(Sources(main, files), script=script)
    dialects.load(dialect).port(ledger)
    return ledger


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("dialect", sorted(BASES))
def test_odd_value_of_any_key_is_reported_without_traceback(dialect: str, turn: int) -> None:
    """Give each key the next odd value in each round."""
    places = [("", key) for key in KEYS[dialect]]
    places += [(section, key) for section, keys in INNER[dialect].items() for key in keys]
    for number, (section, key) in enumerate(places):
        value = ODD[(number + turn) % len(ODD)]
        ledger = port(dialect, within(BASES[dialect], section, key, value))
        path = f"{section}.{key}" if section else key
        assert path not in ledger.unread(ledger.sources.main), (path, value)


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_odd_values_of_all_ms_swift_keys_are_reported(value: Any) -> None:
    known = {key: value for key in keys_of("swift", "sft", "rlhf")}
    ledger = port("swift", {**known, **BASES["swift"]})
    assert ledger.unread(ledger.sources.main) == []


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_odd_values_in_adapter_config_are_reported_without_traceback(value: Any) -> None:
    for key in keys_of("peft", "lora"):
        adapter = {"base_model_name_or_path": "Qwen/Qwen3-8B", key: value}
        ledger = port("trainer", {"train_file": "a.jsonl"}, adapter_config=adapter)
        assert key not in ledger.unread(ledger.sources.others["adapter_config"])


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_odd_values_in_accelerate_config_are_reported_without_traceback(value: Any) -> None:
    for key in keys_of("accelerate", "cluster"):
        ledger = port("trl", BASES["trl"], accelerate={"distributed_type": "FSDP", key: value})
        assert key not in ledger.unread(ledger.sources.others["accelerate"])
