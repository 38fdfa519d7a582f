"""Tests of the objective distill, against TRL's GKDTrainer and torch, in float32."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from recipec.compiler.miniature.small_checkpoint import write_checkpoint
from recipec.runtime.model.sharding import shard_rows, start_mesh
from recipec.runtime.sections import Distill
from recipec.runtime.settings import MeshSettings, TrainSettings
from recipec.runtime.training import losses
from recipec.runtime.training.objective_losses import objective_loss
from tests import tiny
from tests.runtime import training
from tests.runtime.artifacts import assert_equal, entries, error_of, steps, train, write_artifact
from tests.runtime.lives import Lives
from tests.runtime.references import twenty_steps
from tests.runtime.test_loss import fake, largest, make_head, random

VOCABULARY, LENGTH = 517, training.LENGTH - 2


def settings(**more: float) -> TrainSettings:
    sizes = {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1}
    return TrainSettings(objective="distill", distill=Distill(**more), **sizes)


def in_trl(train: Any, student: Any, teacher: Any, one: dict[str, Any]) -> Any:
    """Return the loss of GKDTrainer and its gradients to hidden states and head.

    Args:
        student, teacher: hidden states and head.
    """
    from trl.experimental.gkd import GKDTrainer

    x, weight = (torch.tensor(array, requires_grad=True) for array in student)
    rows = min(len(weight), len(teacher[1]))
    counted = one["loss_mask"][:, 1:] & (one["segment_ids"][:, 1:] == one["segment_ids"][:, :-1])
    loss = GKDTrainer.generalized_jsd_loss(
        (x @ weight.T)[:, :-1, :rows],
        torch.tensor(teacher[0] @ teacher[1].T)[:, :-1, :rows],
        torch.tensor(np.where(counted, one["tokens"][:, 1:], -100)),
        train.distill.beta,
        train.distill.temperature,
        num_items_in_batch=float(one["norm"]),
    )
    loss.backward()
    assert x.grad is not None
    assert weight.grad is not None
    return float(loss.detach()), x.grad.numpy(), weight.grad.numpy()


CASES = {
    "forward": ({"beta": 0.0}, 0),
    "jsd-with-more-rows": ({"beta": 0.5, "temperature": 2.5}, 13),
    "jsd-with-fewer-rows": ({"beta": 0.9, "temperature": 0.7}, -11),
    "reverse": ({"beta": 1.0}, 0),
}
"""Settings, and how many more rows the teacher's head has than the student's."""


@pytest.mark.parametrize("case", CASES)
def test_divergences_and_gradients_match_trl(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cover packed rows with ignored tokens, padded chunks, and heads of unlike sizes that tp divides."""
    axes = {"fsdp": 2, "cp": 2, "tp": 2}
    train, more = settings(**CASES[case][0]), CASES[case][1]
    vocabulary = VOCABULARY + 1
    student = random(vocabulary, LENGTH)
    wider = random(vocabulary + max(more, 0), LENGTH)
    draw = np.random.default_rng(3).standard_normal
    teacher = tuple((x + 0.2 * draw(x.shape)).astype(np.float32) for x in wider)
    teacher = teacher[0], teacher[1][: vocabulary + more]
    one = training.packed_batch()
    one["loss_mask"] = np.random.default_rng(4).random(one["tokens"].shape) < 0.7
    one |= {name: value[:, :LENGTH] for name, value in one.items() if value.ndim}
    expected = in_trl(train, student, teacher, one)
    mesh = start_mesh(MeshSettings("cpu", 8, axes))
    monkeypatch.setattr(losses, "LOGITS_BYTES", 3 * 4 * (training.ROWS // axes["fsdp"]) * vocabulary)
    monkeypatch.setattr(losses, "SMALL_BYTES", 0)

    def of(states: Any, head: Any, one: Any, other: Any) -> Any:
        def reference(ask: Any) -> Any:
            return ask(fake(other, make_head(teacher[1])), None)

        return objective_loss(train, fake(states, make_head(head)), None, (reference, reference), one)[0]

    with mesh, jax.default_matmul_precision("highest"):
        placed = shard_rows({"states": student[0], "other": teacher[0], **one}, mesh)
        states, other = placed.pop("states"), placed.pop("other")
        function = jax.jit(jax.value_and_grad(of, (0, 1)))
        loss, gradients = function(states, student[1], placed, other)
    assert abs(float(loss) - expected[0]) <= 2e-6 * expected[0]
    assert max(map(largest, gradients, expected[1:])) < 5e-6


@pytest.mark.parametrize(
    "beta", [0.5, *(pytest.param(beta, marks=pytest.mark.nightly) for beta in (0.0, 1.0))]
)
def test_twenty_steps_match_trl(beta: float, tmp_path: Path) -> None:
    """Distill a model of another family, with more layers and rows, on fsdp 4 x tp 2."""
    student = tiny.make_llama(tmp_path / "student", num_hidden_layers=1)
    more = {"num_hidden_layers": 2, "hidden_size": 96, "vocab_size": tiny.VOCAB + 3, "seed": 5}
    teacher = tiny.make_qwen3(tmp_path / "teacher", **more)
    with jax.default_matmul_precision("highest"):
        found = twenty_steps(
            *(tmp_path / "student", student, {"fsdp": 4, "tp": 2}, tmp_path / "run"),
            **{"objective": "distill", "distill": Distill(beta, 1.5), "clip": 0.005},
            teacher=(tmp_path / "teacher", teacher),
        )
    assert found.losses < 1e-5 * max(found.of_loss, 1), found
    assert found.parameters < 1e-5, found
    assert found.gradients < 1e-4, found
    assert found.moved > 1e-3, found


DISTILLED = """
import dataclasses

from runtime.sections import Distill, Rollout

TEACHER = dataclasses.replace(MODEL, id="recipec/teacher")
TRAIN = dataclasses.replace(TRAIN, objective="distill", distill=Distill(beta=0.5, temperature=2.0, {}))
"""
KILLED = """
import os
import signal

from runtime.training import trainer

step = trainer.Trainer._step


def killed(self, *arguments):
    if self._train_steps == 5 and "--resume" not in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *arguments)


trainer.Trainer._step = killed
"""
"""Code of an artifact that is killed in its sixth step."""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("own", "more"),
    [
        ("", ""),
        ("lmbda=0.6, max_completion_length=12", ""),
        ("lmbda=1.0, max_completion_length=12", "LORA = None\n"),
    ],
)
def test_killed_distillation_ends_like_an_uninterrupted_one(
    own: str, more: str, place: Path, lives: Lives
) -> None:
    """Resume with another teacher, which is refused, and then with the run's own, which has more layers."""
    config = json.loads((place / "model" / "config.json").read_text())
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config["text_config"] |= {"num_hidden_layers": 3, "layer_types": kinds}
    write_checkpoint(place / "teacher", config, dtype="float32")
    arguments = "\n            teacher=TEACHER,"
    if more:  # all weights, which are laid out anew for each rollout
        arguments += "\n            rollout=Rollout(axes={'fsdp': 1, 'tp': 2}),"
    prelude = DISTILLED.format(own) + more
    write_artifact(place / "whole", prelude=prelude, arguments=arguments)
    write_artifact(place / "killed", prelude=prelude + KILLED, arguments=arguments)
    teacher = ("--teacher", str(place / "teacher"))
    undisturbed = train(lives, place, "undisturbed", *teacher, artifact="whole")
    assert undisturbed.status == 0, undisturbed.stderr
    assert train(lives, place, "out", *teacher, artifact="killed").status == -signal.SIGKILL
    last = steps(place / "out" / "checkpoints")[-1]
    other = train(lives, place, "out", "--teacher", str(place / "model"), "--resume", artifact="killed")
    assert other.status == 1
    assert "is not the teacher that the run began with" in error_of(other, place, "out")[0]
    end = train(lives, place, "out", *teacher, "--resume", artifact="killed")
    assert end.status == 0 and f"continuing after step {last} of 10" in end.stderr, end.stderr
    assert_equal(place, "undisturbed", "out", 10)
    one, two = (place / name / "checkpoints" for name in ("undisturbed", "out"))
    assert entries(one) == entries(two)
    if own:
        assert (one / "completions.jsonl").read_text() == (two / "completions.jsonl").read_text()
        shares = [json.loads(line).get("own_answers", 0.0) for line in (one / "metrics.jsonl").open()]
        assert any(shares)
