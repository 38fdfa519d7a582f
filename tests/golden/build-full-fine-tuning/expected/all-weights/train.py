"""Full fine-tuning of meta-llama/Llama-3.2-1B-Instruct on v6e-8.

Made by recipec from the recipe all-weights: edit recipe.yaml and build again.
"""

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
    id="meta-llama/Llama-3.2-1B-Instruct",
    family="llama",
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
    train=(
        Source("hf://owner/instructions", split="train[:90%]", config="en"),
        Source("gs://bucket/more.parquet", weight=0.5, limit=20000),
    ),
    eval_fraction=0.02,
    eval_seed=42,
    format="instruction",
    fields={"instruction": "question", "output": "answer"},
    transform=f"{ARTIFACT / 'rows/prepare.py'}:clean",
    loss_on="completion",
    special_tokens="control",
    max_length=4096,
    overlong="drop",
    max_invalid_ratio=0.02,
    packing=True,
    shuffle_seed=0,
)
TRAIN = TrainSettings(
    epochs=1,
    global_batch_size=8,
    micro_batch_size=1,
    loss_normalization="tokens",
    eval_every=100,
    seed=0,
    log=Log(every=10, tensorboard=True),
)
CHECKPOINT = CheckpointSettings(directory="checkpoints", every_steps=100, keep=3)
CACHE = "gs://bucket/cache"

LEARNING_RATE = 1e-5
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 1.0


def learning_rate(steps: int) -> optax.Schedule:
    """Return the learning rate at each optimizer step of a run of `steps`."""
    return optax.constant_schedule(LEARNING_RATE)


def optimizer(schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return the transformation of an optimizer step's gradient into an update."""
    return master_weights(
        optax.chain(
            optax.clip_by_global_norm(MAX_GRAD_NORM),
            optax.scale_by_factored_rms(),
            optax.clip_by_block_rms(1.0),
            optax.add_decayed_weights(WEIGHT_DECAY),
            optax.scale_by_learning_rate(schedule),
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
