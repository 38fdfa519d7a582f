"""LoRA fine-tuning of google/gemma-3-4b-it on v5e-8.

Made by recipec from the recipe gemma3-4b-images-v5e8: edit recipe.yaml and build again.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a copied runtime/

try:
    import optax
    from runtime.model.adapters import LoraSettings
    from runtime.sections import Images, Log, Source
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
    id="google/gemma-3-4b-it",
    family="gemma3",
    dtype="bfloat16",
    attention="dot",
    remat="save_dots",
)
MESH = MeshSettings(
    platform="tpu",
    devices=8,
    axes={"fsdp": 8, "tp": 1},
    flags=(
        "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
        "--xla_tpu_data_parallel_opt_different_sized_ops=true",
        "--xla_tpu_enable_async_collective_fusion=true",
        "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
        "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
        "--xla_tpu_overlap_compute_collective_tc=true",
        "--xla_enable_async_all_gather=true",
        "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",
    ),
)
LORA = LoraSettings(
    rank=16,
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
    train=(Source("hf://HuggingFaceH4/llava-instruct-mix-vsft", split="train"),),
    eval=(Source("hf://HuggingFaceH4/llava-instruct-mix-vsft", split="test[:1%]"),),
    format="chat",
    loss_on="assistant",
    special_tokens="control",
    images=Images(per_row=4),
    max_length=2048,
    overlong="drop",
    max_invalid_ratio=0.1,
    packing=True,
    shuffle_seed=0,
)
TRAIN = TrainSettings(
    steps=2000,
    global_batch_size=32,
    micro_batch_size=1,
    loss_normalization="tokens",
    eval_every=200,
    seed=0,
    log=Log(every=10, tensorboard=True),
)
CHECKPOINT = CheckpointSettings(directory="checkpoints", every_steps=200, keep=2)
CACHE = "cache"

LEARNING_RATE = 1e-4
WARMUP_RATIO = 0.03
MIN_LR_RATIO = 0.1
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
