"""LoRA fine-tuning of google/gemma-4-31B-it on v5p-8.

Made by recipec from the recipe from-base: edit recipe.yaml and build again.
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
    id="google/gemma-4-31B-it",
    family="gemma4",
    dtype="bfloat16",
    attention="splash",
    attention_block=512,
    remat="none",
)
MESH = MeshSettings(
    platform="tpu",
    devices=4,
    axes={"fsdp": 2, "tp": 2},
    flags=(
        "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
        "--xla_tpu_data_parallel_opt_different_sized_ops=true",
        "--xla_tpu_enable_async_collective_fusion=true",
        "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
        "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
        "--xla_tpu_overlap_compute_collective_tc=true",
        "--xla_enable_async_all_gather=true",
        "--xla_tpu_megacore_fusion_allow_ags=false",
        "--xla_enable_async_collective_permute=true",
        "--xla_tpu_enable_ag_backward_pipelining=true",
    ),
)
SHARDING_RULES = ((".*mlp.down_proj.*", ("fsdp", "tp")),)
LORA = LoraSettings(
    rank=8,
    alpha=16.0,
    dropout=0.0,
    targets=("q_proj", "v_proj"),
    kind="lora",
    init="peft",
    dtype="float32",
    kv="shared",
    layers=tuple(range(20, 60)),
)
DATA = DataSettings(
    train=("gs://bucket/train.jsonl",),
    format="chat",
    loss_on="last_assistant",
    special_tokens="control",
    max_length=4096,
    overlong="drop",
    max_invalid_ratio=0.1,
    packing=True,
    shuffle_seed=0,
)
TRAIN = TrainSettings(
    steps=200,
    global_batch_size=8,
    micro_batch_size=1,
    loss_normalization="tokens",
    seed=0,
    log=Log(every=10, tensorboard=True),
)
CHECKPOINT = CheckpointSettings(directory="checkpoints", every_steps=100, keep=3)
CACHE = "cache"

LEARNING_RATE = 1e-4
WARMUP_RATIO = 0.1
MIN_LR_RATIO = 0.1
B1 = 0.9
B2 = 0.999
EPS = 1e-8
WEIGHT_DECAY = 0.0
MAX_GRAD_NORM = 1.0


def learning_rate(steps: int) -> optax.Schedule:
    """Return the learning rate at each optimizer step of a run of `steps`."""
    warmup = math.ceil(WARMUP_RATIO * steps)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, LEARNING_RATE, warmup),
            optax.linear_schedule(
                LEARNING_RATE,
                MIN_LR_RATIO * LEARNING_RATE,
                max(steps, warmup + 1) - warmup,
            ),
        ],
        [warmup],
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
            rules=SHARDING_RULES,
            cache=CACHE,
        )
    )
