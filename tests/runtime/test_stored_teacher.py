"""Tests of a distillation from a teacher's stored log-probabilities, against TRL and torch, and as runs."""

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
from recipec.runtime.data.samples import Samples
from recipec.runtime.data.stored_teacher import TRAIN, StoredTeacher, Writing
from recipec.runtime.errors import UserError
from recipec.runtime.model.sharding import shard_rows, start_mesh
from recipec.runtime.settings import MeshSettings
from recipec.runtime.training import losses
from recipec.runtime.training.objective_losses import objective_loss
from tests.runtime import training
from tests.runtime.artifacts import entries, error_of, script, train, write_artifact
from tests.runtime.lives import Lives
from tests.runtime.test_distill import LENGTH, VOCABULARY, settings
from tests.runtime.test_loss import fake, largest, make_head, random

ROWS = VOCABULARY + 1
TOP_K = 7


def events(logps: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of tokens, and of all others together."""
    chosen = logps.gather(-1, tokens)
    others = logps.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([chosen, others], -1)


@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (0.5, 2.5), (1.0, 0.7)])
def test_divergence_of_events_and_its_gradients_match_trl(
    beta: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cover packed rows, padded chunks and a vocabulary that tp splits."""
    from trl.experimental.gkd import GKDTrainer

    axes = {"fsdp": 2, "cp": 2, "tp": 2}
    student, (states, head) = random(ROWS, LENGTH), random(ROWS, LENGTH)
    states = states + 0.2 * np.random.default_rng(3).standard_normal(states.shape).astype(np.float32)
    one = training.packed_batch()
    one["loss_mask"] = np.random.default_rng(4).random(one["tokens"].shape) < 0.7
    one |= {name: value[:, :LENGTH] for name, value in one.items() if value.ndim}
    whole = torch.log_softmax(torch.tensor(states @ head.T) / temperature, -1)
    tokens = whole.topk(TOP_K).indices
    known = events(whole, tokens)
    x, weight = (torch.tensor(array, requires_grad=True) for array in student)
    own = events(torch.log_softmax(x @ weight.T / temperature, -1), tokens)
    counted = one["loss_mask"][:, 1:] & (one["segment_ids"][:, 1:] == one["segment_ids"][:, :-1])
    expected = GKDTrainer.generalized_jsd_loss(
        own[:, :-1],
        known[:, :-1],
        torch.tensor(np.where(counted, one["tokens"][:, 1:], -100)),
        beta,
        1.0,
        num_items_in_batch=float(one["norm"]),
    )
    expected.backward()
    assert x.grad is not None and weight.grad is not None
    one |= {"teacher_tokens": tokens.numpy().astype(np.int32), "teacher_logps": known.numpy()}
    distill: Any = {"beta": beta, "temperature": temperature, "stored": "teacher", "top_k": TOP_K}
    mesh = start_mesh(MeshSettings("cpu", 8, axes))
    monkeypatch.setattr(losses, "LOGITS_BYTES", 3 * 4 * (training.ROWS // axes["fsdp"]) * ROWS)
    monkeypatch.setattr(losses, "SMALL_BYTES", 0)

    def of(states: Any, head: Any, one: Any) -> Any:
        nobody: Any = None
        return objective_loss(
            settings(**distill), fake(states, make_head(head)), None, (nobody, nobody), one
        )[0]

    with mesh, jax.default_matmul_precision("highest"):
        placed = shard_rows({"states": student[0], **one}, mesh)
        function = jax.jit(jax.value_and_grad(of, (0, 1)))
        loss, gradients = function(placed.pop("states"), student[1], placed)
    assert abs(float(loss) - float(expected)) <= 1e-5 * float(expected)
    assert max(map(largest, gradients, (x.grad.numpy(), weight.grad.numpy()))) < 1e-5


def test_a_changed_file_of_stored_log_probabilities_is_refused(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    nowhere = np.zeros(2, np.int32), np.zeros(2, "S1")
    targets = np.array([False, True, False, True, False, True, True])
    samples = Samples(np.arange(7, dtype=np.int32), targets, np.array([0, 4, 7]), *nowhere)
    written = Writing(tmp_path, TRAIN, samples, 2)
    tokens = draws.integers(0, 9, (7, 2)).astype(np.int32)
    logps = draws.normal(size=(7, 3)).astype(np.float32)
    written.add((1, 0), tokens, logps)  # of a packed row: the second sample first
    teacher = StoredTeacher(tmp_path, {"top_k": 2, TRAIN: written.end()})
    arrays = teacher.part(TRAIN, samples).arrays(samples, [(1, 0)], np.zeros((1, 7), np.int32))
    places = [0, 1, 3, 5]  # the token before each target
    assert np.array_equal(arrays["teacher_tokens"][0, places], tokens[places])
    assert np.array_equal(arrays["teacher_logps"][0, places], logps[places])
    file = tmp_path / "train.logps.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match="are not those that logps"):
        teacher.part(TRAIN, samples)


def test_an_interrupted_writing_goes_on_behind_its_record(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    nowhere = np.zeros(2, np.int32), np.zeros(2, "S1")
    targets = np.array([False, True, False, True, False, True, True])
    samples = Samples(np.arange(7, dtype=np.int32), targets, np.array([0, 4, 7]), *nowhere)
    tokens = draws.integers(0, 9, (2, 4, 2)).astype(np.int32)
    logps = draws.normal(size=(2, 4, 3)).astype(np.float32)
    about = {"temperature": 1.0}
    first = Writing(tmp_path, TRAIN, samples, 2, about)
    assert first.done == 0
    first.add((0,), tokens[0], logps[0])
    first.record(1)
    assert Writing(tmp_path, TRAIN, samples, 2, about).done == 1
    second = Writing(tmp_path, TRAIN, samples, 2, about)
    second.add((1,), tokens[1], logps[1])
    teacher = StoredTeacher(tmp_path, {"top_k": 2, TRAIN: second.end()})
    found = np.asarray(teacher.part(TRAIN, samples).tokens)
    assert np.array_equal(found, [tokens[0, 0], tokens[0, 2], tokens[1, 0], tokens[1, 1]])
    assert Writing(tmp_path, TRAIN, samples, 2, about).done == 0  # that one was complete


@pytest.mark.parametrize("damage", ["about", "shape", "record"])
def test_another_or_damaged_writing_starts_anew(tmp_path: Path, damage: str) -> None:
    nowhere = np.zeros(1, np.int32), np.zeros(1, "S1")
    samples = Samples(np.arange(3, dtype=np.int32), np.array([False, True, True]), np.array([0, 3]), *nowhere)
    Writing(tmp_path, TRAIN, samples, 2, {"temperature": 1.0}).record(1)
    if damage == "shape":
        np.save(tmp_path / "train.tokens.npy", np.zeros((1, 2), np.int32))
    if damage == "record":
        (tmp_path / "train.partial.json").write_text("{", encoding="utf-8")
    temperature = 2.0 if damage == "about" else 1.0
    assert Writing(tmp_path, TRAIN, samples, 2, {"temperature": temperature}).done == 0
    assert not (tmp_path / "train.partial.json").exists()


STORED = """
import dataclasses

from runtime.sections import Distill

TEACHER = dataclasses.replace(MODEL, id="recipec/teacher")
DATA = dataclasses.replace(DATA, packing=True)
TRAIN = dataclasses.replace(
    TRAIN, objective="distill", distill=Distill(beta=0.5, temperature=2.0, stored={stored}, top_k={top_k})
)
LORA = dataclasses.replace(LORA, dropout=0.0)
"""


@pytest.mark.e2e
def test_runs_learn_the_same_from_stored_log_probabilities(place: Path, lives: Lives) -> None:
    """With all tokens but one, the events are the whole vocabulary: compare with the teacher in the step."""
    config = json.loads((place / "model" / "config.json").read_text())
    vocabulary = config["text_config"]["vocab_size"]
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    config["text_config"] |= {"num_hidden_layers": 3, "layer_types": kinds}
    write_checkpoint(place / "teacher", config, dtype="float32")
    arguments = "\n            teacher=TEACHER,"
    for name, stored, top_k in (
        ("computed", None, 3),
        ("stored", "teacher-logps", vocabulary - 1),
        ("other", "teacher-logps", 5),
    ):
        prelude = STORED.format(stored=repr(stored), top_k=top_k)
        write_artifact(place / name, prelude=prelude, arguments=arguments, steps=4)
    teacher = ("--teacher", str(place / "teacher"))
    early = train(lives, place, "early", artifact="stored")
    assert early.status == 1
    assert "has no complete log-probabilities of the teacher" in error_of(early, place, "early")[0]
    nothing = train(lives, place, "nothing", *teacher, "--write-teacher", artifact="computed")
    assert nothing.status == 1
    assert "the recipe reads no stored teacher" in error_of(nothing, place, "nothing")[0]
    written = train(lives, place, "written", *teacher, "--write-teacher", artifact="stored")
    assert written.status == 0, written.stderr
    assert written.stdout.startswith("done: ") and "likeliest tokens at" in written.stdout
    assert train(lives, place, "computed-run", *teacher, artifact="computed").status == 0
    run = train(lives, place, "stored-run", artifact="stored")
    assert run.status == 0, run.stderr
    one, two = (entries(place / name / "checkpoints") for name in ("computed-run", "stored-run"))
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=2e-5)
    refused = train(lives, place, "refused", artifact="other")
    assert refused.status == 1
    assert "was written with train.distill.top_k" in error_of(refused, place, "refused")[0]
    rows = (place / "train.jsonl").read_text().splitlines(keepends=True)
    (place / "train.jsonl").write_text("".join(rows[1:]))
    changed = train(lives, place, "changed", artifact="stored")
    assert changed.status == 1
    assert "log-probabilities of other samples than data.train" in error_of(changed, place, "changed")[0]


@pytest.mark.e2e
def test_killed_writing_goes_on_and_writes_the_same_files(place: Path, lives: Lives) -> None:
    config = json.loads((place / "model" / "config.json").read_text())
    write_checkpoint(place / "teacher", config, dtype="float32")
    lines = (place / "train.jsonl").read_text().splitlines(keepends=True)
    many = lines * (1500 // len(lines))
    arguments = "\n            teacher=TEACHER,"
    for name in ("whole", "killed"):
        folder = place / name
        (place / f"{name}.jsonl").write_text("".join(many))
        prelude = STORED.format(stored=repr(f"{name}-logps"), top_k=5)
        prelude += f'DATA = dataclasses.replace(DATA, train=("{name}.jsonl",), packing=False)\n'
        write_artifact(folder, prelude=prelude, arguments=arguments, steps=4)
    teacher = ("--teacher", str(place / "teacher"), "--write-teacher")
    killed = lives.begin(*script(place, "killed-run", *teacher, artifact="killed"))
    assert killed.until((place / "killed-logps" / "train.partial.json").exists)
    killed.send(signal.SIGKILL)
    killed.wait()
    assert not (place / "killed-logps" / "logps.json").exists()
    again = train(lives, place, "again", *teacher, artifact="killed")
    assert again.status == 0, again.stderr
    assert "going on with the teacher of train behind" in again.stderr
    whole = train(lives, place, "whole-run", *teacher, artifact="whole")
    assert whole.status == 0, whole.stderr
    for file in ("train.tokens.npy", "train.logps.npy", "eval.tokens.npy", "eval.logps.npy"):
        assert (place / "killed-logps" / file).read_bytes() == (place / "whole-logps" / file).read_bytes()
    assert not list((place / "killed-logps").glob("*.partial.json"))
