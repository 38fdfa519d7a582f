"""Test the tools' names of models and templates, and what the templates write and learn.

port/scripts/same_run.py compares runs with ms-swift's own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from recipec.compiler.catalog import entries, find
from recipec.port.dialects import KNOWN, load
from recipec.port.ledger import Verdict
from recipec.port.meaning import templates
from recipec.port.meaning.adapters import default_targets, fused
from recipec.port.meaning.model_names import chat_sibling
from recipec.port.tool_names import known, tokenizer_of, written_by
from recipec.port.tools import NAMES, WRITTEN, named
from tests.port.dialects import codes, finding, ported

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "So?"},
    {"role": "assistant", "content": "No."},
]


def rendered(template: str, messages: list[dict[str, str]] = MESSAGES) -> str:
    made, _ = render_jinja_template([messages], chat_template=template, bos_token="<s>", eos_token="</s>")
    return str(made[0])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", "<s>[INST] Be brief.\n\nHi[/INST] Yes.</s>[INST] So?[/INST] No.</s>"),
        (
            "glm4_moe",
            "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi<|assistant|><think>\n\n</think>\n\n\nYes."
            "<|user|>\nSo?<|assistant|><think>\n\n</think>\n\n\nNo.</s>",
        ),
        (
            "gpt_oss",
            "<|start|>system<|message|>Be brief.<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant"
            "<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>Yes."
            "<|start|>user<|message|>So?<|end|><|start|>assistant"
            "<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>No.</s>",
        ),
    ],
)
def test_llamafactory_templates_render_expected_text(name: str, text: str) -> None:
    made = templates.llamafactory(name, None)
    assert rendered(made.sets["data.chat_template"]) == text
    assert made.last is (name != "mistral")


def test_name_tables_refer_to_existing_entries() -> None:
    rows = written_by("llamafactory")
    assert all(row["like"] in rows for row in known("torchtune", "tokenizers").values() if "like" in row)
    for tool in ("axolotl", "unsloth"):
        assert known(tool, "own").keys() <= written_by(tool).keys()
        assert all(any(re.fullmatch(ids, id) for id in entries()) for ids in known(tool, "own").values())
    for model in entries():
        if "config" in entries()[model]:
            default_targets(find(model, Path()))
            assert chat_sibling(find(model, Path())) in (None, *entries())


def test_targets_in_fused_projections_become_the_fused_projection(tmp_path: Path) -> None:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 200064}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3", **sizes, **heads}))
    model = find(".", tmp_path)
    assert tokenizer_of(model) == "phi4_mini"
    made, note = fused(model, ["q_proj", "v_proj", "o_proj", "up_proj"])
    assert made == ["qkv_proj", "o_proj", "gate_up_proj"]
    assert note.startswith("q_proj, v_proj and up_proj are parts of qkv_proj and gate_up_proj")
    for other in (None, find("Qwen/Qwen3-0.6B", Path())):
        assert fused(other, ["q_proj", "o_proj"]) == (["q_proj", "o_proj"], "")


BASE = {"model": "Qwen/Qwen3-8B", "dataset": ["a.jsonl"], "tuner_type": "lora"}
TALK = [
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nSo."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "No."},
]


def test_empty_thought_precedes_answer_and_is_not_learned(tmp_path: Path) -> None:
    ledger = ported("swift", tmp_path, BASE)
    template = str(ledger.value("data.chat_template"))
    assert finding(ledger, "template").verdict is Verdict.DEFAULTED and codes(ledger) == []
    before, begins = template.split("{%- generation -%}")[0], "{{- '<think>\\n\\n</think>\\n\\n' -}}"
    assert begins in before and template.count(begins) == 1
    assert rendered(template, TALK) == (
        "<|im_start|>user\nWhy?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nSo.<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nNo.<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("model", "name", "begins"),
    [
        ("Qwen/Qwen2.5-7B", None, "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud."),
        ("Qwen/Qwen3-4B-Instruct-2507", None, "<|im_start|>user\nWhy?"),
        ("Qwen/Qwen3-8B", "qwen2_5", "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud."),
        ("01-ai/Yi-1.5-6B", None, "<|im_start|>user\nWhy?"),
    ],
)
def test_model_gets_ms_swift_template_text(tmp_path: Path, model: str, name: str | None, begins: str) -> None:
    given = {**BASE, "model": model, **({"template": name} if name else {})}
    template = str(ported("swift", tmp_path, given).value("data.chat_template"))
    said = rendered(template, TALK)
    assert said.startswith(begins) and said.endswith("<|im_start|>assistant\nNo.<|im_end|>\n")


@pytest.mark.parametrize(
    ("more", "learned", "alone"),
    [
        ({}, "No.", False),
        ({"disable_ignore_empty_think": True}, "<think>\n\n</think>\n\nNo.", False),
        ({"loss_scale": "last_round"}, "No.", True),
        ({"loss_scale": "last_round", "template": "qwen2_5"}, "No.", False),
        ({"preserve_thinking": False}, "No.", True),
        ({"rlhf_type": "dpo"}, "No.", True),
    ],
)
def test_swift_options_determine_which_thoughts_are_learned_and_kept(
    tmp_path: Path, more: dict[str, object], learned: str, alone: bool
) -> None:
    ledger = ported("swift", tmp_path, {**BASE, **more})
    template = str(ledger.value("data.chat_template"))
    marked = template.replace("{%- generation -%}", "{{- '[' -}}").replace(
        "{%- endgeneration -%}", "{{- ']' -}}"
    )
    assert rendered(marked, TALK).rpartition("[")[2] == f"{learned}<|im_end|>\n]"
    assert ("assistant\nSo.<|im_end|>" in rendered(template, TALK)) is alone, "earlier thoughts are taken out"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *(
            (text, "llamafactory")
            for text in ("llamafactory", "llama-factory", "LLaMA-Factory", "llama_factory")
        ),
        *((text, "automodel") for text in ("NeMo AutoModel", "automodel")),
        *((text, "swift") for text in ("ms-swift", "ms_swift", "swift")),
        *(("llamafactory-v1", "llamafactory_v1"), ("LLaMA-Factory v1", "llamafactory_v1")),
        *(("TRL", "trl"), ("lit-gpt", "litgpt"), ("nothing", None), ("", None)),
    ],
)
def test_every_spelling_of_a_tool_names_it(text: str, name: str | None) -> None:
    assert named(text) == name


def test_each_dialect_has_a_name_and_its_title_is_a_spelling_of_it() -> None:
    assert NAMES.keys() == KNOWN.keys()
    assert all(named(load(name).TITLE) == name for name in NAMES)
    assert set(WRITTEN) <= NAMES.keys()
