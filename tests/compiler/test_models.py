"""Tests of `recipe models`: what a word finds, and the message if it finds nothing."""

from __future__ import annotations

import json

import pytest

from recipec.compiler import catalog
from tests.compiler.commands import recipe


def test_all_models_are_listed_with_their_sizes() -> None:
    status, out, _ = recipe("models", "--json")
    found = {one["id"]: one for one in json.loads(out)}
    assert status == 0 and list(found) == list(catalog.entries())
    assert found["google/gemma-4-26B-A4B"]["parameters"] == pytest.approx(25.2e9, rel=0.01)
    assert found["google/gemma-3-1b-it"]["served"] == "vLLM on torchax"


@pytest.mark.parametrize(
    ("word", "ids"),
    [
        ("gemma4 31b", ["google/gemma-4-31B", "google/gemma-4-31B-it"]),
        ("unsloth/Qwen3-8B-bnb-4bit", ["Qwen/Qwen3-8B"]),
        (
            "StarCoder2",
            [
                *(f"bigcode/starcoder2-{size}" for size in ("3b", "7b", "15b")),
                "HuggingFaceH4/starchat2-15b-sft-v0.1",
            ],
        ),
    ],
)
def test_search_word_finds_matching_models(word: str, ids: list[str]) -> None:
    assert [one["id"] for one in json.loads(recipe("models", word, "--json")[1])] == ids
    status, out, _ = recipe("models", word)
    assert status == 0 and all(id in out for id in ids)


def test_list_has_a_table_for_each_family_and_server_implementation() -> None:
    out = recipe("models", "falcon3-1b")[1].splitlines()
    assert out[:3] == [
        "Llama: splash attention, served by tpu-inference",
        "  tiiuae/Falcon3-1B-Base      1.67 billion",
        "  tiiuae/Falcon3-1B-Instruct  1.67 billion  tuned for chat",
    ]
    heads = [
        line.partition(":")[0] for line in recipe("models", "gemma")[1].splitlines() if ": splash" in line
    ]
    # The 12B of Gemma 4 is served by another implementation.
    assert heads == ["Gemma 4", "Gemma 4", "Gemma 3", "Gemma 2", "Gemma"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("mosaicml/mpt-7b", "error[E0803]: this version cannot train models of MPT"),
        ("nosuchmodel", "error[E0801]: no model in the catalog has `nosuchmodel` in its id or family"),
    ],
)
def test_search_word_without_models_gives_the_reason(word: str, said: str) -> None:
    status, out, errors = recipe("models", word)
    assert (status, out) == (1, "")
    assert said in errors and "known are checkpoints of" in errors
    status, out, _ = recipe("models", word, "--json")
    assert status == 1 and said.partition("]: ")[2] in out
