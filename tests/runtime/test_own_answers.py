"""Tests of a distillation's steps on the student's own answers: which they are, and their rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recipec.compiler.miniature.small_checkpoint import write_checkpoint
from recipec.runtime.data.batches import Batching, BatchSchedule, BatchShape
from recipec.runtime.data.epochs import Epochs
from recipec.runtime.data.samples import Samples
from recipec.runtime.model.decode import Completions
from recipec.runtime.training.objectives import Generated
from recipec.runtime.training.own_answers import OwnAnswers, answer_starts, draws_own
from tests.runtime.artifacts import train, write_artifact
from tests.runtime.lives import Lives

LENGTH, LONGEST, END = 12, 4, 99
PROMPT = LENGTH - LONGEST


def samples_of(*parts: list[tuple[int, bool]]) -> Samples:
    """Return samples whose runs of tokens are (length, whether they are targets)."""
    masks = [np.concatenate([np.full(size, target) for size, target in runs]) for runs in parts]
    offsets = np.cumsum([0, *map(len, masks)])
    tokens = np.arange(offsets[-1], dtype=np.int32) + 100
    count = len(parts)
    return Samples(tokens, np.concatenate(masks), offsets, np.zeros(count, np.int32), np.zeros(count, "S1"))


SAMPLES = samples_of(
    [(3, False), (2, True), (1, False)],
    [(2, False), (2, True), (2, False), (3, True)],
    [(PROMPT + 1, False), (2, True)],
    [(1, False), (4, True)],
    [(5, False), (1, True)],
)


class Echo:
    """Answer each prompt with its salt, as many times as its place says, and an end."""

    def __init__(self) -> None:
        self.salts: list[int] = []

    def generate(self, prompts: Mapping[str, np.ndarray], sampling: Any = None) -> Completions:
        self.salts += map(int, prompts["salts"])
        count = len(prompts["tokens"])
        lengths = np.arange(count) % LONGEST + 1
        tokens = np.zeros((count, LONGEST), np.int32)
        for row, length, salt in zip(tokens, lengths, prompts["salts"], strict=True):
            row[:length] = [*[int(salt) % 90] * (length - 1), END]
        return Completions(tokens, lengths.astype(np.int32), np.zeros(tokens.shape), lengths < LONGEST)

    def identity(self) -> None:
        return None


def run(share: float, accumulation: int, step: int = 0, count: int = 6) -> tuple[list[Any], Echo, OwnAnswers]:
    """Return the micro-batches of steps of four rows, from step `step` on."""
    rows = 4 // accumulation
    epochs = Epochs(SAMPLES, LENGTH, False, 0, [1.0])
    schedule = BatchSchedule(
        SAMPLES, epochs, Batching(BatchShape(rows, LENGTH, 0), accumulation, by_tokens=True), 0
    )
    tokenizer = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
    prepared = SimpleNamespace(schedule=schedule, accumulation=accumulation, samples=SAMPLES)
    session: Any = SimpleNamespace(prepared=prepared, tokenizer=tokenizer)
    shown: list[Any] = []
    written: Any = SimpleNamespace(completions=lambda step, rows: shown.append((step, rows)), shown=shown)
    about = Generated(PROMPT, LONGEST, share=share)
    here: Any = SimpleNamespace(here=tuple(range(rows)))
    own = OwnAnswers(session, here, echo := Echo(), about, 7, written)
    planned = (schedule.micro_batch(i) for i in range(step * accumulation, count * accumulation))
    return list(own.batches(planned, step)), echo, own


def test_answers_begin_at_the_last_run_of_targets() -> None:
    assert answer_starts(SAMPLES).tolist() == [3, 6, PROMPT + 1, 1, 5]
    assert answer_starts(samples_of([(2, False)])).tolist() == [2]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_rows_hold_prompts_with_own_answers(accumulation: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare each row with its sample: short prompts are answered anew, the long one keeps its answer."""
    batches, echo, _ = run(1.0, accumulation)
    assert "1 of 5 samples have prompts longer than 8 tokens" in capsys.readouterr().err
    kept = 0
    starts = answer_starts(SAMPLES)
    for batch in batches:
        for tokens, segments, mask in zip(
            batch["tokens"], batch["segment_ids"], batch["loss_mask"], strict=True
        ):
            real = tokens[segments > 0]
            if not len(real):  # fills up an epoch's last step
                continue
            sample = next(i for i in range(len(SAMPLES)) if SAMPLES[i].tokens[0] == real[0])
            start = starts[sample]
            assert (real[:start] == SAMPLES[sample].tokens[:start]).all()
            assert mask[segments > 0].tolist() == [place >= start for place in range(len(real))]
            if start > PROMPT:
                kept += 1
                assert (real == SAMPLES[sample].tokens).all()
            else:
                assert real[-1] == END
    assert kept and len(set(echo.salts)) == len(echo.salts)
    for first in range(0, len(batches), accumulation):
        parts = batches[first : first + accumulation]
        targets = sum(part["loss_mask"].sum() for part in parts)
        assert [float(part["norm"]) for part in parts] == [targets / accumulation] * accumulation


def test_a_run_from_a_later_step_has_the_same_batches() -> None:
    whole, _, own = run(0.5, 2)
    drawn = [step for step in range(6) if draws_own(7, step, 0.5)]
    assert 0 < len(drawn) < 6
    for step in range(6):
        rest, *_ = run(0.5, 2, step)
        for a, b in zip(whole[2 * step :], rest, strict=True):
            assert all((a[name] == b[name]).all() for name in a)
    assert own.numbers(5)["own_answers"] == float(5 in drawn)


def test_share_of_own_steps() -> None:
    for share in (0.0, 0.25, 1.0):
        assert np.mean([draws_own(3, step, share) for step in range(4000)]) == pytest.approx(share, abs=0.03)
    assert [draws_own(0, step, 0.5) for step in range(64)] != [draws_own(1, step, 0.5) for step in range(64)]


STUDENT = """
import dataclasses

from runtime.sections import Distill

TEACHER = dataclasses.replace(MODEL, id="recipec/teacher")
DATA = dataclasses.replace(DATA, eval=())
TRAIN = dataclasses.replace(
    TRAIN, objective="distill", distill=Distill(temperature=5.0, lmbda=1.0, max_completion_length=12)
)
LORA = dataclasses.replace(LORA, dropout=0.0)
"""


@pytest.mark.e2e
def test_a_step_on_own_answers_matches_trl(place: Path, lives: Lives) -> None:
    """Compute the first step's loss with transformers and GKDTrainer, on the rows of the run's trace."""
    from transformers import AutoModelForCausalLM
    from trl.experimental.gkd import GKDTrainer

    config = json.loads((place / "model" / "config.json").read_text())
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config["text_config"] |= {"num_hidden_layers": 3, "layer_types": kinds}
    write_checkpoint(place / "teacher", config, dtype="float32", embedding_scale=0.8)
    write_artifact(place / "own", prelude=STUDENT, arguments="\n            teacher=TEACHER,", steps=1)
    options = ("--teacher", str(place / "teacher"), "--trace", str(place / "own.trace"))
    run = train(lives, place, "out", *options, artifact="own")
    assert run.status == 0, run.stderr
    trace = np.load(place / "own.trace")
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(place / name, dtype=torch.float32).eval()
        for name in ("model", "teacher")
    )
    expected = 0.0
    arrays = [trace[f"rows/1/{name}"] for name in ("tokens", "segment_ids", "loss_mask", "norm")]
    for tokens, segments, mask, norm in zip(*arrays, strict=True):
        ids, real = torch.tensor(tokens).long(), torch.tensor(segments > 0).long()
        with torch.no_grad():
            logits = [model(input_ids=ids, attention_mask=real).logits for model in (student, teacher)]
        labels = torch.where(torch.tensor(mask), ids, -100)[:, 1:]
        before = [of_model[:, :-1] for of_model in logits]
        loss = GKDTrainer.generalized_jsd_loss(*before, labels, 0.5, 5.0, num_items_in_batch=float(norm))
        expected += float(loss) / len(arrays[3])
        assert (mask.sum(1) <= 12).all() and mask.any()
    assert expected > 1e-4
    assert trace["losses"] == pytest.approx([expected], rel=1e-5)
