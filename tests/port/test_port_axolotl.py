"""Test Axolotl's keys and what they mean in a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipec.compiler.port.keys import keys_of
from tests.port.axolotl_runs import BASE, WITHIN, port
from tests.port.dialects import finding, ported, samples, spoken, unspoken


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


@pytest.mark.parametrize("nulls", [True, False])
def test_report_covers_every_axolotl_schema_key(tmp_path: Path, nulls: bool) -> None:
    every = keys_of("axolotl", "config")
    of_plugins = {k: v for k, v in keys_of("axolotl", "plugins").items() if k not in WITHIN}
    assert len(every) > 350 and len(of_plugins) > 60
    given = {**samples({**every, **of_plugins}), **BASE}
    if nulls:
        given = {key: BASE.get(key) for key in given}
    made = ported("axolotl", tmp_path, given)
    assert unspoken(made, given) == []
    spoken(made)


@pytest.mark.parametrize("kind", ["chat_template", "completion", "alpaca", "input_output"])
def test_report_covers_every_dataset_key(tmp_path: Path, kind: str) -> None:
    every = keys_of("axolotl", "SFTDataset")
    given = {**samples(every), "path": "our/set", "type": kind, "data_files": None, "chat_template": None}
    given |= {
        "train_on_eos": "turn",
        "train_on_eot": "turn",
        "roles": None,
        "message_property_mappings": None,
    }
    made = port(tmp_path, datasets=[given])
    assert made.unread(made.sources.main) == []
    spoken(made)
