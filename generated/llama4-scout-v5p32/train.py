"""LoRA fine-tuning of meta-llama/Llama-4-Scout-17B-16E-Instruct on v5p-32.

Made by recipec from the recipe llama4-scout-v5p32: edit recipe.yaml and build again.
"""

import math
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
    id="meta-llama/Llama-4-Scout-17B-16E-Instruct",
    family="llama4",
    dtype="bfloat16",
    attention="splash",
    attention_block=512,
    remat="none",
)
MESH = MeshSettings(
    platform="tpu",
    devices=16,
    axes={"fsdp": 4, "ep": 4, "tp": 1},
    hosts=4,
)
LORA = LoraSettings(
    rank=16,
    alpha=32.0,
    dropout=0.0,
    targets=("q_proj", "k_proj", "v_proj", "o_proj", "experts"),
    kind="lora",
    init="peft",
    dtype="float32",
    kv="independent",
)
DATA = DataSettings(
    train=("hf://open-thoughts/OpenThoughts-114k",),
    eval_fraction=0.005,
    eval_seed=42,
    format="chat",
    loss_on="assistant",
    special_tokens="control",
    max_length=8192,
    overlong="drop",
    max_invalid_ratio=0.1,
    packing=True,
    shuffle_seed=0,
)
TRAIN = TrainSettings(
    epochs=1,
    global_batch_size=32,
    micro_batch_size=1,
    loss_normalization="tokens",
    eval_every=100,
    seed=0,
    log=Log(every=10, tensorboard=True),
)
CHECKPOINT = CheckpointSettings(
    directory="gs://my-bucket/llama4-scout",
    every_steps=100,
    keep=2,
)
CACHE = "cache"

LEARNING_RATE = 1e-4
WARMUP_RATIO = 0.03
MIN_LR_RATIO = 0.0
B1 = 0.9
B2 = 0.999
EPS = 1e-8
WEIGHT_DECAY = 0.0
MAX_GRAD_NORM = 1.0


def learning_rate(steps: int) -> optax.Schedule:
    """Return the learning rate at each optimizer step of a run of `steps`."""
    warmup = math.ceil(WARMUP_RATIO * steps)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=LEARNING_RATE,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
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
