"""A Gemma 3 270M's answers to the held-out questions of recipes/data/gemma3-270m, and their format."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "recipes" / "data" / "gemma3-270m"
ANSWER = re.compile(r"ANSWER: \S[^|\n]* \| CONFIDENCE: (high|medium|low)")
"""The format of a whole answer to a held-out question; the turn has to end after it."""
NEW_TOKENS = 32
"""Enough for the data's longest answer, which has 25 tokens."""


def questions(file: str) -> list[str]:
    """Read the questions of "eval.jsonl", which are held out, or of "train.jsonl"."""
    lines = (DATA / file).read_text("utf-8").splitlines()
    return [json.loads(line)["messages"][0]["content"] for line in lines]


def load(directory: Path) -> tuple[Any, Any]:
    """Load transformers' model of a folder, in float32, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval(), tokenizer


def answers(model: Any, tokenizer: Any, questions: Sequence[str]) -> list[str]:
    """Answer each question greedily, up to the end of the model's turn or `NEW_TOKENS`."""
    import torch

    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in questions
    ]
    inputs = tokenizer(
        prompts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
    )
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    length = inputs["input_ids"].shape[1]
    texts = tokenizer.batch_decode(tokens[:, length:], skip_special_tokens=False)
    # An answer without an end token stays cut off, so it fails the full match of the format.
    return [re.split(r"<end_of_turn>|<eos>", text)[0] for text in texts]


def in_format(texts: Sequence[str]) -> float:
    """Return the share of answers that are entirely in the trained format."""
    return sum(ANSWER.fullmatch(text) is not None for text in texts) / len(texts)
