"""Tests of the axis over slices: the batch is split over it, and the results equal those of one device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from recipec.runtime.model.partition_rules import data_parallel
from recipec.runtime.model.sharding import shard_rows
from recipec.runtime.settings import TrainSettings
from recipec.runtime.training.objective_losses import micro_batch_loss
from recipec.runtime.training.step import Step, trained_type
from tests import tiny
from tests.runtime import training
from tests.runtime.training import QUICK

SLICED = {"dcn": 2, "fsdp": 2, "tp": 2}
ONE_DEVICE = {"fsdp": 1, "tp": 1}
TOLERANCE = 1e-5
"""For float32 sums in another order, relative to the largest gradient of an array."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "base"
    tiny.make_llama(folder, num_hidden_layers=1)
    return folder


def computed(directory: Path, axes: Mapping[str, int], **options: Any) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss of a packed micro-batch, and the trained arrays' gradients by path."""
    mesh, built = training.build(directory, axes, seed=1, **options)
    for number, path in enumerate(sorted(training.arrays(built.model))):
        if path.endswith("lora_b"):  # zero at first, which would make the gradients of lora_a zero
            _randomized(built.model, path, number)
    settings = TrainSettings(steps=1, global_batch_size=training.ROWS, micro_batch_size=1)
    with mesh:
        optimizer = nnx.Optimizer(built.model, optax.sgd(1e-3), wrt=trained_type(built))
        step = Step(built, optimizer, settings, mesh, lambda *of: micro_batch_loss(built, settings, *of))
        batch = shard_rows(training.packed_batch(), mesh)
        trained, _ = step.live

        def both(trained: Any, base: Any, batch: Any) -> Any:
            return step._evaluate(trained, base, batch), step._gradients_of(trained, base, batch)

        loss, gradients = jax.jit(both, compiler_options=QUICK)(trained, step.base, batch)
    assert len(batch["tokens"].addressable_shards[0].data) == training.ROWS // data_parallel(axes)
    for path, variable in nnx.state(built.model).flat_state():
        spec = variable.get_raw_value().sharding.spec
        assert "dcn" not in str(spec), f"{path} is cut over slices"
    assert batch["tokens"].addressable_shards[0].data.shape[0] == 8 // (axes.get("dcn", 1) * axes["fsdp"])
    flat = {".".join(map(str, path)): np.asarray(one.get_raw_value()) for path, one in gradients.flat_state()}
    return float(loss), flat


def _randomized(model: Any, path: str, seed: int) -> None:
    for parts, variable in nnx.state(model).flat_state():
        if ".".join(map(str, parts)) == path:
            array = variable.get_raw_value()
            values = np.random.default_rng(seed).standard_normal(array.shape) / 10
            at = model
            for part in parts[:-1]:
                at = at[part] if isinstance(part, int) else getattr(at, part)
            getattr(at, parts[-1]).value = jax.device_put(values.astype(array.dtype), array.sharding)


def same(found: tuple[float, dict[str, np.ndarray]], wanted: tuple[float, dict[str, np.ndarray]]) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=TOLERANCE)
    assert found[1].keys() == wanted[1].keys() and found[1]
    for path, gradient in wanted[1].items():
        assert np.abs(gradient).max() > 0, path
        assert np.abs(found[1][path] - gradient).max() <= TOLERANCE * np.abs(gradient).max(), path


@pytest.mark.parametrize("full", [False, True], ids=["lora", "all weights"])
def test_loss_and_gradients_on_two_slices_match_one_device(base: Path, full: bool) -> None:
    """Use tp and fsdp of one size: with rows over (dcn, fsdp), XLA's partitioner confuses the slices here."""
    same(computed(base, SLICED, full=full), computed(base, ONE_DEVICE, full=full))
