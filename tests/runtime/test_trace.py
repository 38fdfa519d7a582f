"""Tests of the output of `--trace`: the run's gradients and losses, without a change of the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from recipec.compiler.parity.compare import read_trace
from recipec.runtime.checkpoints.trained_weights import restore_tree
from recipec.runtime.errors import UserError
from recipec.runtime.model.adapters import LoraSettings
from recipec.runtime.model.initial import initial_adapters
from recipec.runtime.settings import ModelSettings
from recipec.runtime.training.recorder import Recorder
from recipec.runtime.training.step import Step
from recipec.runtime.training.trace import ROWS, Trace, check_writable, count_targets
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny
from tests.docs.blocks import blocks
from tests.runtime import training

pytestmark = pytest.mark.usefixtures("compiled_once")
"""Runs with and without a trace are the same program."""

MESH = {"fsdp": 8, "tp": 1}
RATE, CLIP = 0.5, 0.1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3") / "model"
    # With as many key/value heads as heads, Q, K and V are one weight.
    tiny.make_gemma3(folder, num_key_value_heads=8, num_hidden_layers=1)
    return folder


def run(model: Path, folder: Path, traced: bool, **options: Any) -> tuple[Trace | None, Any]:
    """Run two steps of two micro-batches with clipped SGD, and return the trace and the trained model."""
    base = HFCheckpoint.open(model)
    with jax.default_matmul_precision("highest"):
        mesh, built = training.build(model, MESH, remat="none", **options)
        settings = ModelSettings(id=str(model), family=base.family.name, dtype="float32")
        recorder = Recorder(built, base, settings, 2, "two-steps") if traced else None
        chain = optax.chain(optax.clip_by_global_norm(CLIP), optax.sgd(RATE))
        with mesh:
            trainer = training.trainer(built, mesh, folder, chain, recorder=recorder, every_steps=1)
            training.fit(trainer, folder, 2, lambda step: RATE)
    return (recorder.end(trainer.model) if recorder else None), trainer.model


@pytest.fixture(scope="module")
def traced(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Any]:
    """Return a run's trace, and the trained model."""
    trace, trained = run(model, tmp_path_factory.mktemp("traced"), True)
    assert trace is not None
    return trace, trained


def compiled_steps() -> set[str]:
    """Return the cache keys of the training steps that jax has compiled."""
    return {path.name for path in Path(jax.config.jax_compilation_cache_dir).glob("jit__train-*-cache")}


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_trace_records_unclipped_gradients_without_changing_run(
    model: Path, traced: tuple[Trace, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, trained = traced
    steps = compiled_steps()
    assert len(steps) == 1
    with monkeypatch.context() as without:
        without.setattr(Step, "jit_gradients", None)
        _, plain = run(model, tmp_path / "plain", False)
    assert compiled_steps() == steps, "the step is one program, traced or not"
    left, right = training.arrays(trained), training.arrays(plain)
    assert left.keys() == right.keys() and all((left[path] == right[path]).all() for path in left)
    logged = metrics(tmp_path / "plain")
    assert trace.losses == [line["loss"] for line in logged]
    assert trace.targets == [
        sum(count_targets(training.batch(2 * step + i, 2)) for i in (0, 1)) for step in (0, 1)
    ]
    assert trace.about["dtype"] == "float32" and trace.about["first_step"] == 1

    # The gradients are the whole step's: they have the logged norm, and give the run's first update.
    norm = np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in trace.gradients.values()))
    assert norm == pytest.approx(logged[0]["grad_norm"], rel=1e-5) and norm > 2 * CLIP
    first = restore_tree(str(tmp_path / "plain" / "1" / "model_params"))
    _, start = training.build(model, MESH, remat="none")
    for adapter in start.adapters:
        begun = training.adapters(start)
        pairs = [adapter.to_peft(arrays[adapter.a_path], arrays[adapter.b_path]) for arrays in (begun, first)]
        for letter, before, after in zip("AB", *pairs, strict=True):
            expected = before - RATE * CLIP / norm * trace.gradients[f"{adapter.name}.lora_{letter}"]
            assert expected.shape == after.shape
            np.testing.assert_allclose(after, expected, atol=1e-6)
    assert trace.trained.keys() == trace.gradients.keys()
    assert "layers.0.self_attn.k_proj.lora_B" in trace.trained


def test_documented_example_reproduces_first_step_of_trace(
    model: Path,
    traced: tuple[Trace, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Compute a loss and gradients in transformers and PEFT from only the rows and the first adapters."""
    made, _ = traced
    made.write(tmp_path / "trace.npz")
    trace = read_trace(tmp_path / "trace.npz")
    np.testing.assert_equal(trace.rows, made.rows)
    for step, rows in enumerate(trace.rows):
        batches = [training.batch(2 * step + i, 2) for i in (0, 1)]
        np.testing.assert_equal(rows, {name: np.stack([b[name] for b in batches]) for name in ROWS})
    _, start = training.build(model, MESH, remat="none")
    lora = LoraSettings(rank=4, alpha=8.0, targets=training.TARGETS, dropout=0.0)
    pairs = initial_adapters(start.adapters, lora, 0)
    begun = {
        f"{name}.lora_{x}": one for name, pair in pairs.items() for x, one in zip("AB", pair, strict=True)
    }
    np.testing.assert_equal(trace.initial, begun)

    (tmp_path / "model").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "traces.md"
    (example,) = (block.text for block in blocks(page) if "test_trace.py" in block.remark)
    found: dict[str, Any] = {}
    exec(compile(example, str(page), "exec"), found)
    printed = capsys.readouterr().out
    assert printed.startswith("loss ")
    assert found["adapters"].keys() == trace.initial.keys()
    assert found["apart"] < 1e-4 and found["furthest"] < 1e-5, printed
    assert max(np.abs(array).max() for array in trace.gradients.values()) > 1e-3


@pytest.mark.e2e
def test_full_fine_tuning_trace_uses_checkpoint_tensor_names(model: Path, tmp_path: Path) -> None:
    trace, _ = run(model, tmp_path / "run", True, full=True)
    assert trace is not None
    assert trace.initial == {} and len(trace.rows) == 2
    base = HFCheckpoint.open(model)
    norm = metrics(tmp_path / "run")[0]["grad_norm"]
    assert trace.gradients.keys() == trace.trained.keys() == set(base.tensors)
    assert all(trace.gradients[name].shape == base.tensors[name].shape for name in base.tensors)
    assert norm == pytest.approx(
        np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in trace.gradients.values())), rel=1e-5
    )


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.write_text("step 1: loss 3.2"), "is not a trace (not an .npz file)"),
        (lambda path: np.savez(path, losses=np.zeros(3)), "is not a trace"),
        (
            lambda path: np.savez(path, head=np.frombuffer(b'{"version": 9}', np.uint8)),
            "a trace of version 9",
        ),
        (
            lambda path: damage(path, lambda whole: whole.replace(b"\x00\x00\x80?", b"\x00\x00\x00@")),
            "is damaged",
        ),
    ],
)
def test_invalid_trace_file_is_refused(tmp_path: Path, write: Callable[[Path], Any], message: str) -> None:
    path = tmp_path / "trace.npz"
    write(path)
    with pytest.raises(UserError) as caught:
        read_trace(path)
    assert caught.value.message.startswith(f"{path}: ")
    assert message in caught.value.message and "\n" not in caught.value.message
    assert caught.value.help


def damage(path: Path, change: Callable[[bytes], bytes]) -> None:
    ones = {"layers.0.mlp.up_proj.lora_A": np.ones((4, 64), np.float32)}
    Trace("trl", "name", losses=[1.0], targets=[3], gradients=ones, trained=ones).write(path)
    assert read_trace(path).trained.keys() == ones.keys()
    whole = path.read_bytes()
    assert change(whole) != whole
    path.write_bytes(change(whole))


def test_check_writable_refuses_unwritable_trace_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="is a folder"):
        check_writable(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"File exists|Not a directory"):
        check_writable(tmp_path / "file" / "trace.npz")
    check_writable(tmp_path / "new" / "trace.npz")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(UserError, match=r"new cannot be written"):
        check_writable(tmp_path / "new" / "trace.npz")
    assert (tmp_path / "new").is_dir()


def test_count_targets_counts_only_within_segments() -> None:
    batch = {
        "segment_ids": np.array([[1, 1, 1, 2, 2, 0]]),
        "loss_mask": np.array([[True, False, True, True, True, True]]),
    }
    assert count_targets(batch) == 2
