"""Test Axolotl's keys and what they mean in a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipec.compiler.port.keys import keys_of
from recipec.compiler.port.ledger import Verdict
from tests.port.axolotl_runs import BASE, WITHIN, port
from tests.port.dialects import codes, finding, ported, samples, spoken, unspoken, values, verdict


def test_plain_axolotl_run_sets_recipe_values(tmp_path: Path) -> None:
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


def test_axolotl_defaults_are_written_into_the_recipe(tmp_path: Path) -> None:
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
        "train.loss_normalization": "micro_batches",
    }
    assert {path: made.value(path) for path in defaults} == defaults
    said = {path for found in made.findings if found.verdict is Verdict.DEFAULTED for path in found.recipe}
    assert set(defaults) <= said


def test_global_batch_size_counts_data_parallel_gpus(tmp_path: Path) -> None:
    assert port(tmp_path, devices=4).value("train.global_batch_size") == 32
    alone = port(tmp_path)
    assert "--devices" in finding(alone, "--devices").note
    assert port(tmp_path, gradient_accumulation_steps=1).value("train.loss_normalization") == "tokens"
    sharded = port(tmp_path, dp_shard_size=4, tensor_parallel_size=2, fsdp_version=2)
    assert sharded.value("train.global_batch_size") == 32
    assert port(tmp_path, devices=8, tensor_parallel_size=2).value("train.global_batch_size") == 32
    derived = port(tmp_path, gradient_accumulation_steps=None, batch_size=12)
    assert derived.value("train.global_batch_size") == 12
    ray = port(tmp_path, use_ray=True, ray_num_workers=4, tensor_parallel_size=2)
    assert ray.value("train.global_batch_size") == 16
    assert port(tmp_path, use_ray=False, ray_num_workers=4).value("train.global_batch_size") == 8


def test_warmup_ratio_of_max_steps_is_rounded_as_in_axolotl(tmp_path: Path) -> None:
    """Round down, but turn one step into two, and use at most 100 by default."""
    for ratio, steps, expected in ((None, 10, 0), (None, 40, 2), (None, 9000, 100), (0.25, 10, 2)):
        made = port(tmp_path, warmup_ratio=ratio, max_steps=steps)
        assert made.value("train.schedule.warmup_steps") == expected
    assert verdict(made, "warmup_ratio") is Verdict.APPROXIMATED


def test_qlora_base_is_nf4_and_double_quantization_is_noted(tmp_path: Path) -> None:
    made = port(tmp_path, adapter="qlora", load_in_4bit=True)
    assert made.value("lora.quantize") == "nf4"
    assert "float32" in finding(made, "bnb_config_kwargs").note, "double quantization is Axolotl's default"
    plain = port(
        tmp_path, adapter="qlora", load_in_4bit=True, bnb_config_kwargs={"bnb_4bit_use_double_quant": False}
    )
    assert verdict(plain, "load_in_4bit") is Verdict.EXACT


@pytest.mark.parametrize("linear", [False, True])
def test_load_in_4bit_note_mentions_experts_unless_linearized(tmp_path: Path, linear: bool) -> None:
    name = "axolotl-quants/Llama-4-Scout-17B-16E-Linearized-bnb-nf4-bf16"
    run = {"base_model": name, "adapter": "qlora", "load_in_4bit": True, "llama4_linearized_experts": linear}
    made = port(tmp_path, **run, lora_target_modules=["q_proj"])
    assert made.value("model.id") == "meta-llama/Llama-4-Scout-17B-16E"
    assert ("experts" in finding(made, "load_in_4bit").note) is not linear


def test_evaluation_keys_become_steps_or_are_marked_as_lossy(tmp_path: Path) -> None:
    made = port(tmp_path, val_set_size=0.1, eval_steps=0.25, max_steps=80, evals_per_epoch=None)
    assert made.value("train.eval_every") == 20
    assert (
        verdict(port(tmp_path, val_set_size=0.1, evals_per_epoch=4), "evals_per_epoch")
        is Verdict.APPROXIMATED
    )
    assert verdict(port(tmp_path, evals_per_epoch=4), "evals_per_epoch") is Verdict.EXACT
    held = port(tmp_path, val_set_size=200)
    assert verdict(held, "val_set_size") is Verdict.UNSUPPORTED and held.value("data.eval_fraction") is None


def test_a_run_without_an_adapter_trains_all_weights(tmp_path: Path) -> None:
    made = port(tmp_path, adapter=None, weight_decay=0.1)
    spoken(made)
    assert made.lines["lora"].value is None and "lora.rank" not in made.lines
    assert "norms" in finding(made, "weight_decay").note, "the Trainer leaves them out"


def test_dpo_and_orpo_settings_and_pairs_are_ported(tmp_path: Path) -> None:
    sets = [{"path": "our/pairs", "type": "chat_template.default", "field_messages": "conversation"}]
    made = port(tmp_path, rl="dpo", rl_beta=0.2, dpo_label_smoothing=0.1, datasets=sets)
    spoken(made)
    assert values(made, "train.objective", "train.beta", "train.label_smoothing") == ["dpo", 0.2, None]
    assert values(made, "data.format", "data.packing") == ["preference", False]
    assert 'row["conversation"]' in made.files["convert.py"]
    assert port(tmp_path, rl="orpo", orpo_alpha=0.3, datasets=sets).value("train.beta") == 0.3


def test_model_copy_is_replaced_by_the_original_id(tmp_path: Path) -> None:
    made = port(tmp_path, base_model="NousResearch/Meta-Llama-3.1-8B")
    assert made.value("model.id") == "meta-llama/Llama-3.1-8B"
    assert verdict(made, "base_model") is Verdict.APPROXIMATED


@pytest.mark.parametrize("nulls", [True, False])
def test_report_covers_every_axolotl_schema_key(tmp_path: Path, nulls: bool) -> None:
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
def test_report_covers_every_dataset_key(tmp_path: Path, kind: str) -> None:
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
