"""Tests of the check that a chat template ends an answer with one token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from recipec.compiler.lower import Lowered
from recipec.spec.diagnostics import Diagnostic
from tests.runtime.chats import tokenizer
from tests.runtime.test_data_stops import CHATML, SPELLED

BASE = ("model.id=meta-llama/Meta-Llama-3-8B", "model.tokenizer=./tokenizer", "lora.rank=8")


@pytest.fixture
def ends(lowered: Callable[..., Lowered], tmp_path: Path) -> Callable[..., list[Diagnostic]]:
    """Return a function that gives a recipe's warnings about the end, with a tokenizer next to it."""
    tokenizer().save_pretrained(tmp_path / "tokenizer")

    def found(*sets: str) -> list[Diagnostic]:
        return [d for d in lowered(*BASE, *sets).diagnostics if d.code == "W0470"]

    return found


def test_end_of_several_tokens_is_reported_with_a_help_that_mends_it(
    ends: Callable[..., list[Diagnostic]], tmp_path: Path
) -> None:
    (tmp_path / "chat.jinja").write_text(SPELLED)
    given = "data.chat_template=chat.jinja"
    (warning,) = ends(given)
    assert "`<|it_end|>`, which is" in warning.message and warning.path == "data.chat_template"
    assert warning.help == 'model: {add_tokens: {"<|it_end|>": null}}'
    assert not ends(given, 'model.add_tokens={"<|it_end|>": null}')
    (tmp_path / "chat.jinja").write_text(CHATML)
    assert not ends(given)


def test_end_of_the_tokenizers_own_template_is_checked(
    ends: Callable[..., list[Diagnostic]], tmp_path: Path
) -> None:
    assert not ends()
    file = tmp_path / "tokenizer" / "chat_template.jinja"
    file.write_text(SPELLED)
    (warning,) = ends()
    assert warning.path == "model.tokenizer"
    file.write_text(SPELLED.replace("'<|it_end|>", "eos_token + '"))
    assert not ends()
    assert json.loads((tmp_path / "tokenizer" / "tokenizer_config.json").read_text())["eos_token"] == "<eos>"
