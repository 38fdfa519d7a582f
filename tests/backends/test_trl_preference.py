"""Tests of DPO, CPO and ORPO in train_trl.py: losses against TRL's trainers and train.py's, and whole runs.

tests/parity compares such a run with train.py number by number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from recipec.compiler.lowering.backend import Backend
from recipec.compiler.miniature.small_checkpoint import complete, write_checkpoint
from recipec.runtime.backends.trl.pieces import Pieces
from recipec.runtime.backends.trl.trl_objectives import objective_of
from recipec.runtime.errors import UserError
from recipec.runtime.model.adapters import LoraSettings
from recipec.runtime.settings import DataSettings, ModelSettings, TrainSettings
from recipec.runtime.training.objective_losses import PAIR_METRICS, preference_loss
from recipec.runtime.training.trace import Trace, count_targets
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests.parity.running import Case, Place
from tests.runtime.decoders import fields
from tests.runtime.preferred import BETA, PAIRS, SMOOTHING, collated, trainer_of

STEPS = 4
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"objective": "dpo", "label_smoothing": SMOOTHING},
    "dpo-ipo": {"objective": "dpo", "loss_type": "ipo"},
    "cpo": {"objective": "cpo", "loss_type": "simpo", "simpo_gamma": 0.4, "cpo_alpha": 0.7},
    "orpo": {"objective": "orpo"},
}
"""A recipe's settings of its objective, by these tests' names."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    case = Case(
        "meta-llama/Llama-3.1-8B-Instruct",
        ["full_attention"] * 2,
        {
            "remat": {"policy": "decoder"},
            "mesh": {"accelerator": "cpu-1", "axes": {"fsdp": 1, "tp": 1}},
            "lora": {"rank": 4, "alpha": 8, "dropout": 0.25, "targets": ["q_proj", "v_proj", "down_proj"]},
            "data": {
                "train": ["train.jsonl"],
                "eval_fraction": 0.1,
                "format": "preference",
                "loss_on": "completion",
                "packing": False,
                "max_length": 64,
            },
            "train": {
                "objective": "dpo",
                "beta": BETA,
                "label_smoothing": SMOOTHING,
                "steps": STEPS,
                "global_batch_size": 4,
                "micro_batch_size": 2,
                "eval_every": 2,
                "optimizer": {"learning_rate": 0.01, "max_grad_norm": 1.0},
                "log": {"every": 2, "tensorboard": False},
            },
            "checkpoint": {"directory": "checkpoints", "every_steps": 2, "keep": 2},
        },
    )
    return Place(tmp_path_factory.mktemp("preferences"), case, (Backend.TUNIX, Backend.TRL))


def settings(objective: str, **more: Any) -> TrainSettings:
    how = {"beta": BETA, **OBJECTIVES[objective], **more}
    return TrainSettings(epochs=2, global_batch_size=8, micro_batch_size=2, **how)


def prepared(place: Place, train: TrainSettings) -> Any:
    data = DataSettings(
        train=("train.jsonl",),
        eval_fraction=0.1,
        format="preference",
        loss_on="completion",
        max_length=64,
        packing=False,
    )
    return place.prepared(data, train)


class Table:
    """A fake model: a token's log probability is a number that depends on the token and its position."""

    def __init__(self, seed: int) -> None:
        self.policy, self.reference = (
            -np.random.default_rng([seed, which]).uniform(0.1, 3.0, (4096, 64)).astype(np.float32)
            for which in range(2)
        )
        self._used = self.policy

    def __call__(self, *, input_ids: Any, position_ids: Any, labels: Any, **_: Any) -> Any:
        found = torch.from_numpy(self._used)[labels[:, 1:].clamp(0), position_ids[:, 1:]]
        return SimpleNamespace(log_probs=torch.where(labels[:, 1:] != -100, found, 0.0))

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        self._used = self.reference
        yield
        self._used = self.policy


def logps(values: np.ndarray) -> Any:
    """Return a table's `runtime.training.losses.token_logps`."""

    def of(tokens: Any, positions: Any, segment_ids: Any) -> Any:
        inside = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
        found = jnp.where(inside, jnp.asarray(values)[tokens[:, 1:], positions[:, 1:]], 0.0)
        return jnp.pad(found, ((0, 0), (0, 1)))

    return of


def as_train_has_it(
    table: Table, batch: dict[str, Any], train: TrainSettings
) -> tuple[float, dict[str, Any]]:
    """Return a micro-batch's loss and metrics by runtime.training.objective_losses."""
    inputs = {name: jnp.asarray(array) for name, array in batch.items()}
    loss, metrics = preference_loss(logps(table.policy), logps(table.reference), inputs, train)
    return float(loss), {name: float(number) for name, number in metrics.items()}


def by_pieces(table: Table, pieces: list[Any], train: TrainSettings) -> tuple[float, dict[str, float]]:
    """Return the sum of the pieces' losses, and of each metric."""
    objective = objective_of(train)
    total = 0.0
    sums: dict[str, float] = {}
    for piece in pieces:
        tensors = {name: torch.from_numpy(array) for name, array in piece.items()}
        loss, metrics = objective(table, table, tensors)
        total += float(loss)
        sums = {name: sums.get(name, 0.0) + float(number) for name, number in metrics.items()}
    return total, sums


@pytest.mark.parametrize("normalization", ["tokens", "micro_batches"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_preference_step_matches_train_py_for_any_process_count(
    place: Place, objective: str, normalization: str
) -> None:
    """Compare losses to 1e-5: a full step, an epoch's last step, which is filled up, and evaluation."""
    train = settings(objective, loss_normalization=normalization)
    data = prepared(place, train)
    assert data.accumulation == 2 and data.total_steps > data.steps_per_epoch
    table = Table(7)

    def check(batches: list[Any], pieces: list[Any]) -> None:
        parts = [as_train_has_it(table, batch, train) for batch in batches]
        expected = {name: np.mean([part[1][name] for part in parts]) for name in parts[0][1]}
        loss, found = by_pieces(table, pieces, train)
        assert loss == pytest.approx(np.mean([part[0] for part in parts]), rel=1e-5)
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert sum(int(piece["targets"]) for piece in pieces) == sum(map(count_targets, batches))

    filled = []
    for processes, rows in ((1, 2), (2, 2), (8, 1)):
        cut = replace(train, micro_batch_size=rows)
        made = [Pieces(data, cut, process, processes) for process in range(processes)]
        for step in (0, data.steps_per_epoch - 1):
            batches = [data.micro_batch(step * 2 + part) for part in range(2)]
            filled.append(sum(not batch["segment_ids"][row].any() for batch in batches for row in range(8)))
            numbers = range(step * made[0].per_step, (step + 1) * made[0].per_step)
            check(batches, [one.of(number) for number in numbers for one in made])
        check(data.eval_batches, [piece for one in made for piece in one.evaluation()])
    assert max(filled) >= 10 and min(filled) == 0, "a last step has five pairs of eight too few"


def adapted(place: Place) -> Any:
    """Return transformers' model with PEFT's adapters, and a function that sets nonzero values."""
    from recipec.runtime.backends.peft_model import adapter_parameters, attach, load_model

    base = HFCheckpoint.open(place.folder / "model")
    model = ModelSettings(id="tiny", family="llama", dtype="float32")
    lora = LoraSettings(rank=4, alpha=8, targets=("q_proj", "v_proj", "down_proj"), dropout=0.0)
    adapted = attach(load_model(base, model), base, model, lora)

    def move() -> dict[str, Any]:
        parameters = adapter_parameters(adapted, base)
        random = np.random.default_rng(3)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.copy_(torch.from_numpy(random.normal(0.0, 0.1, parameter.shape)))
        return parameters

    return adapted, move


def test_dropout_on_shared_expert_projections_is_refused(tmp_path: Path) -> None:
    """Refuse dropout on a shared expert's projections.

    PEFT takes them as weights, because by their names it means the experts.
    """
    from recipec.runtime.backends.peft_model import attach

    write_checkpoint(tmp_path / "model", complete({**fields("qwen3_next"), "vocab_size": 512}))
    base = HFCheckpoint.open(tmp_path / "model")
    lora = LoraSettings(rank=4, alpha=8, targets=("q_proj", "up_proj"), dropout=0.1)
    with pytest.raises(UserError, match=r"no dropout on .*up_proj\.weight") as refusal:
        attach(None, base, ModelSettings(id="tiny", family="qwen3_next", dtype="float32"), lora)
    assert refusal.value.help and "lora.dropout: 0" in refusal.value.help


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_preference_losses_and_gradients_match_trl(objective: str, place: Place, tmp_path: Path) -> None:
    """Compare to 1e-6 of the largest number, on TRL's own batch of the same texts."""
    from trl.trainer.utils import add_fused_lm_head

    model, move = adapted(place)
    tokenizer = AutoTokenizer.from_pretrained(place.folder / "model")
    train = settings(objective, label_smoothing=0.0)
    given = OBJECTIVES[objective]
    how = {key: given[key] for key in given.keys() - {"objective", "label_smoothing"}}
    trainer = trainer_of(train.objective, model, tokenizer, tmp_path, **how)
    if train.objective != "dpo":
        add_fused_lm_head(model.get_base_model())  # as RecipeTrainer and DPOTrainer do
    inputs, batch = collated(trainer)
    parameters = move()
    trainer.model.train()
    expected = trainer.compute_loss(trainer.model, inputs)
    gradients = torch.autograd.grad(expected, list(parameters.values()))
    data: Any = SimpleNamespace(
        samples=SimpleNamespace(group=2),
        rows=2 * len(PAIRS),
        accumulation=1,
        micro_batch=lambda number, rows: batch,
    )
    whole = replace(train, micro_batch_size=len(PAIRS), global_batch_size=len(PAIRS))
    piece = Pieces(data, whole, 0, 1).of(0)
    tensors = {name: torch.from_numpy(array) for name, array in piece.items()}
    loss, metrics = objective_of(train)(model, model, tensors)
    found = torch.autograd.grad(loss, list(parameters.values()))
    difference = max(float((a - b).abs().max()) for a, b in zip(found, gradients, strict=True))
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    print(
        f"\n{objective}: loss differs by {abs(float(loss - expected)):.1e} of {float(expected):.2f}, "
        f"gradients by {difference:.1e} of {largest:.2f}"
    )
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert largest > 1e-2 and difference <= 1e-6 * max(1.0, largest)
    logged = (trainer._metrics if train.objective == "dpo" else trainer._stored_metrics)["train"]
    names = {"chosen": "chosen", "rejected": "rejected", "margin": "margins", "accuracy": "accuracies"}
    for name, theirs in names.items():
        assert float(metrics[f"rewards_{name}"]) == pytest.approx(logged[f"rewards/{theirs}"][0], abs=1e-5)


@pytest.fixture(scope="module")
def whole(place: Place) -> Trace:
    return place.train(Backend.TRL, "whole")


@pytest.mark.e2e
def test_resumed_run_equals_uninterrupted_run(place: Place, whole: Trace) -> None:
    """Compare bit for bit, with dropout, which the reference does not use."""
    first = place.train(Backend.TRL, "cut", "--steps", "2")
    rest = place.train(Backend.TRL, "cut", "--resume")
    assert rest.about["first_step"] == 3
    assert first.losses + rest.losses == whole.losses
    for name, array in whole.trained.items():
        assert np.array_equal(array, rest.trained[name]), name


@pytest.mark.e2e
def test_dpo_metrics_have_trace_losses_evaluations_and_rewards(place: Place, whole: Trace) -> None:
    entries = place.logged("whole")
    steps = [entry for entry in entries if "loss" in entry]
    assert [entry["loss"] for entry in steps] == whole.losses
    assert [entry["step"] for entry in entries if "eval_loss" in entry] == [0, 2, 4]
    assert entries[0]["eval_loss"] == pytest.approx(np.log(2), abs=1e-6), "the reference is where it starts"
    assert all(set(PAIR_METRICS) <= entry.keys() for entry in steps)
    last = steps[-1]
    assert last["rewards_margin"] == pytest.approx(
        last["rewards_chosen"] - last["rewards_rejected"], abs=1e-5
    )
    assert last["rewards_margin"] > 0.1


@pytest.mark.e2e
def test_given_adapter_is_trained_and_not_used_as_reference(place: Place, whole: Trace) -> None:
    """Start from the adapter as train.py does: the first evaluation equals the adapter's last one."""
    place.train(Backend.TRL, "onward", "--adapter", place.folder / "whole" / "adapter", "--steps", "1")
    before, after = place.logged("whole")[-1], place.logged("onward")[0]
    assert after["eval_loss"] == pytest.approx(before["eval_loss"], abs=1e-6)
    assert after["eval_loss"] < np.log(2) - 0.05
