"""LoRA fine-tuning of meta-llama/Llama-3.1-8B-Instruct by transformers, TRL and PEFT.

Made by recipec from the recipe llama31-8b-v6e8: edit recipe.yaml and build again.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for a copied runtime/

try:
    import torch
    from runtime.backends.trl.trl_run import parse_arguments, run
    from runtime.model.adapters import LoraSettings
    from runtime.sections import Log, Source
    from runtime.settings import (
        CheckpointSettings,
        DataSettings,
        ModelSettings,
        TrainSettings,
    )
    from torch.optim.lr_scheduler import LambdaLR
except ModuleNotFoundError as error:
    sys.exit(f"{error}: pip install -r requirements-trl.txt")

ARTIFACT = Path(__file__).resolve().parents[1]

MODEL = ModelSettings(
    id="meta-llama/Llama-3.1-8B-Instruct",
    family="llama",
    dtype="bfloat16",
    attention="splash",
    attention_block=1024,
    remat="none",
)
LORA = LoraSettings(
    rank=32,
    alpha=16.0,
    rslora=True,
    rank_pattern={"down_proj": 16, "up_proj": 16, "gate_proj": 16},
    dropout=0.0,
    targets=(
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ),
    kind="lora",
    init="peft",
    dtype="float32",
    kv="independent",
)
DATA = DataSettings(
    train=(Source("hf://yahma/alpaca-cleaned", split="train[:98%]"),),
    eval=(Source("hf://yahma/alpaca-cleaned", split="train[98%:]"),),
    format="instruction",
    loss_on="completion",
    special_tokens="control",
    max_length=4096,
    overlong="drop",
    max_invalid_ratio=0.1,
    packing=True,
    shuffle_seed=0,
)
TRAIN = TrainSettings(
    epochs=2,
    global_batch_size=16,
    micro_batch_size=1,
    loss_normalization="tokens",
    eval_every=50,
    seed=0,
    log=Log(every=10, tensorboard=True),
)
MICRO_BATCH_ROWS = 8
CHECKPOINT = CheckpointSettings(directory="checkpoints-trl", every_steps=50, keep=2)
CACHE = "cache"

LEARNING_RATE = 1e-4
WARMUP_RATIO = 0.03
B1 = 0.9
B2 = 0.999
EPS = 1e-8
WEIGHT_DECAY = 0.0
MAX_GRAD_NORM = 1.0


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
    return LEARNING_RATE * (1 - done)


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
