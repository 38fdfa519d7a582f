"""Tests of losses that weight tokens, against torch, in float32."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as f
from flax import nnx

from recipec.runtime.model.sharding import shard_rows, start_mesh
from recipec.runtime.settings import MeshSettings, TrainSettings
from recipec.runtime.training import losses
from recipec.runtime.training.objective_losses import micro_batch_loss, objective_loss
from recipec.runtime.training.objectives import keeps_copy
from recipec.runtime.training.step import trained_type
from tests import tiny
from tests.runtime import training
from tests.runtime.chats import tokenizer
from tests.runtime.test_loss import fake, largest, make_head, random

VOCABULARY, LENGTH = 517, training.LENGTH - 2
CASES: dict[str, dict[str, Any]] = {
    "dft": {"loss_type": "dft"},
    "eaft-of-axolotl": {"loss_type": "eaft", "eaft_alpha": 1.7, "eaft_top_k": 7, "eaft_entropy": 1.0},
    "eaft-of-all": {"loss_type": "eaft", "eaft_alpha": 0.5, "eaft_top_k": 1000},
    "asft": {"loss_type": "asft", "asft_alpha": 0.3},
}


def settings(**more: Any) -> Any:
    return TrainSettings(steps=1, global_batch_size=1, micro_batch_size=1, **more)


def in_torch(train: Any, states: np.ndarray, head: np.ndarray, before: Any, one: dict[str, Any]) -> Any:
    """Return the loss of a micro-batch and its gradients to hidden states and head."""
    x, weight = (torch.tensor(array, requires_grad=True) for array in (states, head))
    logits = (x @ weight.T)[:, :-1].flatten(0, 1)
    counted = one["loss_mask"][:, 1:] & (one["segment_ids"][:, 1:] == one["segment_ids"][:, :-1])
    targets = torch.tensor(np.where(counted, one["tokens"][:, 1:], -100)).long().flatten()
    nll = f.cross_entropy(logits, targets, reduction="none")
    if train.loss_type == "eaft":
        kept = logits.detach().sort(descending=True).values[:, : train.eaft_top_k].double()
        entropy = torch.distributions.Categorical(logits=kept).entropy().float()
        total = (nll * (entropy / train.eaft_entropy) ** train.eaft_alpha).sum()
    else:
        total = (nll * (-nll.detach()).exp()).sum()
    if train.loss_type == "asft":
        reference = torch.tensor(before[0] @ before[1].T)[:, :-1].flatten(0, 1).softmax(-1)
        kl = f.kl_div(logits.log_softmax(-1), reference, reduction="none").sum(-1)
        total = total + train.asft_alpha * kl[targets != -100].sum()
    total = total / float(one["norm"])
    total.backward()
    assert x.grad is not None
    assert weight.grad is not None
    return float(total.detach()), x.grad.numpy(), weight.grad.numpy()


def differentiated(train: Any, before: Any) -> Any:
    """Return ours as a jitted function of hidden states, the head and a micro-batch."""

    def reference(ask: Any) -> Any:
        return ask(fake(before[0], make_head(before[1])), None)

    def of(states: Any, head: Any, one: Any) -> Any:
        return objective_loss(train, fake(states, make_head(head)), None, (reference, reference), one)[0]

    return jax.jit(jax.value_and_grad(of, (0, 1)))


@pytest.mark.parametrize("case", CASES)
def test_token_losses_and_gradients_match_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cover packed rows with ignored tokens, padded chunks, and a vocabulary that tp divides."""
    axes = {"fsdp": 8, "tp": 1} if case == "eaft-of-all" else {"fsdp": 2, "cp": 2, "tp": 2}
    train, vocabulary = settings(**CASES[case]), VOCABULARY + axes["tp"] - 1
    states, head = random(vocabulary, LENGTH)
    draw = np.random.default_rng(3).standard_normal
    before = tuple((x + 0.2 * draw(x.shape)).astype(np.float32) for x in (states, head))
    one = training.packed_batch()
    one["loss_mask"] = np.random.default_rng(4).random(one["tokens"].shape) < 0.7
    one |= {name: value[:, :LENGTH] for name, value in one.items() if value.ndim}
    expected = in_torch(train, states, head, before, one)
    mesh = start_mesh(MeshSettings("cpu", 8, axes))
    monkeypatch.setattr(losses, "LOGITS_BYTES", 3 * 4 * (training.ROWS // axes["fsdp"]) * vocabulary)
    monkeypatch.setattr(losses, "SMALL_BYTES", 0)
    with mesh, jax.default_matmul_precision("highest"):
        placed = shard_rows({"states": states, "before": before[0], **one}, mesh)
        found, gradients = differentiated(train, (placed.pop("before"), before[1]))(
            placed.pop("states"), head, placed
        )
    assert abs(float(found) - expected[0]) <= 2e-6 * expected[0]
    assert max(map(largest, gradients, expected[1:])) < 5e-6


def test_eaft_does_not_gather_logits_split_by_tp() -> None:
    """Gather the few likeliest tokens for an entropy, not the vocabulary."""
    states, head = random(VOCABULARY + 3, LENGTH)
    mesh = start_mesh(MeshSettings("cpu", 8, {"fsdp": 2, "tp": 4}))
    one = training.packed_batch()
    one |= {name: value[:, :LENGTH] for name, value in one.items() if value.ndim}
    with mesh:
        placed = shard_rows({"states": states, **one}, mesh)
        function = differentiated(settings(loss_type="eaft"), None)
        text = function.lower(placed.pop("states"), head, placed).compile().as_text()
    rows = training.ROWS // 2
    gathered = re.findall(r"= \(?(?:f32|s32)\[([\d,]+)\][^=]* all-gather", text)
    sizes = [int(np.prod([*map(int, shape.split(","))])) for shape in gathered]
    assert sizes
    assert max(sizes) < rows * LENGTH * VOCABULARY // 4


@pytest.mark.e2e
def test_asft_compares_with_the_model_before_training(tmp_path: Path) -> None:
    """Without LoRA, its reference is a copy of the weights that training starts from."""
    tiny.make_llama(tmp_path, num_hidden_layers=1)
    alpha, one = 0.3, training.packed_batch()
    with jax.default_matmul_precision("highest"):
        mesh, built = training.build(tmp_path, {"fsdp": 4, "tp": 2}, remat="none", full=True)
        start = training.logits(built, mesh, one)
        trained, asft = trained_type(built), settings(loss_type="asft", asft_alpha=alpha)
        graph, state, rest = nnx.split(built.model, trained, ...)
        before = nnx.merge(graph, jax.tree.map(jnp.copy, state), rest)
        nnx.update(built.model, jax.tree.map(lambda x: x * 1.1, state))
        assert keeps_copy(asft, built.lora)
        end = training.logits(built, mesh, one)
        with mesh:
            values = [
                float(micro_batch_loss(built, train, built.model, shard_rows(one, mesh), before)[0])
                for train in (asft, settings(loss_type="dft"))
            ]
    logps = [np.asarray(jax.nn.log_softmax(x)) for x in (start, end)]
    kl = (np.exp(logps[0]) * (logps[0] - logps[1])).sum(-1)[:, :-1]
    counted = one["segment_ids"][:, 1:] == one["segment_ids"][:, :-1]
    expected = alpha * kl[counted].sum() / float(one["norm"])
    assert expected > 1e-3
    assert abs(values[0] - values[1] - expected) <= 2e-5 * expected


def test_train_trl_dft_uses_only_target_log_probabilities() -> None:
    """Compute it from the log-probabilities that TRL's fused head returns, 0 where there is no target."""

    from recipec.runtime.backends.trl.trl_objectives import objective_of

    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(3, 11, 37, generator=generator)).requires_grad_()
    labels = torch.randint(0, 37, (3, 11), generator=generator)
    labels[torch.rand(3, 11, generator=generator) < 0.4] = -100
    kept = labels[:, 1:] != -100
    chosen = logits.log_softmax(-1)[:, :-1].gather(2, labels[:, 1:, None].clamp(min=0))[..., 0]
    given = SimpleNamespace(log_probs=torch.where(kept, chosen, 0.0))
    piece = {"input_ids": None, "position_ids": None, "labels": labels, "weights": torch.full((3,), 1 / 20)}
    found = objective_of(settings(loss_type="dft"))(lambda **_: given, None, piece)[0]
    nll = f.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    expected = (nll * (-nll.detach()).exp()).sum() / 20
    assert abs(float(found.detach()) - float(expected.detach())) <= 1e-6 * float(expected.detach())
    pair = [torch.autograd.grad(value, logits, retain_graph=True)[0].numpy() for value in (found, expected)]
    assert largest(*pair) < 1e-6


ACCUMULATION = 2
NAMES = ("tokens", "positions", "segment_ids", "loss_mask")


def trl_loss(model: Any, folder: Path, batches: list[dict[str, np.ndarray]], loss_type: str) -> float:
    """Return SFTTrainer's loss of one optimizer step: the sum over its micro-batches."""
    import datasets
    from trl import SFTConfig, SFTTrainer

    rows = datasets.Dataset.from_dict({"input_ids": [[3, 4, 5]]})
    options: dict[str, Any] = {"gradient_accumulation_steps": ACCUMULATION, "loss_type": loss_type}
    options |= {"use_cpu": True, "bf16": False, "report_to": "none", "gradient_checkpointing": False}
    config = SFTConfig(str(folder), **options)
    trainer = SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer())
    trainer.current_gradient_accumulation_steps = ACCUMULATION
    trainer.create_optimizer()
    inputs = [
        {
            "input_ids": torch.tensor(one["tokens"]).long(),
            "attention_mask": torch.tensor(one["segment_ids"]).long(),
            "labels": torch.tensor(np.where(one["loss_mask"], one["tokens"], -100)).long(),
        }
        for one in batches
    ]
    count = trainer._get_num_items_in_batch(inputs, torch.device("cpu"))
    return sum(float(trainer.training_step(trainer.model, one, count)) for one in inputs)


@pytest.mark.parametrize(
    ("normalization", "loss_type"), [("tokens", "nll"), ("micro_batches", "nll"), ("tokens", "dft")]
)
def test_loss_normalization_and_dft_match_trl(normalization: str, loss_type: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {} if loss_type == "nll" else {"loss_type": loss_type}
    settings = TrainSettings(steps=1, global_batch_size=1, micro_batch_size=1, **given)

    model = tiny.make_llama(tmp_path / "model", num_hidden_layers=1)
    batches = [training.batch(index, ACCUMULATION) for index in range(ACCUMULATION)]
    # The first micro-batch has far fewer targets, so that the two means differ.
    batches[0]["loss_mask"][2:] = False
    targets = [int(one["loss_mask"].sum()) for one in batches]
    assert 3 * targets[0] < targets[1]
    if normalization == "micro_batches":
        model.accepts_loss_kwargs = False
    expected = trl_loss(model, tmp_path / "trl", batches, loss_type)

    norms = targets if normalization == "micro_batches" else [sum(targets) / ACCUMULATION] * ACCUMULATION
    mesh, built = training.build(tmp_path / "model", {"fsdp": 8, "tp": 1}, remat="none")
    graph, state = nnx.split(built.model)

    @jax.jit
    def loss_of(state: Any, one: Any, norm: Any) -> Any:
        return micro_batch_loss(built, settings, nnx.merge(graph, state), {**one, "norm": norm})[0]

    with mesh:
        parts = [
            float(loss_of(state, shard_rows(one, mesh), np.float32(norm)))
            for one, norm in zip(batches, norms, strict=True)
        ]
    assert abs(np.mean(parts) - expected) <= 2e-6 * expected
