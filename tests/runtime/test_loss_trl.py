"""Tests of loss normalizations and of dft against TRL's trainer, over one accumulation window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.runtime import training
from tests.runtime.chats import tokenizer

ACCUMULATION = 2
NAMES = ("tokens", "positions", "segment_ids", "loss_mask")


def trl_loss(model: Any, folder: Path, batches: list[dict[str, np.ndarray]], loss_type: str) -> float:
    """Return SFTTrainer's loss of one optimizer step: the sum over its micro-batches."""
    import datasets
    import torch
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
    import jax
    from flax import nnx

    from recipec.runtime.model.sharding import shard_rows
    from recipec.runtime.settings import TrainSettings
    from recipec.runtime.training.step import micro_batch_loss

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
