"""Tests of packing: how samples fill rows, and that a packed row trains as padded ones."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from recipec.runtime.data.epochs import pack
from recipec.runtime.data.prepare import PreparedData, prepare
from recipec.runtime.model.sharding import shard_rows
from recipec.runtime.settings import DataSettings, TrainSettings
from recipec.runtime.training.objective_losses import micro_batch_loss
from tests import tiny
from tests.runtime import training
from tests.runtime.built_models import randomize
from tests.runtime.chats import tokenizer, write
from tests.runtime.preparing import conversations


@pytest.mark.parametrize("seed", range(40))
def test_packing_holds_each_sample_once_and_makes_no_row_too_long(seed: int) -> None:
    draw = random.Random(seed)
    capacity = draw.randint(1, 200)
    lengths = [draw.randint(1, capacity) for _ in range(draw.randint(1, 300))]
    order = list(range(len(lengths)))
    draw.shuffle(order)
    rows = pack(lengths, capacity, order)
    assert sorted(i for row in rows for i in row) == sorted(order)
    assert all(0 < sum(lengths[i] for i in row) <= capacity for row in rows)
    assert len(rows) == len(pack(lengths, capacity, range(len(lengths))))
    # No two rows fit into one, so that at most one row is half empty.
    used = sorted(sum(lengths[i] for i in row) for row in rows)
    assert len(used) < 2 or used[0] + used[1] > capacity


def test_packing_takes_the_fullest_row_that_has_room() -> None:
    assert list(pack([3, 7, 5, 5, 2], 10, range(5))) == [(1, 0), (2, 3), (4,)]
    assert list(pack([3, 7, 5, 5, 2], 10, [4, 3, 2, 1, 0])) == [(1, 0), (3, 2), (4,)]
    # Packing uses the fullest row with room, not the first.
    assert list(pack([6, 8, 2], 10, range(3))) == [(1, 2), (0,)]


def test_a_million_samples_are_packed_in_seconds() -> None:
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(6.7, 0.5, 1_000_000), 1, 3072).astype(np.int64)
    start = time.process_time()
    rows = pack(lengths, 3072, draw.permutation(len(lengths)))
    assert time.process_time() - start < 10
    assert np.array_equal(np.sort(rows.samples), np.arange(len(lengths)))
    filled = np.add.reduceat(lengths[rows.samples], rows.offsets[:-1])
    assert filled.max() <= 3072 and filled.mean() > 0.99 * 3072


SAMPLES, LENGTH = 24, 96
MODEL = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}


def one_step(folder: Path, packing: bool) -> PreparedData:
    """Put all samples into one micro-batch with as many rows. With packing, most rows are empty."""
    data = DataSettings(train=("train.jsonl",), max_length=LENGTH, packing=packing)
    train = TrainSettings(epochs=1, global_batch_size=SAMPLES, micro_batch_size=1)
    prepared = prepare(data, train, SAMPLES, tokenizer(), folder, vocabulary=512)
    assert prepared.total_steps == prepared.accumulation == 1
    return prepared


def differentiated(built: Any, mesh: Any) -> Callable[[dict[str, np.ndarray]], tuple[float, dict[str, Any]]]:
    """Return a function of the trainer's loss of a micro-batch, and of all adapter gradients by path."""
    graph, state = nnx.split(built.model)
    settings = TrainSettings(global_batch_size=8, micro_batch_size=8)

    @jax.jit
    def step(state: Any, inputs: Any) -> Any:
        return nnx.value_and_grad(
            lambda model: micro_batch_loss(built, settings, model, inputs)[0],
            argnums=nnx.DiffState(0, nnx.LoRAParam),
        )(nnx.merge(graph, state))

    def run(batch: dict[str, np.ndarray]) -> tuple[float, dict[str, Any]]:
        with mesh:
            loss, gradients = step(state, shard_rows(batch, mesh))
        return float(loss), {
            ".".join(map(str, path)): np.asarray(variable.get_raw_value())
            for path, variable in gradients.flat_state()
        }

    return run


def test_packed_and_padded_rows_give_the_same_loss_and_gradients(tmp_path: Path) -> None:
    tiny.make_gemma4(tmp_path / "model", **MODEL)
    mesh, built = training.build(tmp_path / "model", {"fsdp": 4, "tp": 2}, remat="none")
    randomize(built)
    write(tmp_path / "train.jsonl", conversations(SAMPLES))
    packed, padded = one_step(tmp_path, True), one_step(tmp_path, False)
    assert packed.report.train.rows <= 12 and packed.micro_batch(0)["segment_ids"].max() > 1

    run = differentiated(built, mesh)
    loss, gradients = run(packed.micro_batch(0))
    expected, reference = run(padded.micro_batch(0))
    assert abs(loss - expected) < 1e-5
    assert gradients.keys() == reference.keys() and len(gradients) > 10
    for name, gradient in reference.items():
        assert np.abs(gradient).max() > 1e-4 or "lora_b" in name, name
        np.testing.assert_allclose(gradients[name], gradient, rtol=0, atol=1e-5, err_msg=name)

    # Let each sample attend to its neighbors in the row.
    leaking = packed.micro_batch(0)
    leaking["segment_ids"] = (leaking["segment_ids"] > 0).astype(np.int32)
    loss, _ = run(leaking)
    assert abs(loss - expected) > 1e-3
