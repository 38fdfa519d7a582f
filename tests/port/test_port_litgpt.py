"""litgpt's YAML: what its keys become, and that each of them is spoken of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.port.keys import tools
from recipec.compiler.port.ledger import Verdict
from tests.port.dialects import codes, ported, samples, spoken, unspoken, values, verdict

SECTIONS = tools()["litgpt"]["sections"]
LORA: dict[str, Any] = {"checkpoint_dir": "checkpoints/Qwen/Qwen3-8B", "lora_r": 4, "precision": "bf16-true"}


def test_a_lora_run_is_taken_over(tmp_path: Path) -> None:
    ledger = ported(
        "litgpt",
        tmp_path,
        "checkpoint_dir: checkpoints/meta-llama/Llama-3.2-1B\n"
        "out_dir: out\nprecision: bf16-true\nquantize: bnb.nf4\n"
        "lora_r: 16\nlora_alpha: 8\nlora_dropout: 0.1\n"
        "lora_key: true\nlora_projection: true\nlora_mlp: true\n"
        "data:\n  class_path: litgpt.data.JSON\n"
        "  init_args:\n    json_path: rows.json\n    mask_prompt: true\n"
        "    val_split_fraction: 0.1\n    seed: 5\n"
        "train:\n  global_batch_size: 8\n  micro_batch_size: 2\n  lr_warmup_steps: 10\n  epochs: 3\n"
        "  max_seq_length: 256\n  save_interval: 50\neval:\n  interval: 25\n"
        "optimizer:\n  class_path: torch.optim.AdamW\n  init_args:\n    lr: 2e-4\n    betas: [0.9, 0.95]\n"
        "seed: 11\n",
    )
    spoken(ledger)
    assert codes(ledger) == []
    assert {path: line.value for path, line in ledger.lines.items()} == {
        "model.id": "meta-llama/Llama-3.2-1B",
        "model.dtype": "bfloat16",
        "lora.rank": 16,
        "lora.alpha": 8,
        "lora.dropout": 0.1,
        "lora.targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "lora.init": "peft",
        "lora.dtype": "bfloat16",
        "lora.quantize": "nf4",
        "data.train": ["rows.json"],
        "data.eval_fraction": 0.1,
        "data.eval_seed": 5,
        "data.format": "prompt_completion",
        "data.transform": "convert.py:convert",
        "data.loss_on": "completion",
        "data.max_length": 256,
        "data.overlong": "truncate",
        "data.packing": False,
        "data.shuffle_seed": 5,
        "train.epochs": 3,
        "train.micro_batch_size": 2,
        "train.global_batch_size": 8,
        "train.loss_normalization": "micro_batches",
        "train.optimizer.name": "adamw",
        "train.optimizer.learning_rate": 2e-4,
        "train.optimizer.weight_decay": 0.01,
        "train.optimizer.b1": 0.9,
        "train.optimizer.b2": 0.95,
        "train.optimizer.eps": 1e-8,
        "train.optimizer.max_grad_norm": None,
        "train.schedule.name": "cosine",
        "train.schedule.warmup_steps": 10,
        "train.seed": 11,
        "train.eval_every": 25,
        "checkpoint.every_steps": 50,
    }


@pytest.mark.parametrize("method", ["lora", "full"])
def test_no_key_is_passed_over(tmp_path: Path, method: str) -> None:
    content = {
        **samples(SECTIONS[method]),
        **{section: samples(SECTIONS[section]) for section in ("train", "eval", "log")},
        "checkpoint_dir": LORA["checkpoint_dir"],
        "optimizer": "AdamW",
        "data": {"class_path": "litgpt.data.Alpaca", "init_args": samples(SECTIONS["litgpt.data.Alpaca"])},
    }
    ledger = ported("litgpt", tmp_path, content, name=f"{method}.yaml")
    assert unspoken(ledger, SECTIONS[method]) == []
    assert ledger.unread(ledger.sources.main) == []


@pytest.mark.parametrize("name", ["JSON", "Alpaca", "Alpaca2k", "AlpacaGPT4"])
def test_no_key_of_a_data_module_is_passed_over(tmp_path: Path, name: str) -> None:
    arguments = samples(SECTIONS[f"litgpt.data.{name}"])
    ledger = ported("litgpt", tmp_path, {**LORA, "data": {"class_path": name, "init_args": arguments}})
    assert ledger.unread(ledger.sources.main) == []


def test_the_defaults_are_litgpts_own(tmp_path: Path) -> None:
    ledger = ported("litgpt", tmp_path, {"checkpoint_dir": LORA["checkpoint_dir"]}, name="lora.yaml")
    assert values(ledger, "lora.rank", "lora.alpha", "lora.dropout") == [8, 16, 0.05]
    assert values(ledger, "lora.targets", "model.dtype") == [["q_proj", "v_proj"], "bfloat16"]
    assert values(ledger, "train.global_batch_size", "train.micro_batch_size", "train.epochs") == [16, 1, 5]
    assert values(ledger, "train.optimizer.learning_rate", "train.optimizer.weight_decay") == [1e-3, 0.01]
    assert values(ledger, "train.schedule.warmup_steps", "train.seed", "data.shuffle_seed") == [100, 1337, 42]
    assert values(ledger, "data.loss_on", "data.eval_fraction") == ["all", 0.03865]
    assert values(ledger, "data.train", "data.overlong") == [["hf://yahma/alpaca-cleaned"], "error"]
    for key in ("lora_r", "train.epochs", "train.global_batch_size", "data.init_args.mask_prompt"):
        assert verdict(ledger, key) is Verdict.DEFAULTED


@pytest.mark.parametrize(
    "name, keys, lora",
    [
        ("run.yaml", {"lora_r": 4}, True),
        ("qlora.yaml", {}, True),
        ("full.yaml", {}, False),
        ("run.yaml", {}, False),
    ],
)
def test_the_method_is_told(tmp_path: Path, name: str, keys: dict[str, Any], lora: bool) -> None:
    content = {"checkpoint_dir": LORA["checkpoint_dir"], **keys}
    ledger = ported("litgpt", tmp_path, content, name=name)
    assert ("lora" not in ledger.lines) is lora
    assert (ledger.value("lora.rank") is not None) is lora


@pytest.mark.parametrize(
    "rows, micro, devices, nodes, expected",
    [(16, 2, 1, 1, 16), (16, 2, 4, 1, 16), (9, 2, 1, 1, 8), (64, 4, 3, 1, 60), (32, 2, 4, 2, 32)],
)
def test_the_global_batch_is_divided_and_rounded_down(
    tmp_path: Path, rows: int, micro: int, devices: int, nodes: int, expected: int
) -> None:
    train = {"global_batch_size": rows, "micro_batch_size": micro}
    ledger = ported("litgpt", tmp_path, {**LORA, "train": train, "devices": devices, "num_nodes": nodes})
    assert ledger.value("train.global_batch_size") == expected
    # As litgpt.args.TrainArgs computes it.
    accumulation = rows // (devices * nodes) // micro
    assert accumulation * micro * devices * nodes == expected


@pytest.mark.parametrize(
    "precision, dtype, adapters",
    [
        ("bf16-true", "bfloat16", "bfloat16"),
        ("bf16-mixed", "bfloat16", "float32"),
        ("32-true", "float32", "float32"),
        ("16-mixed", "bfloat16", "float32"),
    ],
)
def test_a_precision_becomes_the_models_and_the_adapters_types(
    tmp_path: Path, precision: str, dtype: str, adapters: str
) -> None:
    ledger = ported("litgpt", tmp_path, {**LORA, "precision": precision})
    assert values(ledger, "model.dtype", "lora.dtype") == [dtype, adapters]
    exact = precision in ("bf16-true", "32-true")
    assert verdict(ledger, "precision") is (Verdict.EXACT if exact else Verdict.APPROXIMATED)


@pytest.mark.parametrize(
    "kind, expected, exact",
    [
        ("bnb.nf4", "nf4", True),
        ("bnb.nf4-dq", "nf4", False),
        ("bnb.fp4", "nf4", False),
        ("bnb.int8-training", "int8", False),
    ],
)
def test_quantisation_becomes_the_recipes_or_the_nearest_with_a_note(
    tmp_path: Path, kind: str, expected: str, exact: bool
) -> None:
    ledger = ported("litgpt", tmp_path, {**LORA, "quantize": kind})
    assert ledger.value("lora.quantize") == expected
    assert (verdict(ledger, "quantize") is Verdict.EXACT) is exact


@pytest.mark.parametrize(
    "style, sets",
    [
        ("alpaca", {"data.format": "prompt_completion", "data.transform": "convert.py:convert"}),
        (
            "default",
            {
                "data.format": "prompt_completion",
                "data.fields": {"prompt": "instruction", "completion": "output"},
                "data.transform": None,
            },
        ),
        ("qwen3", {"data.format": "instruction", "data.transform": None}),
    ],
)
def test_a_prompt_style_becomes_the_template_that_writes_it(
    tmp_path: Path, style: str, sets: dict[str, Any]
) -> None:
    data = {"class_path": "litgpt.data.JSON", "init_args": {"json_path": "a.jsonl", "prompt_style": style}}
    ledger = ported("litgpt", tmp_path, {**LORA, "data": data})
    assert {path: ledger.value(path) for path in sets} == sets
    assert codes(ledger) == []


def test_a_row_becomes_alpacas_prompt(tmp_path: Path) -> None:
    ledger = ported("litgpt", tmp_path, LORA)
    made: dict[str, Any] = {}
    exec(ledger.files["convert.py"], made)
    row = made["convert"]({"instruction": "Add.", "input": "", "output": "3"})
    assert row["prompt"].startswith("Below is an instruction that describes a task. Write")
    assert row["prompt"].endswith("completes the request.\n\n### Instruction:\nAdd.\n\n### Response:\n")
    assert row["completion"] == "3"


def test_rows_that_litgpt_holds_out_are_held_out(tmp_path: Path) -> None:
    def data(path: str) -> dict[str, Any]:
        return {"data": {"class_path": "litgpt.data.JSON", "init_args": {"json_path": path}}}

    ledger = ported("litgpt", tmp_path, {**LORA, **data("rows.jsonl")})
    assert values(ledger, "data.train", "data.eval_fraction", "data.eval") == [["rows.jsonl"], 0.05, None]
    ledger = ported("litgpt", tmp_path, {**LORA, **data("rows")})
    assert values(ledger, "data.train", "data.eval_fraction") == [["rows/train.json"], None]
    assert ledger.value("data.eval") == ["rows/val.json"]


@pytest.mark.parametrize(
    "keys, code, key",
    [
        ({"quantize": "bnb.nf4", "precision": "bf16-mixed"}, "E1145", "precision"),
        ({"quantize": "bnb.nf4", "devices": 2}, "E1145", "devices"),
        ({"quantize": "gptq"}, "E1160", "quantize"),
        ({"lora_query": False, "lora_value": False}, "E1148", "lora_query"),
        ({"train": {"max_norm": 1.0}}, "E1145", "train.max_norm"),
        ({"train": {"lr_warmup_fraction": 0.1}}, "E1145", "train.lr_warmup_fraction"),
        ({"train": {"global_batch_size": 2, "micro_batch_size": 4}}, "E1145", "train.global_batch_size"),
        ({"data": {"class_path": "litgpt.data.FLAN"}}, "E1143", "data.class_path"),
        ({"data": {"class_path": "litgpt.data.JSON"}}, "E1143", "data.init_args.json_path"),
        (
            {"data": {"class_path": "litgpt.data.Alpaca", "init_args": {"prompt_style": "falcon"}}},
            "E1163",
            "data.init_args.prompt_style",
        ),
        ({"optimizer": "Rprop"}, "E1163", "optimizer"),
        ({"checkpoint_dir": "checkpoints/EleutherAI/pythia-14m"}, "E0803", "checkpoint_dir"),
        ({"train": {"epochs": "two"}}, "E1160", "train.epochs"),
    ],
)
def test_what_would_be_another_run_is_refused_at_its_key(
    tmp_path: Path, keys: dict[str, Any], code: str, key: str
) -> None:
    ledger = ported("litgpt", tmp_path, {**LORA, **keys})
    assert codes(ledger) == [(code, key)]
    assert ledger.diagnostics[0].help


def test_full_fine_tuning_of_a_quantised_base_is_refused(tmp_path: Path) -> None:
    content = {"checkpoint_dir": LORA["checkpoint_dir"], "quantize": "bnb.nf4"}
    assert codes(ported("litgpt", tmp_path, content, name="full.yaml")) == [("E1146", "quantize")]


def test_adapter_methods_are_refused(tmp_path: Path) -> None:
    content = {"checkpoint_dir": LORA["checkpoint_dir"]}
    assert codes(ported("litgpt", tmp_path, content, name="adapter_v2.yaml")) == [("E1149", "checkpoint_dir")]


def test_a_head_and_a_clock_are_lost(tmp_path: Path) -> None:
    ledger = ported(
        "litgpt", tmp_path, {**LORA, "lora_head": True, "train": {"max_time": 60.0, "max_steps": 7}}
    )
    assert verdict(ledger, "lora_head") is Verdict.APPROXIMATED
    assert verdict(ledger, "train.max_time") is Verdict.UNSUPPORTED
    assert values(ledger, "train.steps", "train.epochs") == [7, None]
