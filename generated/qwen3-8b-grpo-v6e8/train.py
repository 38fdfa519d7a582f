"""LoRA GRPO training of Qwen/Qwen3-8B on v6e-8.

Made by recipec from the recipe qwen3-8b-grpo-v6e8: edit recipe.yaml and build again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a copied runtime/

try:
    import optax
    from runtime.model.adapters import LoraSettings
    from runtime.sections import Grpo, Log, RewardLimits, Rollout, Source
    from runtime.settings import (
        CheckpointSettings,
        DataSettings,
        MeshSettings,
        ModelSettings,
        Reward,
        TrainSettings,
    )
    from runtime.training.train import parse_arguments, run
except ModuleNotFoundError as error:
    sys.exit(f"{error}: pip install -r requirements-train.txt")

ARTIFACT = Path(__file__).resolve().parent

MODEL = ModelSettings(
    id="Qwen/Qwen3-8B",
    family="qwen3",
    dtype="bfloat16",
    attention="splash",
    attention_block=1024,
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
        "--xla_tpu_scoped_vmem_limit_kib=98304",
        "--xla_tpu_use_minor_sharding_for_major_trivial_input=true",
        "--xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1",
        "--xla_tpu_assign_all_reduce_scatter_layout=true",
        "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",
    ),
)
LORA = LoraSettings(
    rank=32,
    alpha=64.0,
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
    train=(Source("hf://openai/gsm8k", split="train", config="main"),),
    format="prompt",
    transform=f"{ARTIFACT / 'data/gsm8k/prompts.py'}:prompt_of_qwen3",
    loss_on="completion",
    special_tokens="control",
    max_length=1280,
    overlong="drop",
    max_invalid_ratio=0.1,
    packing=False,
    shuffle_seed=0,
)
TRAIN = TrainSettings(
    objective="grpo",
    grpo=Grpo(
        num_generations=8,
        iterations=1,
        loss="dapo",
        beta=0.0,
        kl="k3",
        kl_bias_correction=True,
        epsilon=0.2,
        scale_rewards="group",
        mask_truncated=True,
        dynamic_sampling=0,
        max_prompt_length=256,
        max_completion_length=1024,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
    ),
    epochs=1,
    global_batch_size=512,
    micro_batch_size=4,
    loss_normalization="tokens",
    seed=0,
    log=Log(every=10, tensorboard=True),
)
CHECKPOINT = CheckpointSettings(directory="checkpoints", every_steps=20, keep=2)
REWARDS = (Reward("numeric_match", column="answer", options={"tolerance": 1e-6}),)
REWARD_LIMITS = RewardLimits(seconds=60.0, memory_mebibytes=2048)
ROLLOUT = Rollout(engine="mesh", axes={"fsdp": 1, "tp": 8}, rows=256)
CACHE = "cache"

LEARNING_RATE = 1e-5
WARMUP_STEPS = 5
B1 = 0.9
B2 = 0.999
EPS = 1e-8
WEIGHT_DECAY = 0.0
MAX_GRAD_NORM = 1.0


def learning_rate(steps: int) -> optax.Schedule:
    """Return the learning rate at each optimizer step of a run of `steps`."""
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, LEARNING_RATE, WARMUP_STEPS),
            optax.constant_schedule(LEARNING_RATE),
        ],
        [WARMUP_STEPS],
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
            rewards=REWARDS,
            reward_limits=REWARD_LIMITS,
            rollout=ROLLOUT,
            learning_rate=learning_rate,
            optimizer=optimizer,
            cache=CACHE,
        )
    )
