"""Tests of new tokens: added to spare rows as in transformers, in place of reserved ones, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from recipec.runtime.data.tokenizer import load_tokenizer, numbered, with_tokens
from recipec.runtime.errors import UserError
from recipec.runtime.model.adapters import LoraSettings
from recipec.runtime.settings import DataSettings, ModelSettings
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny
from tests.runtime.chats import tokenizer
from tests.runtime.decoders import make
from tests.runtime.references import grow
from tests.runtime.runs import write_merged

DATA = DataSettings(train=("train.jsonl",), format="text", max_length=8, packing=False)
TEXT = "<|turn_a|>user: 12<tool>+</tool><|turn_b|>"


def saved(folder: Path, rows: int, *reserved: str) -> Any:
    """Save a tokenizer with reserved tokens, and a config.json with this many embedding rows."""
    made = tokenizer()
    made.add_tokens(list(reserved), special_tokens=True)
    made.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": rows, "model_type": "llama"}))
    return made


def loaded(folder: Path, **tokens: str | None) -> Any:
    settings = ModelSettings(id=str(folder), family="llama", add_tokens=tuple(tokens.items()))
    return load_tokenizer(folder, settings, DATA)


def test_new_tokens_take_spare_rows_in_sorted_order(tmp_path: Path) -> None:
    expected = saved(tmp_path, 10_000)
    names = ["</tool>", "<tool>", "<|turn_a|>", "<|turn_b|>"]
    expected.add_tokens(names, special_tokens=True)
    found = loaded(tmp_path, **dict.fromkeys(reversed(names)))
    assert found(TEXT).input_ids == expected(TEXT).input_ids
    assert found.convert_tokens_to_ids(names) == expected.convert_tokens_to_ids(names)
    assert found.decode(found(TEXT).input_ids, skip_special_tokens=True) == "user: 12+"


def test_new_token_takes_row_of_reserved_token(tmp_path: Path) -> None:
    before = saved(tmp_path, 10_000, "<reserved_0>", "<reserved_1>")
    row = before.convert_tokens_to_ids("<reserved_1>")
    found = loaded(tmp_path, **{"<|turn_c|>": "<reserved_1>"})
    assert found.convert_tokens_to_ids("<|turn_c|>") == row
    assert len(found) == len(before) and "<reserved_1>" not in found.get_vocab()
    assert found("7<|turn_c|>").input_ids == [*before("7").input_ids, row]


def test_reserved_unigram_vocabulary_entry_is_renamed() -> None:
    files = {"tokenizer.json": {"model": {"type": "Unigram", "vocab": [["<unk>", 0], ["<unused0>", 0]]}}}
    made = with_tokens({n: json.dumps(c).encode() for n, c in files.items()}, {"<a>": "<unused0>"}, 2, "base")
    content = json.loads(made["tokenizer.json"])
    assert content["model"]["vocab"][1] == ["<a>", 0]
    assert [(one["id"], one["content"]) for one in content["added_tokens"]] == [(1, "<a>")]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [(("<c>",), "no token `<c>`"), ((20_000,), "has 10000 rows"), (("<b>", 11, "<a>", 10_000 - 1), None)],
)
def test_train_tokens_resolve_to_embedding_rows_or_are_refused(
    tmp_path: Path, tokens: tuple[int | str, ...], message: str | None
) -> None:
    """A token that the recipe adds has the number that the run's tokenizer gives it."""
    saved(tmp_path, 10_000, "<reserved_0>")
    added = {"<a>": None, "<b>": "<reserved_0>"}
    numbers = dict(zip(added, loaded(tmp_path, **added).convert_tokens_to_ids([*added]), strict=True))
    base: Any = SimpleNamespace(
        architecture=SimpleNamespace(vocab_size=10_000),
        name="base",
        side_files=[path.name for path in tmp_path.iterdir()],
        side_file=lambda name: (tmp_path / name).read_bytes(),
    )
    lora = LoraSettings(rank=1, alpha=1.0, dropout=0.0, targets=(), trainable_tokens=tokens)
    if message is None:
        found = numbered(lora, base, added).trainable_tokens
        assert found == (numbers["<b>"], 11, numbers["<a>"], 9_999)
        lora = replace(lora, trainable_tokens=(numbers["<a>"], "<a>"))
        message = "twice"
    with pytest.raises(UserError, match=message):
        numbered(lora, base, added)


@pytest.mark.parametrize(
    ("tokens", "message", "help"),
    [
        ({"<a>": None}, "the embedding has", "<reserved_0>"),
        ({"<a>": "<b>"}, "has no `<b>`", "<reserved_0>"),
        ({"<reserved_0>": None}, "has `<reserved_0>` already", "leave it out"),
    ],
)
def test_new_token_that_cannot_be_placed_is_refused(
    tmp_path: Path, tokens: dict[str, str | None], message: str, help: str
) -> None:
    made = saved(tmp_path, 0, "<reserved_0>")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": len(made), "model_type": "llama"}))
    with pytest.raises(UserError, match=message) as found:
        loaded(tmp_path, **tokens)
    assert help in (found.value.help or "")


@pytest.mark.parametrize(("content", "why"), [(b"{", "not JSON"), (b"[]", "not a JSON object")])
def test_broken_tokenizer_file_is_refused(content: bytes, why: str) -> None:
    files = {"tokenizer.json": b"{}", "tokenizer_config.json": content}
    with pytest.raises(UserError, match=f"base/tokenizer_config.json: {why}"):
        with_tokens(files, {"<a>": None}, 8, "base")


@pytest.mark.parametrize("case", ["gemma3", "phi3"])
def test_merged_grown_vocabulary_matches_transformers_resize(case: str, tmp_path: Path) -> None:
    if case == "gemma3":
        model = tiny.make_gemma3(tmp_path / "base", num_hidden_layers=1)
    else:
        model = make(case, tmp_path / "base", num_hidden_layers=1)
    base = HFCheckpoint.open(tmp_path / "base")
    rows = base.architecture.vocab_size + 5
    grow(model, rows)
    wider = base.grown(rows)
    wider.verify()
    (tmp_path / "merged").mkdir()
    write_merged(wider, {}, tmp_path / "merged")
    config = json.loads((tmp_path / "merged/config.json").read_text())
    assert (config.get("text_config") or config)["vocab_size"] == rows
    assert HFCheckpoint.open(tmp_path / "merged").architecture == wider.architecture
    found = getattr(transformers, config["architectures"][0]).from_pretrained(tmp_path / "merged")
    expected = model.state_dict()
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    with torch.no_grad():
        tokens = torch.tensor([[5, rows - 1, 7]])
        torch.testing.assert_close(found(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)
    with pytest.raises(UserError, match="compiled for"):
        base.grown(4)


def test_byte_ranges_of_grown_tensor_match_whole_tensor(tmp_path: Path) -> None:
    make("phi3", tmp_path / "base", num_hidden_layers=1, vocab_size=400)
    wider = HFCheckpoint.open(tmp_path / "base").grown(403)
    whole = wider.read("lm_head.weight")
    own = HFCheckpoint.open(tmp_path / "base").read("lm_head.weight")
    assert np.array_equal(whole[:400], own) and np.array_equal(whole[400], whole[402])
    content = whole.tobytes()
    row = len(content) // 403
    for start, stop in (
        (399 * row - 4, 401 * row + 8),
        (400 * row + 4, 402 * row + 4),
        (402 * row, 403 * row),
    ):
        assert bytes(wider.bytes_of("lm_head.weight", start, stop)) == content[start:stop]
