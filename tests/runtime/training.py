"""Helpers of the training tests: synthetic batches, and trainers on small meshes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from flax import nnx

from recipec.runtime.checkpoints.first_adapters import INITIAL
from recipec.runtime.checkpoints.resuming import ResumePoint
from recipec.runtime.data.batches import TrainingData
from recipec.runtime.hosts.single import SINGLE
from recipec.runtime.interrupts import Interrupts
from recipec.runtime.metrics.loggers import Metrics
from recipec.runtime.model.adapters import LoraSettings
from recipec.runtime.model.loading import build as build_model
from recipec.runtime.model.sharding import shard_rows, start_mesh
from recipec.runtime.settings import CheckpointSettings, MeshSettings, ModelSettings, TrainSettings
from recipec.runtime.training.trainer import Checkpointing, Trainer
from recipec.runtime.weights.checkpoint import HFCheckpoint

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LENGTH = 16
ROWS = 8
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
"""Compiler options: an interpreted kernel takes far longer to compile than to run."""


def batch(index: int, accumulation: int = 1, seed: int = 0) -> dict[str, np.ndarray]:
    """Return micro-batch `index`: right-padded rows of random length, normalized over its window."""
    rows = _rows(index, seed)
    first = index - index % accumulation
    targets = sum(int(_rows(i, seed)[2].sum()) for i in range(first, first + accumulation))
    tokens, segment_ids, loss_mask = rows
    return {
        "tokens": tokens,
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
        "segment_ids": segment_ids,
        "loss_mask": loss_mask,
        "norm": np.asarray(targets / accumulation, np.float32),
        "index": np.asarray(index, np.int32),
    }


def _rows(index: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng([seed, index])
    # Below 500: the image and audio placeholders, which transformers replaces, are above.
    tokens = random.integers(3, 500, (ROWS, LENGTH)).astype(np.int32)
    lengths = random.integers(6, LENGTH + 1, ROWS)
    segment_ids = (np.arange(LENGTH)[None] < lengths[:, None]).astype(np.int32)
    prompts = random.integers(1, 5, ROWS)
    return (
        tokens * segment_ids,
        segment_ids,
        (segment_ids > 0) & (np.arange(LENGTH)[None] >= prompts[:, None]),
    )


def packed_batch() -> dict[str, np.ndarray]:
    """Return rows of two samples each, the second of random length."""
    random = np.random.default_rng(5)
    one = batch(0)
    cut = random.integers(4, 8, ROWS)
    place = np.arange(LENGTH)[None]
    second = place >= cut[:, None]
    one["segment_ids"] = np.where(second, 2, 1).astype(np.int32)
    one["positions"] = np.where(second, place - cut[:, None], place).astype(np.int32)
    one["tokens"] = random.integers(3, 500, (ROWS, LENGTH)).astype(np.int32)
    one["loss_mask"] = np.ones((ROWS, LENGTH), bool)
    one["norm"] = np.asarray(ROWS * (LENGTH - 2), np.float32)
    return one


def build(directory: Path, axes: Mapping[str, int], **options: Any) -> tuple[Any, Any]:
    """Build a checkpoint's model on a mesh of virtual devices, and return the mesh and the model.

    Args:
        options: dtype, quantization, quantized_matmul, remat, only, qat, rules, seed and vocab_size of the
            model; images for one with its vision tower; full for one without LoRA;
            its dtype as lora_dtype; and LoraSettings' other fields. If adapters start from the base's
            weights, also the folder of their initial values, which are computed if the folder has none.
    """
    base = HFCheckpoint.open(directory).grown(options.pop("vocab_size", None))
    if options.pop("images", False):
        base = base.seeing()
    mesh = start_mesh(MeshSettings("cpu", math.prod(axes.values()), axes))
    settings = ModelSettings(
        id=str(directory),
        family=base.family.name,
        dtype=options.pop("dtype", "float32"),
        quantization=options.pop("quantization", None),
        quantized_matmul=options.pop("quantized_matmul", None),
        remat=options.pop("remat", "decoder"),
        trainable_modules=options.pop("only", ()),
        qat=options.pop("qat", None),
    )
    rules, seed = options.pop("rules", ()), options.pop("seed", 0)
    kept = options.pop("kept", None)
    full = options.pop("full", False)
    kind = {"dtype": options.pop("lora_dtype", "float32")}
    lora = (
        None
        if full
        else LoraSettings(**{"dropout": 0.0, "rank": 4, "alpha": 8.0, "targets": TARGETS, **options, **kind})
    )
    if kept is not None:
        base, seed = first_values(base, settings, lora, kept, seed, axes)
    return mesh, build_model(base, settings, lora, mesh, rules, seed)


def start_from(mesh: Any, built: Any, base: Path, folder: Path, **found: Any) -> None:
    """Load the adapter that the model's settings name into the model, as train.py does.

    Args:
        folder: of the run's checkpoints.
        found: the state from which the run continues, as in ResumePoint.
    """

    from recipec.runtime.training.adapter_start import start_from as begin

    objective = found.pop("objective", "sft")
    session: Any = SimpleNamespace(
        arguments=SimpleNamespace(data_dir=base.parent),
        directory=str(folder),
        resumed=ResumePoint(**found),
        hosts=SINGLE,
        base=HFCheckpoint.open(base),
        mesh=mesh,
    )
    settings: Any = SimpleNamespace(
        lora=built.lora,
        train=TrainSettings(global_batch_size=1, micro_batch_size=1, objective=objective),
        model=SimpleNamespace(id=str(base), revision=None),
    )
    begin(session, built, settings)


def first_values(base: Any, settings: Any, lora: Any, kept: Path, seed: int, axes: Mapping[str, int]) -> Any:
    """Compute initial values with runtime.training.adapter_start as a run's session does."""

    from recipec.runtime.training.adapter_start import first_values as begin

    step = 1 if (kept / INITIAL).exists() else None
    session: Any = SimpleNamespace(
        base=base, directory=str(kept), hosts=SINGLE, resumed=SimpleNamespace(step=step)
    )
    run: Any = SimpleNamespace(
        model=settings, lora=lora, rules=(), mesh=SimpleNamespace(axes=axes), train=SimpleNamespace(seed=seed)
    )
    return begin(session, run)


def trainer(
    built: Any, mesh: Any, folder: Path, optimizer: Any, accumulation: int = 2, **options: Any
) -> Any:
    """Return a Trainer that saves into a folder. Create and use it within `with mesh:`."""
    every, recorder = options.pop("every_steps", 2), options.pop("recorder", None)
    settings = TrainSettings(steps=100, global_batch_size=ROWS * accumulation, micro_batch_size=1, **options)
    saving = Checkpointing(str(folder), CheckpointSettings(str(folder), every_steps=every, keep=2))
    return Trainer(built, optimizer, settings, mesh, accumulation, saving, recorder)


def fit(
    trainer: Any, folder: Path, until: int, schedule: Any, accumulation: int = 2, evaluate: bool = False
) -> Any:
    """Run a trainer on the synthetic batches up to a step; return its Outcome."""

    def batches(step: int) -> Iterator[dict[str, np.ndarray]]:
        index = step * accumulation
        while True:
            yield batch(index, accumulation)
            index += 1

    metrics = Metrics(folder, trainer.train_steps or None, tensorboard=False)
    try:
        data = TrainingData(batches, [batch(10_000)] if evaluate else [])
        return trainer.fit(data, until, schedule, metrics, Interrupts())
    finally:
        metrics.close()
        trainer.close()


def adapters(built: Any) -> dict[str, np.ndarray]:
    """Return the LoRA arrays of a model by path."""
    return {
        ".".join(map(str, path)): np.asarray(variable.get_raw_value())
        for path, variable in nnx.state(built.model, nnx.LoRAParam).flat_state()
    }


def weights(built: Any) -> dict[str, np.ndarray]:
    """Return the frozen arrays of a model by path."""
    frozen = nnx.state(built.model, lambda _, variable: type(variable) is nnx.Param)
    return {".".join(map(str, path)): np.asarray(one.get_raw_value()) for path, one in frozen.flat_state()}


def placed(module: Any) -> list[Any]:
    """Return all arrays of a model, with their placement on devices."""
    return [variable.get_raw_value() for _, variable in nnx.state(module).flat_state()]


def arrays(module: Any) -> dict[str, np.ndarray]:
    """Return all arrays of a model or of an optimizer by path."""
    return {
        ".".join(map(str, path)): np.asarray(variable.get_raw_value())
        for path, variable in nnx.state(module).flat_state()
    }


def logits(built: Any, mesh: Any, one: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return float32[B, T, V] of a batch."""

    @jax.jit
    def forward(state: Any, inputs: Any) -> Any:
        names = ("tokens", "positions", "segment_ids")
        forward = built.forward.of(inputs)
        return forward.logits(nnx.merge(graph, state), *(inputs[name] for name in names))

    graph, state = nnx.split(built.model)
    with mesh:
        return np.asarray(forward(state, shard_rows(dict(one), mesh)), np.float32)
