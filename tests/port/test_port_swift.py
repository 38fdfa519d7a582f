"""Test ms-swift's templates: what they write, and which part is learned.

scripts/same_run.py compares runs with ms-swift's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipec.compiler.port.ledger import Verdict
from tests.port.dialects import codes, finding, ported
from tests.port.test_port_names import rendered

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
