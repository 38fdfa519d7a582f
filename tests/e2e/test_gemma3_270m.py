"""Tests of the real Gemma 3 270M from the package index, fine-tuned and merged by its recipe's artifact.

The tests ask the base model and the tuned model held-out questions in Gemma's turns. The tuned model answers
in the format of the training data. The figures are written to build/e2e/gemma3-270m.json.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx
from safetensors import safe_open
from transformers import AutoTokenizer

from recipec.runtime.model.decode import Generation, jit_generate, right_padded
from recipec.runtime.model.families import family_of
from scripts.gemma3_answers import answers, in_format, load
from tests.e2e.gemma3 import Tuned
from tests.runtime import training

pytestmark = pytest.mark.e2e


def test_checkpoint_has_its_family_tensors_and_completes_known_texts(checkpoint: Path) -> None:
    """Check that it holds its family's tensors, and continues a well-known text."""
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    family = family_of(config)
    expected = {
        f"model.{source.name}": list(source.shape)
        for parameter in family.parameters(family.architecture(config))
        for source in parameter.sources
    }
    with safe_open(checkpoint / "model.safetensors", framework="np") as file:
        assert {name: file.get_slice(name).get_shape() for name in file.keys()} == expected  # noqa: SIM118
    model, tokenizer = load(checkpoint)
    for prompt, continuation in (
        ("The capital of France is the city of", " Paris"),
        ("Paris is the capital of", " France"),
        ("The opposite of hot is", " cold"),
        ("Two plus two equals", " four"),
    ):
        logits = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1]
        assert tokenizer.decode(logits.argmax()) == continuation


def test_tokenizer_json_matches_sentencepiece_and_gives_offsets(checkpoint: Path, root: Path) -> None:
    """Check that tokenizer.json encodes as the model's SentencePiece does, with each token's offsets."""
    import sentencepiece

    fast = AutoTokenizer.from_pretrained(checkpoint)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(checkpoint / "tokenizer.model"))
    assert fast("The capital of France is")["input_ids"] == [2, 818, 5279, 529, 7001, 563]
    texts = [
        "  leading and   many     spaces " + " " * 40 + "x",
        "tabs\t\tand\nnew lines\n\n\n\r\n",
        "naïve café 日本語 🤗 \u200d ∑∫ ﬁ ǅ a\x00b\x07",
        "def f(x):\n    return x**2 - 3.14e-9\n\n\tif a<b: pass <h1>hi</h1>",
        (root / "README.md").read_text("utf-8"),
        (root / "recipes" / "data" / "gemma3-270m" / "train.jsonl").read_text("utf-8"),
    ]
    for text in texts:
        encoded = fast(text, add_special_tokens=False, return_offsets_mapping=True)
        assert encoded["input_ids"] == pieces.encode(text)
        assert fast.decode(encoded["input_ids"]) == text
        assert encoded["offset_mapping"][-1][1] == len(text)


def test_cached_decoder_continues_texts_as_transformers(checkpoint: Path) -> None:
    """Compare 24 greedy tokens of texts of unlike lengths, in float32, and their log-probabilities."""
    texts = ("The capital of France is the city of", "Once upon a time, in a", "One, two, three,")
    model, tokenizer = load(checkpoint)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    model.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": 24, "output_logits": True}
    expected = [
        model.generate(torch.tensor([prompt]), return_dict_in_generate=True, **options) for prompt in ids
    ]
    del model
    mesh, built = training.build(checkpoint, {"fsdp": 1}, full=True)
    graph, trained, base = nnx.split(built.model, nnx.Param, ...)
    tokens = np.zeros((len(ids), max(map(len, ids))), np.int32)
    for row, prompt in zip(tokens, ids, strict=True):
        row[: len(prompt)] = prompt
    with mesh:
        run = jit_generate(
            built.forward,
            functools.partial(nnx.merge, graph),
            mesh,
            Generation(24, (built.forward.architecture.vocab_size,)),
        )
        out = run(trained, base, right_padded(tokens, list(map(len, ids))))
    for row, (prompt, reference) in enumerate(zip(ids, expected, strict=True)):
        new = reference.sequences[0, len(prompt) :]
        assert out.tokens[row].tolist() == new.tolist()
        logps = torch.log_softmax(torch.cat(reference.logits), -1)[torch.arange(24), new]
        assert np.abs(np.asarray(out.logps[row]) - logps.numpy()).max() <= 1e-3


def test_fine_tuned_model_answers_in_the_training_format(
    root: Path, tuned: Tuned, questions: list[str]
) -> None:
    """Train and merge, and check that transformers answers in the format only after the merge."""
    assert tuned.trained.startswith("done: steps=20 ")
    before = answers(*load(tuned.base), questions)
    after = answers(*load(tuned.run / "merged"), questions)
    with_adapter = answers(*with_peft(tuned.base, tuned.run / "merged-adapter"), questions)
    metrics = [json.loads(line) for line in (tuned.run / "checkpoints/metrics.jsonl").open()]
    figures = {
        "trained": tuned.trained,
        "merged": tuned.merged,
        "training_seconds": round(tuned.seconds),
        "eval_loss": [round(row["eval_loss"], 4) for row in metrics if "eval_loss" in row],
        "in_format_before": in_format(before),
        "in_format_after": in_format(after),
        "in_format_with_the_peft_adapter": in_format(with_adapter),
        "answers": [
            {"question": question, "before": old, "after": new}
            for question, old, new in zip(questions, before, after, strict=True)
        ],
    }
    report = root / "build" / "e2e" / "gemma3-270m.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in figures.items() if key != "answers"}, indent=2))
    assert figures["in_format_before"] == 0
    assert figures["in_format_after"] >= 0.9
    assert figures["in_format_with_the_peft_adapter"] >= 0.9


def with_peft(base: Path, adapter: Path) -> tuple[Any, Any]:
    """Load the base model with the adapter in PEFT."""
    import peft

    model, tokenizer = load(base)
    return peft.PeftModel.from_pretrained(model, adapter).eval(), tokenizer
