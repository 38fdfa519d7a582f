"""Tests of the real Gemma 3 270M with several training methods at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.gemma3_answers import in_format
from tests.e2e.gemma3 import run, tune

pytestmark = pytest.mark.nightly

SETS = (
    "lora.kind=dora",
    "lora.dropout=0",
    "lora.plus_ratio=4",
    "lora.train_also=[model.norm]",
    'model.add_tokens={"<note>": "<unused7>"}',
    "train.steps=30",
    "train.eval_every=5",
    "train.samples={prompts: data/gemma3-270m/prompts.jsonl, max_tokens: 12}",
    "train.early_stopping={patience: 1, min_delta: 0.2}",
    "checkpoint.every_steps=5",
    "checkpoint.keep_best=true",
)


def test_dora_new_token_early_stopping_and_samples_work_together(
    root: Path, checkpoint: Path, tmp_path: Path, questions: list[str]
) -> None:
    """Combine DoRA, a fully trained norm, a new token, early stopping and samples; then merge and chat."""
    from transformers import AutoTokenizer

    made = tune(root, checkpoint, tmp_path, *SETS)
    rows = [json.loads(line) for line in (made.run / "checkpoints/metrics.jsonl").open()]
    losses = [row["eval_loss"] for row in rows if "eval_loss" in row]
    last = max(row["step"] for row in rows)
    assert last < 30 and losses[-2] - losses[-1] <= 0.2 < losses[0] - losses[1]
    samples = [json.loads(line) for line in (made.run / "checkpoints/samples.jsonl").open()]
    assert {row["step"] for row in samples} == {0, *range(5, last + 1, 5)}
    assert in_format([samples[-1]["answer"]]) == 1, samples
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (checkpoint, made.run / "merged"))
    note = after.convert_tokens_to_ids("<note>")
    assert note == before.convert_tokens_to_ids("<unused7>")
    assert after("a <note>", add_special_tokens=False).input_ids[-1] == note
    for folder in (made.run / "merged", made.run / "merged-adapter"):
        command = ["chat", folder, "--prompt", questions[0], "--max-tokens", "24", "--temperature", "0"]
        command += ["--base", checkpoint] if folder.name == "merged-adapter" else []
        template = root / "recipes" / "data" / "gemma3-270m" / "chat_template.jinja"
        answer = run(root, "-m", "recipec.compiler.cli.main", *command, "--chat-template", template)
        assert in_format([answer]) == 1, answer
