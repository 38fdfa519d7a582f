"""Tests of the decoder against Tunix's own Gemma 2, 3 and 4: logits, LoRA steps and merged weights.

Tunix's loaders fill its models from the same files, and Qwix gives them LoRA. tests/tunix_models.py says what
the loaders do not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file
from tunix.sft.metrics_logger import Mode
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

from recipec.runtime.checkpoints.trained_weights import load_trained
from recipec.runtime.merging import merge
from recipec.runtime.sections import Log
from recipec.runtime.settings import ModelSettings
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny, tunix_models
from tests.runtime import training
from tests.runtime.references import CLIP, losses, split
from tests.runtime.runs import lora_section, save_run, write_lock

pytestmark = pytest.mark.usefixtures("highest")

LENGTH, STEPS = 21, 20
RANK, ALPHA = 3, 5.0
AXES = {"fsdp": 2, "tp": 2}
ALTERNATING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
}
MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "gemma2": (tiny.make_gemma2, {"query_pre_attn_scalar": 16, "num_hidden_layers": 3}),
    "gemma3": (tiny.make_gemma3, {}),
    "gemma3, scaled as the 27B": (
        tiny.make_gemma3,
        {
            "query_pre_attn_scalar": 8,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 2_000.0, "factor": 8.0},
            },
        },
    ),
    "gemma4, keys as values": (tiny.make_gemma4, ALTERNATING),
    "gemma4, inputs of each layer": (
        tiny.make_gemma4,
        {**ALTERNATING, "attention_k_eq_v": False, "hidden_size_per_layer_input": 16},
    ),
}


def write(name: str, folder: Path) -> HFCheckpoint:
    """Write a tiny checkpoint and return it."""
    make, fields = MODELS[name]
    make(folder, **fields)
    return HFCheckpoint.open(folder)


@pytest.mark.parametrize(
    "name", [name if name == "gemma3" else pytest.param(name, marks=pytest.mark.e2e) for name in MODELS]
)
def test_logits_match_tunix(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Compare float32 logits; they may differ by 1e-5 of the largest, which is the order of the sums."""
    a = write(name, tmp_path / "base").architecture
    tokens = np.random.default_rng(0).integers(5, a.vocab_size - 8, (2, LENGTH)).astype(np.int32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))
    causal = np.tile(np.tril(np.ones((LENGTH, LENGTH), bool)), (2, 1, 1))

    tunix = tunix_models.load(tmp_path / "base", a)
    expected = np.asarray(nnx.jit(lambda model: model(tokens, positions, None, causal)[0])(tunix))

    mesh, built = training.build(tmp_path / "base", {"fsdp": 1}, full=True)
    rows = {"tokens": tokens, "positions": positions, "segment_ids": np.ones_like(tokens)}
    logits = training.logits(built, mesh, rows)
    difference, size = np.abs(logits - expected).max(), np.abs(expected).max()
    print(f"\n{name}: logits differ by {difference:.1e} of {size:.1f}")
    record_property("logits", float(difference / size))
    assert size > 10, "logits are not flat"
    assert difference <= 1e-5 * size


@dataclass(frozen=True)
class Merged:
    """Two merges of a base.

    Attributes:
        adapted: the names of the tensors that Tunix changed.
        apart: the largest difference between the merges; moved is that from the base.
    """

    adapted: set[str]
    apart: float
    moved: float


def both_merges(folder: Path, base: HFCheckpoint, model: Any) -> Merged:
    """Merge run/ into base/ by merge.py, and the LoRA of Tunix's model by Tunix, and compare all tensors."""
    settings = ModelSettings(id=str(folder / "base"), family=base.family.name)
    assert merge.main(folder, settings, checkpoint="run", output="merged", dtype="float32", argv=[]) == 0
    tunix_models.merge(folder / "base", base.architecture, folder / "tunix", model, RANK, ALPHA)
    before, ours, expected = (
        load_file(folder / name / "model.safetensors") for name in ("base", "merged", "tunix")
    )
    assert ours.keys() == expected.keys() == before.keys()
    moved = {name: float(np.abs(tensor - before[name]).max()) for name, tensor in expected.items()}
    adapted = {name for name, distance in moved.items() if distance}
    assert all(np.array_equal(ours[name], before[name]) for name in before.keys() - adapted)
    apart = max(float(np.abs(ours[name] - expected[name]).max()) for name in adapted)
    return Merged(adapted, apart, max(moved.values()))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gemma3", "gemma4, keys as values"])
def test_merged_weights_match_tunix(name: str, tmp_path: Path) -> None:
    """Merge the same random adapters; each weight may differ by 1e-6."""
    base = write(name, tmp_path / "base")
    save_run(tmp_path / "run", base, lora_section(rank=RANK, alpha=ALPHA, kv="shared"))
    pairs = load_trained(tmp_path / "run", "latest", base).deltas()
    model = tunix_models.add_lora(tunix_models.load(tmp_path / "base", base.architecture), RANK, ALPHA)
    tunix_models.set_adapters(model, {delta: (pair.a, pair.b) for delta, pair in pairs.items()})
    merged = both_merges(tmp_path, base, model)
    print(f"\n{name}: merged weights differ by {merged.apart:.1e}, and by {merged.moved:.1f} from the base")
    assert len(merged.adapted) == len(pairs)
    assert merged.apart <= 1e-6 and merged.moved > 0.1


def tunix_steps(model: Any, optimizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Train the LoRA of Tunix's model by its trainer and loss; return losses and gradient norms by step."""

    def inputs(batch: dict[str, Any]) -> dict[str, Any]:
        length = batch["tokens"].shape[1]
        causal = jnp.tril(jnp.ones((length, length), bool))
        return {
            "input_tokens": batch["tokens"],
            "input_mask": batch["loss_mask"],
            "positions": batch["positions"],
            "attention_mask": causal & (batch["segment_ids"] > 0)[:, None],
        }

    trainer = PeftTrainer(model, optimizer, TrainingConfig(eval_every_n_steps=STEPS))
    trainer.with_gen_model_input_fn(inputs).train([training.batch(step) for step in range(STEPS)])
    loss, norm = (
        trainer.metrics_logger.get_metric_history("", name, Mode.TRAIN) for name in ("loss", "grad_norm")
    )
    return loss, norm


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gemma2", marks=pytest.mark.nightly),
        pytest.param("gemma3, scaled as the 27B", marks=pytest.mark.e2e),
        pytest.param("gemma4, keys as values", marks=pytest.mark.nightly),
    ],
)
def test_twenty_lora_steps_match_tunix(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Train every projection, as Qwix adapts it, from the same adapters, and merge both results.

    A step's loss may differ by 1e-5 of the largest, and a gradient norm by 1e-4 of itself. Merged weights may
    differ by 0.5 % of their change. Adapters may differ by 2 %, because Adam amplifies the noise of small
    gradients.
    """
    base = write(name, tmp_path / "base")
    schedule = optax.linear_schedule(1e-3, 1e-4, STEPS)
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(schedule, weight_decay=0.01))

    run = tmp_path / "run"
    mesh, built = training.build(tmp_path / "base", AXES, seed=3, rank=RANK, alpha=ALPHA, kv="shared")
    start = split(built)
    with mesh:
        trainer = training.trainer(built, mesh, run, optimizer, 1, log=Log(every=STEPS), every_steps=STEPS)
        training.fit(trainer, run, STEPS, schedule, 1)
    logged, ours = losses(run), split(built)
    write_lock(run, base, lora_section(rank=RANK, alpha=ALPHA, kv="shared", dropout=0.0), AXES)

    model = tunix_models.add_lora(tunix_models.load(tmp_path / "base", base.architecture), RANK, ALPHA)
    tunix_models.set_adapters(model, start)
    loss, norm = tunix_steps(model, optimizer)
    expected = tunix_models.adapters(model)

    loss_apart = float(np.abs(logged["loss"] - loss).max())
    norm_apart = float(np.abs(logged["grad_norm"] / norm - 1).max())
    apart, moved = (distance(expected, pairs) for pairs in (ours, start))
    merged = both_merges(tmp_path, base, model)
    print(
        f"\n{name}: losses differ by {loss_apart:.1e} of {loss.max():.1f}, "
        f"gradient norms by {norm_apart:.1e}, adapters by {apart:.1e}, which moved by {moved:.1e}, "
        f"merged weights by {merged.apart:.1e}, which moved by {merged.moved:.1e}"
    )
    record_property("losses", float(loss_apart / loss.max()))
    assert len(loss) == len(norm) == STEPS and norm.max() > CLIP, "clipping takes part"
    assert loss_apart <= 1e-5 * loss.max() and norm_apart <= 1e-4
    assert apart <= 0.02 * moved and moved > 5e-3
    assert len(merged.adapted) == len(start)
    assert merged.apart <= 0.005 * merged.moved


def distance(one: tunix_models.Pairs, other: tunix_models.Pairs) -> float:
    """Return the largest difference between adapters."""
    assert one.keys() == other.keys()
    pairs = (pair for name in one for pair in zip(one[name], other[name], strict=True))
    return max(float(np.abs(left - right).max()) for left, right in pairs)
