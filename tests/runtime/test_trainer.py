"""Tests of the training loop: resuming, saving, metrics, and early ends."""

from __future__ import annotations

import ast
import inspect
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tunix.sft import peft_trainer

from recipec.runtime.checkpoints.trained_weights import restore_tree
from recipec.runtime.errors import UserError
from recipec.runtime.metrics.loggers import Metrics
from recipec.runtime.metrics.run_report import NotFinite, Numbers, Report
from recipec.runtime.model import sharding
from recipec.runtime.model.sharding import shard_rows, start_mesh
from recipec.runtime.settings import MeshSettings
from recipec.runtime.training import trainer as trainer_module
from tests import tiny
from tests.runtime import training

pytestmark = pytest.mark.usefixtures("compiled_once")
"""The tests' trainers are the same program."""

MESH = {"fsdp": 4, "tp": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4") / "model"
    tiny.make_gemma4(folder, num_hidden_layers=1, layer_types=["sliding_attention"])
    return folder


def attributes(module: Any, name: str, context: type[ast.expr_context] | None = None) -> set[str]:
    """Return the private attributes of itself that a class of a module uses, or only those that it sets."""
    tree = ast.parse(inspect.getsource(module))
    (cls,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    return {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        if node.attr.startswith("_") and (context is None or isinstance(node.ctx, context))
    }


def test_trainer_uses_the_listed_private_attributes_of_tunix_alone() -> None:
    """Fail when a version of Tunix no longer sets one, or sets one that Trainer has for itself."""
    of_tunix = attributes(peft_trainer, "PeftTrainer")
    assert attributes(trainer_module, "Trainer") & of_tunix == {*trainer_module.OF_TUNIX}
    assert {*trainer_module.OF_TUNIX} <= attributes(peft_trainer, "PeftTrainer", ast.Store)


def chain(rate: Any) -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))


def run(model: Path, folder: Path, until: int, evaluate: bool = True, **options: Any) -> tuple[Any, Any, Any]:
    """Run one process's part of a run, and return the trainer, the model and the outcome."""
    rate = optax.linear_schedule(1e-2, 1e-3, 8)
    mesh, built = training.build(model, MESH, dropout=0.1)
    with mesh:
        trainer = training.trainer(
            built, mesh, folder, chain(options.pop("rate", rate)), eval_every=3, **options
        )
        outcome = training.fit(trainer, folder, until, rate, evaluate=evaluate)
    return trainer, built, outcome


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any, Any]:
    """Run five uninterrupted steps, and return the folder and the results of `run`."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, *run(model, folder, 5)


def test_resumed_run_matches_uninterrupted_run(
    model: Path, whole: tuple[Path, Any, Any, Any], tmp_path: Path
) -> None:
    """Continue dropout, schedule, data, optimizer and metrics."""
    folder, _, uninterrupted, outcome = whole
    assert outcome.step == 5
    first, _, _ = run(model, tmp_path, 3)
    assert first.train_steps == 3
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 99.0}\n{"step": 5, "lo')
    second, parts, again = run(model, tmp_path, 5)
    assert second.train_steps == again.step == 5
    expected, found = training.adapters(uninterrupted), training.adapters(parts)
    for path in expected:
        assert np.array_equal(expected[path], found[path]), path
    keep = ("step", "loss", "eval_loss", "learning_rate", "grad_norm", "tokens")
    assert [{k: line[k] for k in keep if k in line} for line in lines(tmp_path)] == [
        {k: line[k] for k in keep if k in line} for line in lines(folder)
    ]


def test_run_writes_expected_checkpoints_metrics_and_adapters(
    model: Path, whole: tuple[Path, Any, Any, Any]
) -> None:
    folder, trainer, built, outcome = whole
    steps = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    assert steps == [4, 5], "every second step and the last, two kept"
    written = lines(folder)
    train = [line for line in written if "loss" in line]
    assert [line["step"] for line in train] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in written if "eval_loss" in line] == [0, 3, 5]
    assert outcome.loss == train[-1]["loss"]
    assert outcome.eval_loss == written[-1]["eval_loss"]
    assert outcome.tokens_per_second > 0
    real = [int((training.batch(i)["segment_ids"] > 0).sum()) for i in (0, 1)]
    assert train[0]["tokens"] == sum(real)
    assert np.allclose([line["learning_rate"] for line in train], [1e-2 - i * 9e-3 / 8 for i in range(5)])
    for name in ("grad_norm", "tokens_per_second", "step_seconds", "peak_memory_bytes"):
        assert all(line[name] > 0 for line in train), name

    saved = restore_tree(str(folder / "5" / "model_params"))
    found = training.adapters(built)
    assert saved.keys() == found.keys()
    for path, array in saved.items():
        assert np.array_equal(array, found[path]), path

    fresh = training.build(model, MESH)[1]
    before = dict(nnx.state(fresh.model, lambda _, v: type(v) is nnx.Param).flat_state())
    after = dict(nnx.state(built.model, lambda _, v: type(v) is nnx.Param).flat_state())
    for path, variable in after.items():
        assert np.array_equal(variable.get_raw_value(), before[path].get_raw_value()), path
    for adapter in built.adapters:
        b = found[adapter.b_path]
        assert b.any(), adapter.b_path

    split = 0
    for path, variable in nnx.state(trainer.optimizer, nnx.optimizer.OptState).flat_state():
        if path[-1] == "kernel_lora_a" and path[-2] == "down_proj":
            assert tuple(variable.get_raw_value().sharding.spec) == ("tp", None)
            split += 1
    assert split == 3, "mu, nu and the accumulated gradient follow the adapter"


@pytest.mark.parametrize(
    ("losses", "norm", "what", "part"),
    [
        ([1.0, np.nan], np.nan, "loss", 1),
        ([-np.inf, 1.0], 1.0, "loss", 0),
        ([1.0, 1.0], np.inf, "norm", None),
    ],
)
def test_non_finite_step_is_reported_before_log_interval(
    tmp_path: Path, losses: list[float], norm: float, what: str, part: int | None
) -> None:
    metrics = Metrics(tmp_path, None, tensorboard=False)
    report = Report(0, 1000, 100, lambda step: 0.1, metrics)
    report.add(Numbers(1, [jnp.asarray(2.0), jnp.asarray(1.0)], jnp.asarray(1.0), 10, []))
    with pytest.raises(NotFinite) as caught:
        report.add(Numbers(2, [jnp.asarray(loss) for loss in losses], jnp.asarray(norm), 10, []))
    metrics.close()
    assert (caught.value.step, caught.value.part) == (2, part) and what in caught.value.what
    assert [line["step"] for line in lines(tmp_path)] == [1, 2], "the metrics hold it"
    assert lines(tmp_path)[0]["loss"] == 1.5


@pytest.mark.parametrize(
    ("part", "rows", "said"),
    [
        (None, 1, "micro-batches 8 to 11 hold a:8, a:8, a:9"),
        (None, 0, ", in micro-batches 8 to 11; kept"),
        (1, 1, "; micro-batch 9 holds a:9, a:9; kept"),
        (1, 0, ", in micro-batch 9; kept"),
    ],
)
def test_non_finite_step_names_its_micro_batches_and_rows(part: int | None, rows: int, said: str) -> None:
    origins = (lambda batch: [f"a:{batch}"] * 2) if rows else None
    assert said in NotFinite(3, "loss", np.nan, part).described(4, origins, "kept").message


def test_rows_not_divisible_by_mesh_are_refused() -> None:
    mesh = start_mesh(MeshSettings("cpu", 8, MESH))
    with pytest.raises(ValueError, match="6 rows"):
        shard_rows({"tokens": np.zeros((6, 4), np.int32)}, mesh)


def test_mesh_start_refuses_missing_or_mismatched_devices() -> None:
    with pytest.raises(UserError, match="16 CPU devices"):
        start_mesh(MeshSettings("cpu", 16, {"fsdp": 16}))
    with pytest.raises(UserError, match="need 4 devices"):
        start_mesh(MeshSettings("cpu", 8, {"fsdp": 4}))
    with pytest.raises(UserError, match="no TPU on this machine"):
        start_mesh(MeshSettings("tpu", 8, {"fsdp": 8}))
    assert start_mesh(MeshSettings("cpu", 2, {"fsdp": 2, "tp": 1})).size == 2


def test_only_libtpus_complaint_about_an_absent_tpu_is_hidden(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """libtpu writes to the file descriptor, as this stand-in does."""
    devices = jax.devices()

    def loaded(platform: str) -> Any:
        os.write(2, b"libtpu: INVALID_ARGUMENT\n")
        if platform == "tpu":
            raise RuntimeError("No jellyfish device found.")
        return devices

    monkeypatch.setattr(jax, "devices", loaded)
    monkeypatch.setattr(sharding, "CHIPS", (str(tmp_path / "accel*"),))
    with pytest.raises(UserError, match="no TPU on this machine: No jellyfish"):
        start_mesh(MeshSettings("tpu", 8, {"fsdp": 8}))
    assert capfd.readouterr().err == ""
    start_mesh(MeshSettings("cpu", 8, {"fsdp": 8}))
    assert capfd.readouterr().err == "libtpu: INVALID_ARGUMENT\n"
    (tmp_path / "accel0").touch()
    with pytest.raises(UserError, match="no TPU on this machine: No jellyfish"):
        start_mesh(MeshSettings("tpu", 8, {"fsdp": 8}))
    assert capfd.readouterr().err == "libtpu: INVALID_ARGUMENT\n", "a chip is there: every message counts"
