"""Tests of files of prompts and of their judges: errors name the line, and characters stay unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipec.runtime.errors import UserError
from recipec.runtime.serving import evaluate_answers
from recipec.runtime.serving.evaluate_answers import SamplingSettings, recorded
from recipec.runtime.serving.evaluate_prompts import parse, read


def test_lone_surrogate_in_an_answer_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with evaluate_answers._journal(path) as write:
        write(
            {"prompt": "p", "sample": 0, "text": "\ud83d", "cut": False, "tokens": 1}
            | SamplingSettings().drawn()
        )
    assert recorded(path, SamplingSettings()).found["p", 0].text == "\ud83d"


LINES: list[tuple[str, str]] = [
    ('{"prompt": "a"', ":1: it is not JSON: Expecting ',' delimiter at column 15"),
    ("[]", ":1: it is not a JSON object"),
    ('{"prompt": "a"}', ":1: `expected` must be a regular expression, as text"),
    ('{"prompt": "", "expected": "b"}', ":1: `prompt` must be a text that is not empty"),
    ('{"expected": "b"}', ":1: it must have either `prompt` or `messages`"),
    ('{"prompt": "a", "expcted": "b"}', ":1: it has the unknown key `expcted`"),
    ('{"messages": [], "expected": "b"}', ":1: `messages` must be a list that is not empty"),
    ('{"messages": [{"role": "usr", "content": "a"}], "expected": "b"}', "has a `role`, one of system,"),
    ('{"messages": [{"role": "user"}], "expected": "b"}', ":1: each of `messages` has a `content`"),
    (
        '{"messages": [{"role": "assistant", "content": "b"}], "expected": "c"}',
        "there is nothing left to answer",
    ),
    (
        '{"prompt": "a", "expected": "(b"}',
        ":1: `expected` is not a regular expression: missing ), unterminated subpattern at position 0",
    ),
    (
        '{"prompt": "a", "expected": "b"}\n\n{"prompt": "a", "expected": "c"}',
        ":3: it asks the same as line 1",
    ),
    ("\n\n", ": it holds no prompts"),
    ("{\n[", " (and 1 more)"),
    (f'{{"prompt": {"1" * 5000}}}', ":1: its JSON is nested too deeply, or has too long a number"),
]


@pytest.mark.parametrize(("text", "wanted"), LINES)
def test_prompt_file_errors_name_their_line(text: str, wanted: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read(path)
    assert wanted in caught.value.message and caught.value.message.startswith(str(path))


def test_unreadable_prompt_files_give_one_sentence_errors(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9", "expected": "a"}')
    said = [parse(tmp_path / name)[1][0].message for name in ("nowhere", "latin", ".")]
    assert said == ["there is no such file", "it is not UTF-8 text", "it cannot be read: Is a directory"]


def test_unicode_line_separators_do_not_split_prompt_lines(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\ufeff{"prompt": "a\u2028b", "expected": "c"}\r\n', encoding="utf-8")
    (prompt,) = read(path)
    messages = [{"role": "user", "content": "a\u2028b"}]
    assert prompt.messages == messages
    assert evaluate_answers.request("m", prompt, SamplingSettings())[1]["messages"] == messages
