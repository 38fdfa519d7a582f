"""Greedy answers of transformers and of vLLM, and how well they agree."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.e2e import vllm_cpu

NEW_TOKENS = 16
TOLERANCE = 1e-3
"""Between log probabilities; the largest difference seen was 2.4e-4."""
TIE = 2 * TOLERANCE
"""If the likeliest tokens of transformers and vLLM are closer than this, both are right.

The rest of the answer is not compared.
"""
TIES = 1
"""The most ties among the answers of one model."""


@dataclass(frozen=True)
class Answer:
    """A model's greedy answer to a prompt.

    Attributes:
        tokens: `NEW_TOKENS` ids, which continue after an end-of-text token.
        logprobs: for each step, by token id: the five likeliest of vLLM, all of transformers.
    """

    tokens: list[int]
    logprobs: Sequence[Mapping[int, float] | np.ndarray]


def load(directory: Path) -> Any:
    """Load a folder in transformers, in float32, as the class that its config.json names."""
    import torch
    import transformers

    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    torch.set_num_threads(1 if size < 100e6 else os.cpu_count() or 1)
    config = json.loads((directory / "config.json").read_text("utf-8"))
    build = getattr(transformers, config["architectures"][0])
    return build.from_pretrained(directory, dtype=torch.float32).eval()


def with_peft(base: Path, adapter: Path) -> Any:
    import peft

    return peft.PeftModel.from_pretrained(load(base), adapter).eval()


def said(model: Any, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """Return transformers' answers.

    A large model answers all prompts in one batch, because reading its weights takes the time. A small model
    answers one by one, because padding moves the tiny model's log probabilities by up to 3.3e-4.
    """
    model.generation_config.eos_token_id = None
    large = sum(parameter.numel() for parameter in model.parameters()) > 100e6
    batches = [prompts] if large else [[prompt] for prompt in prompts]
    return [answer for batch in batches for answer in said_together(model, batch)]


def said_together(model: Any, prompts: Sequence[Sequence[int]]) -> Iterator[Answer]:
    """Answer one batch. Masked padding precedes the shorter prompts."""
    import torch

    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    made = model.generate(
        input_ids=torch.tensor([[0] * n + list(prompt) for n, prompt in zip(padding, prompts, strict=True)]),
        attention_mask=torch.tensor([[0] * n + [1] * (longest - n) for n in padding]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logprobs = torch.stack(made.logits, dim=1).float().log_softmax(-1).numpy()
    for ids, one in zip(made.sequences, logprobs, strict=True):
        yield Answer(ids[longest:].tolist(), one)


def asked(server: vllm_cpu.Server, model: str, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """Request vLLM's answers to all prompts at once."""
    body = {
        "model": model,
        "prompt": prompts,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 5,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    choices = sorted(server.post("/v1/completions", body)["choices"], key=lambda choice: choice["index"])
    assert [choice["prompt_token_ids"] for choice in choices] == list(prompts)
    return [
        Answer(
            choice["token_ids"],
            [
                {int(token.removeprefix("token_id:")): value for token, value in step.items()}
                for step in choice["logprobs"]["top_logprobs"]
            ],
        )
        for choice in choices
    ]


def agreement(answers: Sequence[Answer], wanted: Sequence[Answer]) -> dict[str, Any]:
    """Check that all of vLLM's answers agree with transformers', except for `TIES`.

    Returns:
        The number of answers, the number of ties, and the largest difference between log probabilities at the
            steps before an answer's first tie.
    """
    ties = 0
    largest = 0.0
    for number, (answer, want) in enumerate(zip(answers, wanted, strict=True)):
        assert len(answer.tokens) == len(want.tokens) == NEW_TOKENS
        for step, (token, expected) in enumerate(zip(answer.tokens, want.tokens, strict=True)):
            logprobs = want.logprobs[step]
            differences = [abs(value - logprobs[i]) for i, value in answer.logprobs[step].items()]
            largest = max(largest, *map(float, differences))
            if token != expected:
                margin = logprobs[expected] - logprobs[token]
                assert margin < TIE, f"prompt {number}, step {step}: {token} for {expected}, by {margin}"
                ties += 1
                break
    assert largest < TOLERANCE
    assert ties <= TIES
    return {"answers": len(answers), "ties": ties, "largest_logprob_difference": float(f"{largest:.2g}")}


def tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def differing(one: Sequence[Answer], other: Sequence[Answer]) -> float:
    """Return the share of answers that differ."""
    return sum(a != b for a, b in zip(tokens(one), tokens(other), strict=True)) / len(one)
