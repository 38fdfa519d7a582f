"""Tests of how a checkpoint's tokenizer is loaded: with its template, and no larger than the embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.data.tokenizer import chat_template, load_tokenizer
from recipec.runtime.errors import UserError
from recipec.runtime.settings import DataSettings, ModelSettings
from tests.runtime.chats import GEMMA4, tokenizer


def load(folder: Path, **settings: Any) -> Any:
    model = ModelSettings(id="x", family="gemma4", tokenizer=settings.pop("tokenizer", None))
    return load_tokenizer(
        folder, model, DataSettings(train=("x",), max_length=8, packing=False, **settings), folder
    )


def test_tokenizer_loads_only_if_it_fits_the_embeddings(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 400}}')
    assert load(tmp_path).encode("hello") == tokenizer().encode("hello")
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    with pytest.raises(UserError, match=r"token ids up to \d+, and the model has 300 embeddings"):
        load(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"vocab_size": 400}')
    with pytest.raises(UserError, match="cannot be loaded"):
        load(other)
    (tmp_path / "config.json").unlink()
    assert load(tmp_path, tokenizer=str(tmp_path)).is_fast


def test_special_tokens_beyond_the_embeddings_are_accepted(tmp_path: Path) -> None:
    grown = load_copy(tmp_path)
    size = len(grown)
    grown.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    grown.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size}))
    assert load(tmp_path).convert_tokens_to_ids("<image_soft_token>") == size


def load_copy(folder: Path) -> Any:
    tokenizer().save_pretrained(folder)
    return load(folder)


def test_tokenizer_without_chat_template_needs_data_chat_template(tmp_path: Path) -> None:
    plain = load_copy(tmp_path)
    plain.chat_template = None
    plain.save_pretrained(tmp_path)
    for file in tmp_path.glob("*.jinja"):
        file.unlink()
    with pytest.raises(UserError, match="has no chat template") as error:
        load(tmp_path)
    assert "data.chat_template" in (error.value.help or "")
    assert load(tmp_path, chat_template=GEMMA4).is_fast


def test_tokenizer_without_a_default_template_is_refused(tmp_path: Path) -> None:
    several = load_copy(tmp_path)
    several.chat_template = {"rag": GEMMA4, "tool_use": GEMMA4}
    data = DataSettings(train=("train.jsonl",), packing=False, max_length=96)
    with pytest.raises(UserError, match="no default chat template") as error:
        chat_template(several, data, tmp_path)
    assert "data.chat_template" in (error.value.help or "")
