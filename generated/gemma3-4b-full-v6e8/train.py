"""Full fine-tuning of google/gemma-3-4b-it on v6e-8.

Made by recipec from the recipe gemma3-4b-full-v6e8: edit recipe.yaml and build again.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a copied runtime/

try:
    import optax
    from runtime.sections import Log, Source
    from runtime.settings import (
        CheckpointSettings,
        DataSettings,
        MeshSettings,
        ModelSettings,
        TrainSettings,
    )
    from runtime.training.optimizers import master_weights
    from runtime.training.train import parse_arguments, run
except ModuleNotFoundError as error:
    sys.exit(f"{error}: pip install -r requirements-train.txt")

ARTIFACT = Path(__file__).resolve().parent

MODEL = ModelSettings(
    id="google/gemma-3-4b-it",
    family="gemma3",
    dtype="bfloat16",
    attention="splash",
    attention_block=1024,
    remat="none",
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
        "--xla_tpu_scoped_vmem_limit_kib=98304",
        "--xla_tpu_use_minor_sharding_for_major_trivial_input=true",
        "--xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1",
        "--xla_tpu_assign_all_reduce_scatter_layout=true",
        "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",
    ),
)
DATA = DataSettings(
    train=(Source("hf://AI-MO/NuminaMath-CoT", split="train"),),
    eval=(Source("hf://AI-MO/NuminaMath-CoT", split="test"),),
    format="chat",
    loss_on="assistant",
    special_tokens="control",
    max_length=2048,
    overlong="drop",
    max_invalid_ratio=0.1,
    packing=True,
    shuffle_seed=0,
)
TRAIN = TrainSettings(
    epochs=1,
    global_batch_size=64,
    micro_batch_size=2,
    loss_normalization="tokens",
    eval_every=500,
    seed=0,
    log=Log(every=10, tensorboard=True),
)
CHECKPOINT = CheckpointSettings(
    directory="gs://my-bucket/gemma3-4b-full",
    every_steps=500,
    keep=2,
)
CACHE = "cache"

LEARNING_RATE = 1e-5
WARMUP_RATIO = 0.03
MIN_LR_RATIO = 0.1
B1 = 0.9
B2 = 0.999
EPS = 1e-8
WEIGHT_DECAY = 0.01
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
    return master_weights(
        optax.chain(
            optax.clip_by_global_norm(MAX_GRAD_NORM),
            optax.adamw(schedule, b1=B1, b2=B2, eps=EPS, weight_decay=WEIGHT_DECAY),
        ),
    )


if __name__ == "__main__":
    arguments = parse_arguments(ARTIFACT)
    sys.exit(
        run(
            ARTIFACT,
            arguments,
            model=MODEL,
            mesh=MESH,
            data=DATA,
            train=TRAIN,
            checkpoint=CHECKPOINT,
            learning_rate=learning_rate,
            optimizer=optimizer,
            cache=CACHE,
        )
    )
