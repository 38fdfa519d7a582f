"""Test the tools' names of models and templates: the table, and samples compared with the tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from recipec.compiler.lowering.catalog import entries, find
from recipec.compiler.port.meaning import templates
from recipec.compiler.port.meaning.adapters import default_targets, fused
from recipec.compiler.port.meaning.models import chat_sibling
from recipec.compiler.port.names import known, tokenizer_of, written_by

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
    assert {*known("unsloth", "own").values()} <= known("axolotl", "own").keys()
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
