"""QLoRA fine-tuning of meta-llama/Llama-3.1-8B-Instruct by transformers, TRL and PEFT.

Made by recipec from the recipe baseline: edit recipe.yaml and build again.
"""

import math
import sys
from pathlib import Path

try:
    import torch
    from torch.optim.lr_scheduler import LambdaLR
except ModuleNotFoundError as error:
    sys.exit(f"{error}: pip install -r requirements-trl.txt")

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # holds runtime/

from runtime.backends.trl.run import parse_arguments, run
from runtime.model.adapters import LoraSettings
from runtime.settings import (
    CheckpointSettings,
    DataSettings,
    ModelSettings,
    TrainSettings,
)

ARTIFACT = Path(__file__).resolve().parents[1]

MODEL = ModelSettings(
    id="meta-llama/Llama-3.1-8B-Instruct",
    family="llama",
    dtype="bfloat16",
    attention="dot",
    remat="decoder",
)
LORA = LoraSettings(
    rank=16,
    alpha=32.0,
    dropout=0.0,
    targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    layers=tuple(range(16, 32)),
    rslora=True,
    kind="lora",
    init="peft",
    dtype="float32",
    kv="independent",
    quantize="nf4",
)
DATA = DataSettings(
    train=("gs://bucket/train.jsonl",),
    format="chat",
    loss_on="assistant",
    max_length=2048,
    overlong="drop",
    max_invalid_ratio=0.1,
    packing=True,
    shuffle_seed=0,
)
TRAIN = TrainSettings(
    epochs=2,
    global_batch_size=16,
    micro_batch_size=2,
    loss_normalization="tokens",
    seed=0,
    log_every=10,
    tensorboard=True,
)
MICRO_BATCH_ROWS = 4
CHECKPOINT = CheckpointSettings(directory="checkpoints-trl", every_steps=100, keep=3)
CACHE = "cache"

LEARNING_RATE = 2e-4
WARMUP_RATIO = 0.03
FINAL_RATIO = 0.1
B1 = 0.9
B2 = 0.999
EPS = 1e-8
WEIGHT_DECAY = 0.001
MAX_GRAD_NORM = 0.3


def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that updates the parameters."""
    return torch.optim.AdamW(
        parameters,
        lr=LEARNING_RATE,
        betas=(B1, B2),
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
    )


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0, in a run of `steps`."""
    warmup = math.ceil(WARMUP_RATIO * steps)
    if step < warmup:
        return LEARNING_RATE * step / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    left = 1 - done
    return LEARNING_RATE * (FINAL_RATIO + (1 - FINAL_RATIO) * left)


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """Return the schedule of the optimizer's learning rate."""
    return LambdaLR(optimizer, lambda step: learning_rate(step, steps) / LEARNING_RATE)


if __name__ == "__main__":
    arguments = parse_arguments(ARTIFACT)
    sys.exit(
        run(
            ARTIFACT,
            arguments,
            model=MODEL,
            lora=LORA,
            data=DATA,
            train=TRAIN,
            checkpoint=CHECKPOINT,
            optimizer=optimizer,
            schedule=schedule,
            micro_batch_rows=MICRO_BATCH_ROWS,
            max_grad_norm=MAX_GRAD_NORM,
            cache=CACHE,
        )
    )
