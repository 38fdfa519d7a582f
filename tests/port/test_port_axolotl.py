"""Axolotl's keys, and what they mean in a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.port.keys import keys_of
from recipec.compiler.port.ledger import Verdict
from tests.port.axolotl_runs import BASE, WITHIN, port
from tests.port.dialects import codes, finding, ported, samples, spoken, unspoken, values, verdict


def test_a_plain_run_is_taken_over(tmp_path: Path) -> None:
    made = port(tmp_path)
    spoken(made)
    assert codes(made) == []
    assert values(made, "model.id", "lora.rank", "lora.alpha", "lora.layers") == [
        "Qwen/Qwen3-8B",
        16,
        32,
        "all",
    ]
    assert len(made.value("lora.targets")) == 7
    assert values(made, "train.global_batch_size", "train.micro_batch_size", "train.epochs") == [8, 2, 2]
    assert made.value("train.optimizer.learning_rate") == 2e-4
    assert values(made, "data.format", "data.loss_on", "data.max_length") == ["chat", "assistant", 1024]
    assert made.value("data.train") == ["hf://our/chats"]


def test_defaults_are_written_out(tmp_path: Path) -> None:
    made = port(tmp_path)
    defaults = {
        "lora.dropout": 0.0,
        "data.overlong": "drop",
        "data.packing": False,
        "train.optimizer.name": "adamw",
        "train.optimizer.weight_decay": 0.0,
        "train.optimizer.max_grad_norm": 1.0,
        "train.optimizer.b1": 0.9,
        "train.optimizer.b2": 0.999,
        "train.optimizer.eps": 1e-8,
        "train.schedule.name": "cosine",
        "train.schedule.warmup_ratio": 0.03,
        "train.seed": 42,
        "data.shuffle_seed": 42,
        "model.dtype": "bfloat16",
        "remat.policy": "none",
        "checkpoint.keep": 4,
        "train.loss_normalization": "tokens",
    }
    assert {path: made.value(path) for path in defaults} == defaults
    said = {path for found in made.findings if found.verdict is Verdict.DEFAULTED for path in found.recipe}
    assert set(defaults) <= said


def test_the_batch_counts_the_gpus(tmp_path: Path) -> None:
    assert port(tmp_path, devices=4).value("train.global_batch_size") == 32
    alone = port(tmp_path)
    assert "--devices" in finding(alone, "--devices").note
    sharded = port(tmp_path, dp_shard_size=4, tensor_parallel_size=2, fsdp_version=2)
    assert sharded.value("train.global_batch_size") == 32
    assert port(tmp_path, devices=8, tensor_parallel_size=2).value("train.global_batch_size") == 32
    derived = port(tmp_path, gradient_accumulation_steps=None, batch_size=12)
    assert derived.value("train.global_batch_size") == 12
    ray = port(tmp_path, use_ray=True, ray_num_workers=4, tensor_parallel_size=2)
    assert ray.value("train.global_batch_size") == 16
    assert port(tmp_path, use_ray=False, ray_num_workers=4).value("train.global_batch_size") == 8


@pytest.mark.parametrize(
    ("changes", "path", "value", "how"),
    [
        ({"peft_use_rslora": True}, "lora.rslora", True, "exact"),
        ({"peft_layers_to_transform": [4, 5, 6]}, "lora.layers", "4-6", "exact"),
        ({"lora_rank_pattern": {"down_proj": 4}}, "lora.rank_pattern", {"down_proj": 4}, "exact"),
        ({"lora_alpha_pattern": {"down_proj": 4}}, "lora.alpha_pattern", {"down_proj": 4}, "exact"),
        ({"excess_length_strategy": "truncate"}, "data.overlong", "truncate", "exact"),
        ({"excess_length_strategy": "raise"}, "data.overlong", "error", "exact"),
        ({"sample_packing": True}, "data.packing", True, "approximated"),
        ({"warmup_steps": 20}, "train.schedule.warmup_steps", 20, "exact"),
        ({"warmup_steps": 1}, "train.schedule.warmup_steps", 2, "approximated"),
        ({"warmup_ratio": 0.1}, "train.schedule.warmup_ratio", 0.1, "approximated"),
        ({"cosine_min_lr_ratio": 0.1}, "train.schedule.final_ratio", 0.1, "exact"),
        ({"lr_scheduler": "linear"}, "train.schedule.name", "linear", "exact"),
        ({"lr_scheduler": "rex"}, "train.schedule.name", "cosine", "approximated"),
        ({"optimizer": "adamw_torch_fused"}, "train.optimizer.name", "adamw", "exact"),
        ({"optimizer": "paged_adamw_8bit"}, "train.optimizer.name", "adamw", "approximated"),
        ({"wandb_project": "ours"}, "train.log.wandb_project", "ours", "exact"),
        ({"output_dir": "gs://ours/run"}, "checkpoint.directory", "gs://ours/run", "exact"),
        ({"curriculum_sampling": True}, "data.shuffle_seed", None, "exact"),
        ({"adam_beta2": 0.95}, "train.optimizer.b2", 0.95, "exact"),
        ({"weight_decay": 0.1}, "train.optimizer.weight_decay", 0.1, "exact"),
        ({"max_grad_norm": 0.3}, "train.optimizer.max_grad_norm", 0.3, "exact"),
        ({"bf16": False}, "model.dtype", "float32", "exact"),
        ({"fp16": True}, "model.dtype", "bfloat16", "approximated"),
        ({"gradient_checkpointing": True}, "remat.policy", "decoder", "exact"),
        ({"attn_implementation": "flash_attention_2"}, "model.attention", "splash", "exact"),
        ({"attn_implementation": "sdpa"}, "model.attention", "dot", "exact"),
        ({"flash_attention": True}, "model.attention", "splash", "exact"),
        ({"max_steps": 50}, "train.steps", 50, "approximated"),
        ({"num_epochs": 1.5}, "train.epochs", 2, "approximated"),
        ({"load_in_8bit": True}, "lora.quantize", "int8", "approximated"),
        ({"save_steps": 25}, "checkpoint.every_steps", 25, "exact"),
        ({"save_total_limit": 2}, "checkpoint.keep", 2, "exact"),
        ({"logging_steps": 5}, "train.log.every", 5, "exact"),
        ({"val_set_size": 0.05}, "data.eval_fraction", 0.05, "approximated"),
        ({"seed": 7}, "data.shuffle_seed", 7, "approximated"),
    ],
)
def test_a_key_sets_its_value_with_its_verdict(
    tmp_path: Path, changes: dict[str, Any], path: str, value: Any, how: str
) -> None:
    made = port(tmp_path, **changes)
    spoken(made)
    assert made.value(path) == value
    (key,) = changes
    assert verdict(made, key).value == how and codes(made) == []


def test_a_quantised_base_is_taken_over_with_what_differs(tmp_path: Path) -> None:
    made = port(tmp_path, adapter="qlora", load_in_4bit=True)
    assert made.value("lora.quantize") == "nf4"
    assert "float32" in finding(made, "bnb_config_kwargs").note, "double quantisation is Axolotl's default"
    plain = port(
        tmp_path, adapter="qlora", load_in_4bit=True, bnb_config_kwargs={"bnb_4bit_use_double_quant": False}
    )
    assert verdict(plain, "load_in_4bit") is Verdict.EXACT


def test_evaluations_are_taken_over_in_steps(tmp_path: Path) -> None:
    made = port(tmp_path, val_set_size=0.1, eval_steps=0.25, max_steps=80, evals_per_epoch=None)
    assert made.value("train.eval_every") == 20
    assert (
        verdict(port(tmp_path, val_set_size=0.1, evals_per_epoch=4), "evals_per_epoch")
        is Verdict.APPROXIMATED
    )
    assert verdict(port(tmp_path, evals_per_epoch=4), "evals_per_epoch") is Verdict.EXACT
    held = port(tmp_path, val_set_size=200)
    assert verdict(held, "val_set_size") is Verdict.UNSUPPORTED and held.value("data.eval_fraction") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"early_stopping_patience": 3},
        {"quantize_moe_experts": True},
        {"hub_model_id": "ours/model"},
        {"wandb_entity": "ours"},
        {"use_mlflow": True},
    ],
)
def test_what_is_not_taken_over_says_what_that_changes(tmp_path: Path, changes: dict[str, Any]) -> None:
    made = port(tmp_path, **changes)
    (key,) = changes
    found = finding(made, key)
    assert found.verdict is Verdict.UNSUPPORTED and len(found.note.split()) > 3


@pytest.mark.parametrize(
    ("changes", "code", "key"),
    [
        ({"rl": "kto"}, "E1149", "rl"),
        *(
            ({key: value}, "E1180", key)
            for key, value in {
                "peft_use_dora": True,
                "loraplus_lr_ratio": 16,
                "lora_modules_to_save": ["embed_tokens"],
                "neftune_noise_alpha": 5,
                "peft_init_lora_weights": "pissa",
                "plugins": ["axolotl.integrations.diffusion.DiffusionPlugin"],
                "diffusion": {"noise_schedule": "cosine"},
                "qat": {"weight_dtype": "int4"},
                "use_eaft": True,
                "tokens": ["<|extra|>"],
            }.items()
        ),
        ({"optimizer": "muon"}, "E1163", "optimizer"),
        ({"optimizer": "galore_adamw"}, "E1163", "optimizer"),
        ({"lr_scheduler": "piecewise"}, "E1163", "lr_scheduler"),
        ({"reward_model": True}, "E1149", "reward_model"),
        ({"processor_type": "AutoProcessor"}, "E1150", "processor_type"),
        ({"adapter": None, "load_in_4bit": True}, "E1146", "load_in_4bit"),
        ({"adapter": "qlora"}, "E1145", "load_in_4bit"),
        ({"warmup_steps": 1, "warmup_ratio": 0.1}, "E1145", "warmup_ratio"),
        ({"learning_rate": None}, "E1144", "learning_rate"),
        ({"lora_r": None}, "E1144", "lora_r"),
        ({"lora_target_linear": None}, "E1148", "lora_target_modules"),
        ({"chat_template": "phi_4"}, "E1147", "chat_template"),
        ({"datasets": [{"path": "a/b"}]}, "E1141", "datasets[0].path"),
        ({"datasets": [{"path": "a/b", "type": "sharegpt.load"}]}, "E1141", "datasets[0].type"),
        ({"datasets": [{"path": "a/b", "type": "our_own"}]}, "E1141", "datasets[0].type"),
        ({"datasets": [{"path": "s3://a/b", "type": "alpaca"}]}, "E1143", "datasets[0].path"),
        ({"datasets": None}, "E1143", "datasets"),
    ],
)
def test_what_would_be_another_run_is_refused_at_its_key(
    tmp_path: Path, changes: dict[str, Any], code: str, key: str
) -> None:
    made = port(tmp_path, **changes)
    assert (code, key) in codes(made)
    assert all(diagnostic.help for diagnostic in made.diagnostics)


def test_a_run_without_an_adapter_trains_all_weights(tmp_path: Path) -> None:
    made = port(tmp_path, adapter=None, weight_decay=0.1)
    spoken(made)
    assert made.lines["lora"].value is None and "lora.rank" not in made.lines
    assert "norms" in finding(made, "weight_decay").note, "the Trainer leaves them out"


@pytest.mark.parametrize(
    ("changes", "master"),
    [
        ({}, False),
        ({"fsdp_config": {"version": 2}}, False),
        ({"fsdp_config": {"reshard_after_forward": True}}, True),
        ({"fsdp": ["full_shard"], "bf16": "full"}, False),
        ({"deepspeed": "deepspeed_configs/zero2.json"}, True),
    ],
)
def test_full_fine_tuning_in_bfloat16_has_master_weights_where_its_launcher_keeps_them(
    tmp_path: Path, changes: dict[str, Any], master: bool
) -> None:
    made = port(tmp_path, adapter=None, **changes)
    assert values(made, "model.dtype", "train.optimizer.master_weights") == ["bfloat16", master]


def test_dpo_is_taken_over_with_its_pairs(tmp_path: Path) -> None:
    sets = [{"path": "our/pairs", "type": "chat_template.default", "field_messages": "conversation"}]
    made = port(tmp_path, rl="dpo", rl_beta=0.2, dpo_label_smoothing=0.1, datasets=sets)
    spoken(made)
    assert values(made, "train.objective", "train.beta", "train.label_smoothing") == ["dpo", 0.2, 0.1]
    assert values(made, "data.format", "data.packing") == ["preference", False]
    assert 'row["conversation"]' in made.files["convert.py"]
    assert port(tmp_path, rl="orpo", orpo_alpha=0.3, datasets=sets).value("train.beta") == 0.3


def test_copies_of_models_are_told_to_be_the_original(tmp_path: Path) -> None:
    made = port(tmp_path, base_model="NousResearch/Meta-Llama-3.1-8B")
    assert made.value("model.id") == "meta-llama/Llama-3.1-8B"
    assert verdict(made, "base_model") is Verdict.APPROXIMATED


@pytest.mark.parametrize("nulls", [True, False])
def test_every_key_of_axolotls_schema_is_spoken_of(tmp_path: Path, nulls: bool) -> None:
    every = keys_of("axolotl", "config")
    of_plugins = {k: v for k, v in keys_of("axolotl", "plugins").items() if k not in WITHIN}
    assert len(every) > 350 and len(of_plugins) > 60
    given = {**samples({**every, **of_plugins}), **BASE}
    if nulls:
        given = {key: BASE.get(key) for key in given}
    made = ported("axolotl", tmp_path, given)
    assert unspoken(made, given) == []
    spoken(made)


@pytest.mark.parametrize("kind", ["chat_template", "completion", "alpaca", "input_output"])
def test_every_key_of_a_data_set_is_spoken_of(tmp_path: Path, kind: str) -> None:
    every = keys_of("axolotl", "SFTDataset")
    given = {**samples(every), "path": "our/set", "type": kind, "data_files": None, "chat_template": None}
    given |= {
        "train_on_eos": "turn",
        "train_on_eot": "turn",
        "roles": None,
        "message_property_mappings": None,
    }
    made = port(tmp_path, datasets=[given])
    assert made.unread(made.sources.main) == []
    spoken(made)
