"""Gradients of train_trl.py's loss with load balancing, from DDP processes on CPUs.

    python -m tests.parity.balanced_process FOLDER RANK WEIGHT

FOLDER has a checkpoint of a model with experts. Process RANK of two computes its piece and writes
FOLDER/WEIGHT-RANK.npz.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from recipec.runtime.backends.trl.trl_objectives import objective_of
from recipec.runtime.settings import TrainSettings
from tests.runtime import training

PROCESSES = 2


def adapted(folder: Path, weight: float) -> Any:
    """Return a checkpoint's model with adapters, as train_trl.py sets it up."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.config.output_router_logits = weight != 0.0
    add_fused_lm_head(model)
    torch.manual_seed(0)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    return get_peft_model(model, adapters).train()


def piece(rank: int) -> dict[str, torch.Tensor]:
    """Return a process's share of a step: other rows, and another number of real tokens."""
    rows = {name: torch.tensor(array) for name, array in training.batch(rank).items()}
    tokens = rows["tokens"].long()
    return {
        "input_ids": tokens,
        "position_ids": rows["positions"].long(),
        "labels": torch.where(rows["loss_mask"], tokens, -100),
        "real": rows["segment_ids"] > 0,
        "share": torch.tensor(1 / PROCESSES),
        "weights": torch.full((len(tokens),), 0.01),
    }


def loss(model: Any, rank: int, weight: float) -> torch.Tensor:
    """Return the loss of a process's piece; a step's loss is the sum over all processes."""
    train = TrainSettings(steps=1, global_batch_size=8, micro_batch_size=1, router_aux_loss_coef=weight)
    return objective_of(train)(model, model, piece(rank))[0]


def gradients(model: Any) -> dict[str, np.ndarray]:
    return {
        name: parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def main(folder: Path, rank: int, weight: float) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting-{weight}", rank=rank, world_size=PROCESSES
    )
    model = adapted(folder, weight)
    together = torch.nn.parallel.DistributedDataParallel(model)
    # DDP averages over the processes, so train_trl.py multiplies a piece's loss by their number.
    (loss(together, rank, weight) * PROCESSES).backward()
    np.savez(folder / f"{weight}-{rank}.npz", **gradients(model))
    torch.distributed.barrier()
    # DDP's destructor joins gloo's thread and holds the interpreter's lock, which that thread may wait for.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
