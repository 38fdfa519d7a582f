"""Tests of reasoning in rows, with the published templates of Qwen 3, Qwen 3.6 and Gemma 4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.data.encoding import Encoder, coding, show
from recipec.runtime.data.formats import ParsedSample
from recipec.runtime.data.prompts import prompts
from recipec.runtime.data.template import ChatTemplate
from recipec.runtime.errors import UserError
from recipec.runtime.sections import Generations
from recipec.runtime.settings import DataSettings
from tests.runtime.chats import chat, published, tokenizer, write
from tests.runtime.preparing import prepared

THOUGHT = chat("Hello", "Hi there", "And now?", "Good bye")
THOUGHT[1] |= {"reasoning_content": "They greet."}
THOUGHT[3] |= {"reasoning_content": "They leave."}
BY_NAME = [{("thinking" if k == "reasoning_content" else k): v for k, v in m.items()} for m in THOUGHT]
IN_TEXT = chat(
    "Hello", "<think>\nThey greet.\n</think>\n\nHi there", "And now?", "<think>They leave.</think>Good bye"
)
IN_GEMMAS = chat("Hello", "<|channel>thought\nThey greet.\n<channel|>Hi there", "And now?")
IN_GEMMAS += chat("", "<|channel>thought\nThey leave.\n<channel|>Good bye")[1:]
RAW = chat("Hello", "They greet.\n</think>\n\nHi there", "And now?", "\nThey leave.\n</think>Good bye")
RAW_GEMMAS = chat("Hello", "They greet.\n<channel|>Hi there", "And now?", "They leave.<channel|>Good bye")
"""What models write whose prompt ends with the opening mark."""

EMPTY = "<think>\n\n</think>\n\n"
LARGE = published("gemma4").replace(
    "{{- '<|turn>model\\n' -}}\n    {%- endif -%}\n{%- endif -%}",
    "{{- '<|turn>model\\n' -}}\n    {%- if not enable_thinking | default(false) -%}"
    "{{- '<|channel>thought\\n<channel|>' -}}{%- endif -%}\n    {%- endif -%}\n{%- endif -%}",
)
"""For no thinking, Gemma 4's larger models prompt with an empty thought."""
assert "channel>thought\\n<channel|>" in LARGE


def learned(
    template: str, messages: list[dict[str, Any]], reasoning: str | None, loss_on: Any = "assistant"
) -> Any:
    """Return the parts of the text that carry loss, or why the sample is left out."""
    text = template if "{" in template else published(template)
    data = DataSettings(train=(), max_length=512, packing=False, loss_on=loss_on, reasoning=reasoning)
    encoder = Encoder(coding(tokenizer(), text, data, None))
    _, report = encoder.encode([ParsedSample("x:1", messages)], 0)
    if not report.kept:
        return next(
            problem.reason
            for name in ("inconsistent", "malformed", "masked")
            for problem in getattr(report, name).first
        )
    (shown,) = show(encoder, ParsedSample("x:1", messages))
    assert not report.unused
    return "".join(piece for piece, _ in shown.pieces), [piece for piece, target in shown.pieces if target]


@pytest.mark.parametrize("messages", [THOUGHT, BY_NAME, IN_TEXT, IN_GEMMAS, RAW, RAW_GEMMAS])
@pytest.mark.parametrize(
    ("template", "loss_on", "reasoning", "expected"),
    [
        ("qwen3", "last_assistant", "keep", ["<think>\nThey leave.\n</think>\n\nGood bye<|im_end|>"]),
        ("qwen3", "assistant", "drop", ["Hi there<|im_end|>", f"{EMPTY}Good bye<|im_end|>"]),
        # The prompt of a model without thinking already has the empty reasoning.
        ("qwen3", "assistant", "empty", ["Hi there<|im_end|>", "Good bye<|im_end|>"]),
        (
            *("qwen3_6", "assistant", "keep"),
            ["They greet.\n</think>\n\nHi there<|im_end|>", "They leave.\n</think>\n\nGood bye<|im_end|>"],
        ),
        (
            "gemma4_v5",
            "last_assistant",
            "keep",
            ["<|channel>thought\nThey leave.\n<channel|>Good bye<turn|>"],
        ),
        ("gemma4_v5", "assistant", "drop", ["Hi there<turn|>", "Good bye<turn|>"]),
        ("gemma4_v5", "assistant", "empty", ["Hi there<turn|>", "Good bye<turn|>"]),
        (LARGE, "assistant", "empty", ["Hi there<turn|>", "Good bye<turn|>"]),
    ],
)
def test_reasoning_modes_work_for_every_spelling_of_reasoning(
    template: str, loss_on: str, reasoning: str, expected: list[str], messages: list[dict[str, Any]]
) -> None:
    text, found = learned(template, messages, reasoning, loss_on)
    assert found == expected
    assert ("They leave." in text) == (reasoning == "keep")
    assert ("<|think|>" in text) == (reasoning == "keep" and template.startswith("gemma4"))
    if template is LARGE:
        assert text.endswith("<|turn>model\n<|channel>thought\n<channel|>Good bye<turn|>\n")
        assert text.count("thought") == 1


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6"])
def test_empty_reasoning_matches_transformers_prompt_without_thinking(name: str) -> None:
    """Compare with transformers' own rendering of the prompt."""
    using = tokenizer(published(name))
    prompt = using.apply_chat_template(
        chat("Hello", "Hi there", "And now?"),
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    text, found = learned(name, THOUGHT, "empty", "last_assistant")
    assert text == f"{prompt}Good bye<|im_end|>\n" and found == ["Good bye<|im_end|>"]


def test_unusable_reasoning_drops_the_row_with_a_reason() -> None:
    assert learned("qwen3", THOUGHT, "keep") == "the chat template leaves the reasoning of message 1 out"
    assert learned("llama3", THOUGHT[:2], "keep") == "the chat template leaves the reasoning of message 1 out"
    # Neither does reasoning count that only closes, nor the same reasoning in another turn or in the answer.
    for first, last in (
        ("They greet.", "They leave."),
        ("They leave.", "They leave."),
        ("Hi", "They leave."),
    ):
        raw = chat("Hello", f"{first}</think>Hi there", "And now?", f"{last}</think>Good bye")
        assert learned("qwen3", raw, "keep") == "the chat template leaves the reasoning of message 1 out"
        assert learned("qwen3", raw, "keep", "last_assistant")[1] == [
            "<think>\nThey leave.\n</think>\n\nGood bye<|im_end|>"
        ]
    light = [THOUGHT[0], {**THOUGHT[1], "weight": 0}, *THOUGHT[2:]]
    assert learned("qwen3", light, "keep")[1] == ["<think>\nThey leave.\n</think>\n\nGood bye<|im_end|>"]
    unclosed = chat("Hello", "<think>They greet. Hi there")
    for mode in ("keep", "drop", "empty"):
        assert learned("qwen3", unclosed, mode) == "message 1 opens <think> and does not close it"
    for content, reason in (
        ("They greet.</think>Hi</think>there", "closes </think> twice"),
        ("<think>They</think><think>greet.</think>Hi", "opens <think> twice"),
        ("Write `</think>` at the end.", "has </think> in quotes without <think>"),
        ('Stop at "</think>".', "has </think> in quotes without <think>"),
        ("<|channel>thought\nThey greet. Hi", "opens <|channel>thought and does not close it"),
    ):
        assert learned("qwen3", chat("Hello", content), "drop") == f"message 1 {reason}"
    about = "Write `<think>` first and `</think>` last."
    assert learned("llama3", chat("Hello", about), "drop")[1] == [f"{about}<|eot_id|>"]
    odd = [*chat("Hello"), {"role": "assistant", "content": "Hi", "thinking": [["They greet."]]}]
    assert learned("qwen3", odd, "drop") == "the reasoning of message 1 is not text"
    twice = [*chat("Hello"), {**THOUGHT[1], "content": "<think>They wave.</think>Hi"}]
    assert learned("qwen3", twice, "keep") == "message 1 has two texts of reasoning"
    alone = chat("Hello", "<think>They greet.</think>")
    assert "writes no part of an assistant's turn" in learned("qwen2_5", alone, "drop")


def test_reasoning_without_an_opening_mark_is_counted() -> None:
    data = DataSettings(train=(), max_length=512, packing=False, reasoning="drop")
    encoder = Encoder(coding(tokenizer(), published("qwen3"), data, None))
    _, report = encoder.encode([ParsedSample(f"x:{n}", rows) for n, rows in enumerate((RAW, IN_TEXT))], 0)
    assert (report.kept, report.adapted) == (2, {"unopened": 1})
    assert any(note.startswith("1 samples: the text before </think>") for note in report.notes())


def test_empty_reasoning_needs_a_template_with_enable_thinking(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [THOUGHT] * 4)
    with pytest.raises(UserError, match="the chat template does not read enable_thinking"):
        prepared(tmp_path, rows=1, batch=1, reasoning="empty")
    kept = [
        prepared(tmp_path, rows=1, batch=1, reasoning=mode, chat_template=published("qwen3")).fingerprint
        for mode in (None, "drop", "empty")
    ]
    assert len(set(kept)) == 3


def test_loss_on_all_includes_the_empty_reasoning() -> None:
    text, found = learned(LARGE, THOUGHT[:2], "empty", "all")
    assert "".join(found) == text.removeprefix("<bos>") and "<channel|>Hi there" in text


def test_sample_prompts_get_the_variables_of_the_reasoning_mode(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": THOUGHT[:1]}))
    made, text = tokenizer(), published("qwen3")
    data = DataSettings(train=(), max_length=512, packing=False, chat_template=text, reasoning="empty")
    found = prompts(Generations("prompts.jsonl", 8), data, made, tmp_path, {})
    asked = ChatTemplate(text, {"enable_thinking": False}).render(THOUGHT[:1], add_generation_prompt=True)
    assert asked.endswith(EMPTY)
    expected = made.backend_tokenizer.encode(asked, add_special_tokens=False).ids
    assert found.tokens[0, : found.lengths[0]].tolist() == expected
