"""A test that Gemma 3 270M learns a form from rewards of its own completions, and that the server's answers
of the merged weights hold it.

The figures are written to build/e2e/grpo.json.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.gemma3_answers import load
from tests.e2e import vllm_cpu
from tests.e2e.gemma3 import run

pytestmark = pytest.mark.nightly

RECIPE = """\
recipe: 1
name: sums
model: {id: google/gemma-3-270m, dtype: float32}
mesh: {accelerator: cpu-1, axes: {fsdp: 1, tp: 1}}
lora: {rank: 16}
remat: {policy: none}
data: {train: [prompts.jsonl], format: prompt}
train:
  objective: grpo
  grpo: {num_generations: 8, max_prompt_length: 12, max_completion_length: 8, stop: ["\\n"]}
  steps: 8
  global_batch_size: 64
  micro_batch_size: 32
  optimizer: {learning_rate: 1.0e-4}
  schedule: {name: constant}
  log: {every: 1}
rewards:
- {function: rewards.py:form}
checkpoint: {every_steps: 8}
"""
REWARDS = '''\
"""The reward of an answer's form."""

import re


def form(completions, **columns):
    """Return 1 for a completion that is one number and the end of the line."""
    return [float(re.fullmatch(r" ?\\d+\\n", text) is not None) for text in completions]
'''
FORM = re.compile(r" ?\d+\n")
NEW_TOKENS = 8
TRAINED, HELD_OUT = 64, 32


def test_a_model_learns_a_form_and_the_server_holds_it(root: Path, checkpoint: Path, tmp_path: Path) -> None:
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    prompts = [f"{a} + {b} =" for a, b in random.Random(0).sample(sums, TRAINED + HELD_OUT)]
    rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts[:TRAINED])
    for name, text in {"sums.yaml": RECIPE, "rewards.py": REWARDS, "prompts.jsonl": rows}.items():
        (tmp_path / name).write_text(text, "utf-8")
    run(
        root, "-m", "recipec.compiler.cli.main", "build", tmp_path / "sums.yaml", "-o", tmp_path / "generated"
    )
    artifact, output = tmp_path / "generated" / "sums", tmp_path / "run"
    places = ("--model", checkpoint, "--output", output)
    trained = run(root, artifact / "train.py", *places, "--data-dir", tmp_path)
    assert trained.startswith("done: steps=8 ")
    run(root, artifact / "merge.py", *places, "--checkpoint", output / "checkpoints", "--verify")
    metrics = [json.loads(line) for line in (output / "checkpoints" / "metrics.jsonl").open()]
    held_out = prompts[TRAINED:]
    before = {
        "greedy": completed(checkpoint, held_out, False),
        "sampled": completed(checkpoint, held_out, True),
    }
    with vllm_cpu.serve(output / "merged", "grpo-merged") as server:
        after = {
            "greedy": served(server, held_out, {"temperature": 0}),
            "sampled": served(server, held_out, {"temperature": 1, "seed": 0}),
        }
    figures = {
        "rewards": [round(row["reward"], 3) for row in metrics if "reward" in row],
        "before": {name: share(texts) for name, texts in before.items()},
        "after": {name: share(texts) for name, texts in after.items()},
        "answers": [before["sampled"][:8], after["sampled"][:8]],
    }
    report = root / "build" / "e2e" / "grpo.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    print(json.dumps(figures, indent=2))
    assert figures["before"]["sampled"] <= 0.4
    assert figures["after"]["sampled"] >= 0.8
    assert figures["after"]["greedy"] >= 0.8


def completed(folder: Path, prompts: Sequence[str], sampled: bool) -> list[str]:
    """Complete prompts with transformers' model of a folder."""
    import torch

    model, tokenizer = load(folder)
    torch.manual_seed(0)
    inputs = tokenizer(list(prompts), padding=True, padding_side="left", return_tensors="pt")
    options: dict[str, Any] = {"do_sample": sampled, "top_k": 0} if sampled else {"do_sample": False}
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=NEW_TOKENS, **options)
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [first_line(text) for text in texts]


def served(server: vllm_cpu.Server, prompts: Sequence[str], options: dict[str, Any]) -> list[str]:
    """Complete prompts with the server's model."""
    body = {"model": "base", "prompt": list(prompts), "max_tokens": NEW_TOKENS, **options}
    choices = server.post("/v1/completions", body)["choices"]
    return [first_line(choice["text"]) for choice in choices]


def first_line(text: str) -> str:
    """Return a completion up to the end of its first line, where a completion of the training ends."""
    return text.partition("\n")[0] + "\n" * ("\n" in text)


def share(texts: Sequence[str]) -> float:
    """Return the share of completions in the form."""
    return sum(FORM.fullmatch(text) is not None for text in texts) / len(texts)
