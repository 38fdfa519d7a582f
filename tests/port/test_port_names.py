"""Test the tools' names of models and templates: the table, and samples compared with the tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
    from transformers.utils.chat_template_utils import render_jinja_template

    made, _ = render_jinja_template([messages], chat_template=template, bos_token="<s>", eos_token="</s>")
    return str(made[0])


@pytest.mark.parametrize(
    ("builder", "id"),
    [
        ("llama2.llama2_7b", "meta-llama/Llama-2-7b-hf"),
        ("code_llama2.code_llama2_70b", "codellama/CodeLlama-70b-hf"),
        ("llama3.llama3_70b", "meta-llama/Meta-Llama-3-70B"),
        ("llama3_1.llama3_1_405b", "meta-llama/Llama-3.1-405B"),
        ("llama4.llama4_maverick_17b_128e", "meta-llama/Llama-4-Maverick-17B-128E"),
        ("mistral.mistral_7b", "mistralai/Mistral-7B-v0.1"),
        ("gemma.gemma_7b", "google/gemma-7b"),
        ("phi3.phi3_mini", "microsoft/Phi-3-mini-4k-instruct"),
        ("phi4.phi4_14b", "microsoft/phi-4"),
        ("qwen2.qwen2_0_5b", "Qwen/Qwen2-0.5B"),
        ("qwen2_5.qwen2_5_72b_instruct", "Qwen/Qwen2.5-72B-Instruct"),
        ("qwen3.qwen3_1_7b_base", "Qwen/Qwen3-1.7B-Base"),
        ("smol.smollm2_1_7b", "HuggingFaceTB/SmolLM2-1.7B"),
    ],
)
def test_torchtune_builder_names_map_to_model_ids(builder: str, id: str) -> None:
    assert known("torchtune", "builders")[builder][0] == id


def test_litgpt_names_map_to_well_formed_model_ids() -> None:
    names = known("litgpt", "names")
    assert names["Llama-3.1-8B"] == "meta-llama/Meta-Llama-3.1-8B"
    assert names["tiny-llama-1.1b-chat"] == "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
    assert names["R1-Distill-Llama-8B"] == "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
    ids = [*names.values(), *(id for ids in known("torchtune", "builders").values() for id in ids)]
    assert all(id.count("/") == 1 and id == id.strip() for id in ids)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", "<s>[INST] Be brief.\n\nHi[/INST] Yes.</s>[INST] So?[/INST] No.</s>"),
        (
            "mistral_small",
            "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]Yes.</s>[INST]So?[/INST]No.</s>",
        ),
        (
            "phi4",
            "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
            "<|im_start|>assistant<|im_sep|>Yes.<|im_end|><|im_start|>user<|im_sep|>So?<|im_end|>"
            "<|im_start|>assistant<|im_sep|>No.<|im_end|>",
        ),
        (
            "glm4",
            "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi<|assistant|>\nYes.<|user|>\nSo?<|assistant|>\nNo."
            "</s>",
        ),
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
        (
            "llama4",
            "<s><|header_start|>system<|header_end|>\n\nBe brief.<|eot|><|header_start|>user<|header_end|>"
            "\n\nHi<|eot|><|header_start|>assistant<|header_end|>\n\nYes.<|eot|><|header_start|>user<|header_end|>\n\n"
            "So?<|eot|><|header_start|>assistant<|header_end|>\n\nNo.<|eot|>",
        ),
        ("olmo", "</s>Be brief.<|user|>\nHi<|assistant|>\nYes.</s><|user|>\nSo?<|assistant|>\nNo.</s>"),
    ],
)
def test_llamafactory_templates_render_expected_text(name: str, text: str) -> None:
    made = templates.llamafactory(name, None)
    assert rendered(made.sets["data.chat_template"]) == text
    assert made.last is (name in ("glm4", "glm4_moe", "gpt_oss"))


def test_tokenizer_is_found_by_model_family_and_vocabulary() -> None:
    assert tokenizer_of(find("meta-llama/Llama-3.2-1B", Path())) == "llama3"
    assert tokenizer_of(find("Qwen/Qwen2.5-7B", Path())) == "qwen2"
    assert tokenizer_of(find("Qwen/Qwen3-30B-A3B", Path())) == "qwen3"


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
