"""Tests of model cards: their text (`pytest --update` rewrites cards/), and how the hub reads it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from recipec.runtime.merging.model_card import adapter_card, carried, model_card
from recipec.runtime.model.reach import Reach
from tests import tiny
from tests.runtime import chats

CARDS = Path(__file__).parent / "cards"
PYTHON = re.compile(r"^```python\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
BASE_CARD = """---
license: gemma
license_link: https://ai.google.dev/gemma/terms
library_name: keras
pipeline_tag: text-generation
language: [en, no, de]
extra_gated_heading: Access Gemma on Hugging Face
tags: [gemma, google, 3, gemma]
base_model: google/gemma-3-270m
---

# Gemma 3 model card
"""
CONFIG = {"r": 16, "lora_alpha": 32, "target_modules": TARGETS, "rank_pattern": {}, "alpha_pattern": {}}

LORA = {"rank": 16, "alpha": 32.0, "rslora": True, "targets": TARGETS}


def record(**changes: Any) -> dict[str, Any]:
    """Return the merge.json of a merge with LoRA."""
    return {
        "base": {"id": "google/gemma-3-270m-it", "revision": "ac82b4e8", "files": {}},
        "checkpoint": {"step": 400, "sha256": "ab" * 32},
        "dtype": "bfloat16",
        "quantization": None,
        "lora": LORA,
        "recipe": {"name": "helpdesk", "sha256": "cd" * 32},
        **changes,
    }


def lock(**changes: Any) -> dict[str, Any]:
    """Return a recipe.lock.json. `changes` are sections of the recipe."""
    source = {"config": None, "split": None, "weight": 1.0}
    recipe: dict[str, Any] = {
        "name": "helpdesk",
        "model": {"id": "google/gemma-3-270m-it", "revision": "ac82b4e8", "tokenizer": None},
        "lora": {**LORA, "dropout": 0.05, "layers": "6-17"},
        "data": {
            "train": [
                {**source, "path": "/home/somebody/tickets/train.jsonl"},
                {**source, "path": "hf://owner/answers@main", "split": "train[:90%]", "weight": 0.5},
            ],
            "eval": [{**source, "path": "gs://bucket/eval.parquet"}],
            "format": "chat",
            "max_length": 2048,
            "packing": True,
        },
        "train": {
            "objective": "sft",
            "epochs": 2,
            "steps": None,
            "global_batch_size": 8,
            "optimizer": {"name": "adamw", "learning_rate": 1e-4, "weight_decay": 0.0},
            "schedule": {"name": "cosine", "warmup_steps": 100},
        },
        "serve": {"tensor_parallel_size": 8, "max_model_len": 16384},
        **changes,
    }
    return {
        "compiler": "recipec 0.1.0",
        "name": "helpdesk",
        "recipe": recipe,
        "packages": {"train": {"jax[tpu]": "0.10.2", "google-tunix": "0.1.7", "absl-py": "2.5.1"}},
    }


def merged_lora() -> str:
    return model_card(
        record(),
        lock(),
        BASE_CARD,
        {"loss": 1.23456, "eval_loss": 1.3},
        Reach(1_645_117_440, 25_233_140_000, 30),
    )


def merged_all_weights() -> str:
    model = {"id": "~/models/llama-base/", "revision": None}
    preferences = {
        "objective": "dpo",
        "beta": 0.1,
        "steps": 1500,
        "global_batch_size": 32,
        "optimizer": {"name": "adafactor", "learning_rate": 5e-7},
    }
    made = record(lora=None, base={**model, "files": {}}, quantization="fp8")
    return model_card(made, lock(model=model, lora=None, train=preferences, serve=None), None)


def adapter_of_patterns() -> str:
    patterns = {"rank_pattern": {"(q|k)_proj": 8}, "alpha_pattern": {"o_proj": 48.0}}
    pairs = {name: [list(pair) for pair in pattern.items()] for name, pattern in patterns.items()}
    section = {"rank": 16, "alpha": 32.0, "targets": TARGETS, "layers": "all", **pairs}
    base = {"id": "/models/gemma-base", "revision": None}
    model = {**base, "quantization": "nf4"}
    made = record(base=base, lora={**LORA, "rslora": False, **patterns})
    return adapter_card(made, lock(model=model, lora=section), {**CONFIG, **patterns})


@pytest.mark.parametrize("make", [merged_lora, merged_all_weights, adapter_of_patterns])
def test_model_cards_match_golden_files(make: Callable[[], str], update: bool) -> None:
    golden = CARDS / f"{make.__name__.replace('_', '-')}.md"
    text = make()
    if update:
        golden.write_text(text)
    assert text == golden.read_text()
    assert "None" not in text and "somebody" not in text and "/models" not in text


def test_card_names_the_modules_that_were_trained_without_adapters() -> None:
    train = {"objective": "sft", "epochs": 1, "trainable_modules": ["lm_head", "embed_tokens"]}
    text = model_card(record(lora=None), lock(lora=None, train=train), None)
    assert "fine-tuned in the modules `lm_head`, `embed_tokens` of its text model" in text


def loaded(text: str, folder: Path) -> dict[str, Any]:
    (folder / "README.md").write_text(text)
    return ModelCard.load(folder / "README.md").data.to_dict()


def test_hub_parses_card_metadata(tmp_path: Path) -> None:
    """A base that is not on the hub is left out, because the hub would look for a repository of that name."""
    shared = {
        "base_model": "google/gemma-3-270m-it",
        "pipeline_tag": "text-generation",
        "license": "gemma",
        "license_link": "https://ai.google.dev/gemma/terms",
        "language": ["en", "de"],
        "datasets": ["owner/answers"],
    }
    merged = {"base_model_relation": "finetune", "library_name": "transformers", "tags": ["gemma", "google"]}
    assert loaded(merged_lora(), tmp_path) == shared | merged
    own = {"base_model_relation": "adapter", "library_name": "peft", "tags": ["lora", "gemma", "google"]}
    assert loaded(adapter_card(record(), lock(), CONFIG, BASE_CARD), tmp_path) == shared | own
    assert not {"base_model", "base_model_relation"} & loaded(merged_all_weights(), tmp_path).keys()


@pytest.mark.parametrize(
    ("card", "found"),
    [
        (None, {}),
        ("# No metadata\n---\nlicense: mit\n---\n", {}),
        ("---\nlicense: [mit\n---\n", {}),
        ("---\nlicense: 2024-01-01\ntags: gemma\nlanguage: no\n---\n", {}),
        ("---\n" + "[" * 400 + "\n---\n", {}),
        ("---\nlicense: mit\nx: " + "y" * 10_000_000 + "\n---\n", {}),
        ("---\nlicense: mit\n---\n" + "text\n" * 1_000_000, {"license": "mit"}),
        ("---\r\nlicense: mit\r\n---\r\n# Windows\r\n", {"license": "mit"}),
    ],
    ids=lambda card: repr(card)[:24],
)
def test_base_card_gives_its_license_if_it_can_be_read(card: str | None, found: dict[str, str]) -> None:
    assert carried(card) == found


def test_card_is_written_from_sparse_records(tmp_path: Path) -> None:
    bare = {"base": {"id": "a/b"}, "lora": None, "dtype": "float32"}
    assert loaded(model_card(bare, {"recipe": {"lora": None}}, None), tmp_path)["base_model"] == "a/b"
    assert loaded(adapter_card(bare, {}, {}), tmp_path)["base_model"] == "a/b"


def test_python_code_in_card_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the code for transformers and PEFT on a tiny model, with the real folders' names."""
    import peft

    model = tiny.make_gemma3(tmp_path / "merged", num_hidden_layers=1)
    chats.tokenizer().save_pretrained(tmp_path / "merged")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "generation_config.json").write_text('{"eos_token_id": [1, 106]}')
    for data in ({"format": "chat"}, {"format": "text"}):
        (code,) = PYTHON.findall(model_card(record(), lock(data=data), None))
        code = code.replace("path/to/helpdesk", str(tmp_path / "merged"))
        exec(code.replace("max_new_tokens=256", "max_new_tokens=2"), {})
        assert capsys.readouterr().out
    made = record(base={"id": "/somewhere/merged", "revision": None})
    (code,) = PYTHON.findall(adapter_card(made, lock(), CONFIG))
    code = code.replace("path/to/helpdesk-adapter", str(tmp_path / "adapter"))
    scope: dict[str, Any] = {}
    exec(code.replace("path/to/merged", str(tmp_path / "merged")), scope)
    assert isinstance(scope["model"], peft.PeftModel)
    assert scope["model"].generation_config.eos_token_id == [1, 106]


def test_vllm_command_in_card_allows_largest_lora_rank() -> None:
    """Cover both patterns, because vLLM 0.32 refuses adapters of a rank above --max-lora-rank."""
    plain = adapter_card(record(), lock(), CONFIG)
    assert "--max-lora-rank 16" in plain and "--revision ac82b4e8" in plain
    larger = adapter_card(record(), lock(), {**CONFIG, "rank_pattern": {"o_proj": 17}})
    assert "--max-lora-rank 32" in larger
    assert "vllm serve" not in adapter_card(record(), lock(), {**CONFIG, "r": 4096})
    for refused in ({"modules_to_save": ["lm_head"]}, {"use_dora": True}, {"trainable_token_indices": [7]}):
        assert "vllm serve" not in adapter_card(record(), lock(), {**CONFIG, **refused})
