"""Test Axolotl's keys and what they mean in a recipe."""

from __future__ import annotations

from pathlib import Path

from tests.port.axolotl_runs import port
from tests.port.dialects import finding


def test_global_batch_size_counts_data_parallel_gpus(tmp_path: Path) -> None:
    assert port(tmp_path, devices=4).value("train.global_batch_size") == 32
    alone = port(tmp_path)
    assert "--devices" in finding(alone, "--devices").note
    assert port(tmp_path, gradient_accumulation_steps=1).value("train.loss_normalization") == "tokens"
    sharded = port(tmp_path, dp_shard_size=4, tensor_parallel_size=2, fsdp_version=2)
    assert sharded.value("train.global_batch_size") == 32
    assert port(tmp_path, devices=8, tensor_parallel_size=2).value("train.global_batch_size") == 32
    derived = port(tmp_path, gradient_accumulation_steps=None, batch_size=12)
    assert derived.value("train.global_batch_size") == 12
    ray = port(tmp_path, use_ray=True, ray_num_workers=4, tensor_parallel_size=2)
    assert ray.value("train.global_batch_size") == 16
    assert port(tmp_path, use_ray=False, ray_num_workers=4).value("train.global_batch_size") == 8
