"""The recipes whose backends are compared."""

from __future__ import annotations

from typing import Any

from tests.parity.running import STEPS, Case

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention"]


def recipe(mesh: dict[str, int], lora: dict[str, Any], data: dict[str, Any], **train: Any) -> dict[str, Any]:
    return {
        "remat": {"policy": train.pop("remat", "decoder")},
        "mesh": {"accelerator": f"cpu-{mesh['fsdp'] * mesh['tp']}", "axes": mesh},
        "lora": {"dropout": 0.0, **lora},
        "data": {"train": ["train.jsonl"], "max_length": 64, **data},
        "train": {
            "steps": STEPS,
            "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 1.0, "weight_decay": 0.01},
            "schedule": {"name": "cosine", "warmup_steps": 2},
            "log": {"every": 10, "tensorboard": False},
            **train,
        },
    }


CASES = {
    "gemma4": Case(
        "google/gemma-4-31B-it",
        LOCAL_AND_GLOBAL,
        recipe(
            {"fsdp": 2, "tp": 1},
            {"rank": 4, "alpha": 8, "targets": ALL},
            {"packing": True, "loss_on": "assistant"},
            global_batch_size=4,
            micro_batch_size=1,
        ),
    ),
    "gemma3": Case(
        "google/gemma-3-1b-it",
        ["sliding_attention"] * 5 + ["full_attention"],
        recipe(
            {"fsdp": 1, "tp": 2},
            {"rank": 4, "alpha": 8, "rslora": True, "targets": ["k_proj", "o_proj", "up_proj"]},
            {"packing": False, "loss_on": "last_assistant"},
            global_batch_size=4,
            micro_batch_size=2,
            loss_normalization="micro_batches",
            remat="none",
        ),
    ),
    "llama": Case(
        "meta-llama/Llama-3.1-8B-Instruct",
        ["full_attention"] * 2,
        recipe(
            {"fsdp": 1, "tp": 1},
            {
                "rank": 4,
                "alpha": 8,
                "targets": ["q_proj", "v_proj", "down_proj"],
                "rank_pattern": {"v_proj": 2},
                "init": "pissa",
            },
            {"packing": False, "loss_on": "completion", "format": "prompt_completion"},
            global_batch_size=4,
            micro_batch_size=2,
        ),
    ),
    "qwen3": Case(
        "Qwen/Qwen3-0.6B",
        ["full_attention"] * 2,
        recipe(
            {"fsdp": 2, "tp": 1},
            {"rank": 4, "alpha": 4, "targets": ALL, "layers": [1]},
            {"packing": True, "loss_on": "all"},
            global_batch_size=4,
            micro_batch_size=1,
            optimizer={"learning_rate": 1e-3, "weight_decay": 0.0, "b2": 0.95, "eps": 1e-6},
            schedule={"name": "linear", "warmup_ratio": 0.1, "min_lr_ratio": 0.1},
        ),
    ),
}
