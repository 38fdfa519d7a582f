"""Pairs of answers, in the form of TRL's preference trainer and in the form of our rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optax

from recipec.runtime.data.batches import TrainingData
from recipec.runtime.interrupts import Interrupts
from recipec.runtime.metrics.loggers import Metrics
from tests.runtime import training

BETA, SMOOTHING = 0.3, 0.1
PAIRS = [
    {"prompt": "What does the baker do?", "chosen": " She bakes.", "rejected": " No one knows it at all."},
    {"prompt": "Name a river.", "chosen": " The Seine flows through Paris.", "rejected": " Stone."},
    {"prompt": "Add two and three", "chosen": ": five", "rejected": ": the answer is seven"},
    {"prompt": "Rain?", "chosen": " It falls on the roof and sings.", "rejected": " Rain rain rain."},
]


def trainer_of(objective: str, model: Any, tokenizer: Any, folder: Path, **settings: Any) -> Any:
    """Return TRL's trainer of a model with PEFT's adapters on PAIRS, all in one batch.

    It computes only the first step's loss.

    Args:
        settings: the objective's settings, by TRL's names.
    """
    from datasets import Dataset

    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "beta": BETA,
        "per_device_train_batch_size": len(PAIRS),
        "report_to": "none",
        "max_length": 64,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        **settings,
    }
    given = {"train_dataset": Dataset.from_list(PAIRS), "processing_class": tokenizer}
    if objective == "dpo":
        from trl import DPOConfig, DPOTrainer

        return DPOTrainer(model, args=DPOConfig(**arguments), **given)
    if objective == "cpo":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        return CPOTrainer(model, args=CPOConfig(**arguments), **given)
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    return ORPOTrainer(model, args=ORPOConfig(**arguments), **given)


def interleaved(chosen: Mapping[str, Any], rejected: Mapping[str, Any], rows: int = 8) -> dict[str, Any]:
    """Convert TRL's halves of a batch to our rows, padded to `rows` of 64 tokens."""
    out = {}
    for name in ("tokens", "segment_ids", "loss_mask"):
        whole = np.zeros((rows, 64), np.int32)
        for start, half in ((0, chosen[name]), (1, rejected[name])):
            for i, row in enumerate(half):
                whole[2 * i + start, : len(row)] = row
        out[name] = whole
    out["positions"] = np.tile(np.arange(64, dtype=np.int32), (rows, 1))
    out["loss_mask"] = out["loss_mask"].astype(bool)
    out["norm"] = np.float32(len(PAIRS))
    out["index"] = np.int32(0)
    return out


def collated(trainer: Any) -> tuple[Any, dict[str, Any]]:
    """Return a batch of all pairs in TRL's form, and as our rows."""
    inputs = next(iter(trainer.get_train_dataloader()))
    if "input_ids" in inputs:
        halves = [
            {"tokens": ids, "segment_ids": mask, "loss_mask": completion}
            for ids, mask, completion in zip(
                *(
                    inputs[name].numpy().reshape(2, len(PAIRS), -1)
                    for name in ("input_ids", "attention_mask", "completion_mask")
                ),
                strict=True,
            )
        ]
    else:
        halves = []
        for kind in ("chosen", "rejected"):
            ids = inputs[f"{kind}_input_ids"].numpy()
            mask = inputs[f"{kind}_attention_mask"].numpy()
            halves.append(
                {
                    "tokens": ids * mask,
                    "segment_ids": mask,
                    "loss_mask": inputs[f"{kind}_labels"].numpy() != -100,
                }
            )
    return inputs, interleaved(*halves)


def fit_dpo(
    built: Any, mesh: Any, folder: Path, batch: dict[str, np.ndarray], rate: float, until: int
) -> None:
    """Train with DPO on one batch up to a step, or continue to it from the folder's checkpoint."""

    def batches(step: int) -> Iterator[dict[str, np.ndarray]]:
        while True:
            yield batch

    with mesh:
        how = {"objective": "dpo", "beta": BETA, "every_steps": 2}
        trainer = training.trainer(built, mesh, folder, optax.sgd(rate), 1, **how)
        metrics = Metrics(folder, trainer.train_steps or None, tensorboard=False)
        try:
            trainer.fit(TrainingData(batches, []), until, lambda step: rate, metrics, Interrupts())
        finally:
            metrics.close()
            trainer.close()
