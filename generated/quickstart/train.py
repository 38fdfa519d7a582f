"""LoRA fine-tuning of recipec/tiny-gemma4 on cpu-8.

Made by recipec from the recipe quickstart: edit recipe.yaml and build again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a copied runtime/

try:
    import optax
    from runtime.model.adapters import LoraSettings
    from runtime.sections import Log
    from runtime.settings import (
        CheckpointSettings,
        DataSettings,
        MeshSettings,
        ModelSettings,
        TrainSettings,
    )
    from runtime.training.train import parse_arguments, run
except ModuleNotFoundError as error:
    sys.exit(f"{error}: pip install -r requirements-train.txt")

ARTIFACT = Path(__file__).resolve().parent

MODEL = ModelSettings(
    id="recipec/tiny-gemma4",
    family="gemma4",
    dtype="float32",
    attention="dot",
    remat="none",
)
MESH = MeshSettings(platform="cpu", devices=8, axes={"fsdp": 4, "tp": 2})
LORA = LoraSettings(
    rank=8,
    alpha=16.0,
    dropout=0.05,
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
    train=("data/quickstart/train.jsonl",),
    eval=("data/quickstart/eval.jsonl",),
    format="chat",
    loss_on="assistant",
    special_tokens="control",
    max_length=128,
    overlong="drop",
    max_invalid_ratio=0.1,
    packing=True,
    shuffle_seed=0,
)
TRAIN = TrainSettings(
    steps=30,
    global_batch_size=8,
    micro_batch_size=1,
    loss_normalization="tokens",
    eval_every=15,
    seed=0,
    log=Log(every=5, tensorboard=True),
)
CHECKPOINT = CheckpointSettings(directory="checkpoints", every_steps=10, keep=3)
CACHE = "cache"

LEARNING_RATE = 0.01
WARMUP_STEPS = 4
MIN_LR_RATIO = 0.0
B1 = 0.9
B2 = 0.999
EPS = 1e-8
WEIGHT_DECAY = 0.0
MAX_GRAD_NORM = 1.0


def learning_rate(steps: int) -> optax.Schedule:
    """Return the learning rate at each optimizer step of a run of `steps`."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=LEARNING_RATE,
        warmup_steps=WARMUP_STEPS,
        decay_steps=steps,
        end_value=MIN_LR_RATIO * LEARNING_RATE,
    )


def optimizer(schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return the transformation of an optimizer step's gradient into an update."""
    return optax.chain(
        optax.clip_by_global_norm(MAX_GRAD_NORM),
        optax.adamw(schedule, b1=B1, b2=B2, eps=EPS, weight_decay=WEIGHT_DECAY),
    )


if __name__ == "__main__":
    arguments = parse_arguments(ARTIFACT)
    sys.exit(
        run(
            ARTIFACT,
            arguments,
            model=MODEL,
            mesh=MESH,
            lora=LORA,
            data=DATA,
            train=TRAIN,
            checkpoint=CHECKPOINT,
            learning_rate=learning_rate,
            optimizer=optimizer,
            cache=CACHE,
        )
    )
