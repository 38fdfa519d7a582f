"""Tests of preference losses against TRL's trainers with PEFT, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from transformers import AutoTokenizer

from recipec.compiler.miniature.small_checkpoint import write_tokenizer
from recipec.runtime.data.prepare import prepare
from recipec.runtime.model.sharding import shard_rows
from recipec.runtime.settings import DataSettings, TrainSettings
from recipec.runtime.training.objective_losses import micro_batch_loss
from tests import tiny
from tests.runtime import training
from tests.runtime.built_models import randomize
from tests.runtime.preferred import BETA, PAIRS, SMOOTHING, collated, trainer_of
from tests.runtime.references import split

MESH = {"fsdp": 4, "tp": 2}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Make a folder, transformers' model and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny") / "llama"
    model = tiny.make_llama(folder, vocab_size=512)
    write_tokenizer(folder, "llama")
    return folder, model, AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def built(checkpoint: tuple[Path, Any, Any]) -> tuple[Any, Any]:
    """Build our model on a mesh, with nonzero adapters."""
    with jax.default_matmul_precision("highest"):
        mesh, built = training.build(checkpoint[0], MESH, remat="none")
        randomize(built)
    return mesh, built


def trl_trainer(
    objective: str, checkpoint: tuple[Path, Any, Any], built: Any, folder: Path, **settings: Any
) -> Any:
    """Return TRL's trainer of the same model with the same adapters."""
    import peft

    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=list(training.TARGETS), task_type="CAUSAL_LM"
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint[0], dtype=torch.float32)
    trainer = trainer_of(objective, peft.get_peft_model(base, config), checkpoint[2], folder, **settings)
    weights = {
        name[name.index("layers.") :].removesuffix(".default.weight"): parameter
        for name, parameter in trainer.model.named_parameters()
        if "lora_" in name
    }
    with torch.no_grad():
        for name, pair in split(built).items():
            for letter, value in zip("AB", pair, strict=True):
                weights[f"{name}.lora_{letter}"].copy_(torch.tensor(value))
    return trainer


def settings_of(objective: str, **settings: Any) -> Any:
    how = {"beta": BETA, **settings}
    return TrainSettings(steps=1, global_batch_size=1, micro_batch_size=1, objective=objective, **how)


def differentiated(built: Any, settings: Any) -> tuple[Any, Any]:
    """Return a batch's loss, metrics and gradient as a function, and the state that it takes."""
    graph, state = nnx.split(built.model)

    @jax.jit
    def step(state: Any, inputs: Any) -> Any:
        def loss(model: Any) -> Any:
            return micro_batch_loss(built, settings, model, inputs)

        wanted = nnx.DiffState(0, nnx.LoRAParam)
        return nnx.value_and_grad(loss, argnums=wanted, has_aux=True)(nnx.merge(graph, state))

    return step, state


def ours(mesh: Any, built: Any, batch: dict[str, Any], objective: str, **settings: Any) -> Any:
    """Return the loss, its metrics, and the gradients of each projection's A and B."""
    step, state = differentiated(built, settings_of(objective, **settings))
    with mesh, jax.default_matmul_precision("highest"):
        (value, metrics), gradient = step(state, shard_rows(batch, mesh))
    found = {name: float(number) for name, number in metrics.items()}
    arrays = {
        ".".join(map(str, path)): np.asarray(variable.get_raw_value())
        for path, variable in gradient.flat_state()
    }
    by_name = {}
    for adapter in built.adapters:
        by_name[adapter.name] = adapter.to_peft(arrays[adapter.a_path], arrays[adapter.b_path])
    return float(value), found, by_name


@pytest.mark.parametrize(
    ("objective", "settings"),
    [
        ("dpo", {}),
        ("cpo", {"loss_type": "simpo", "simpo_gamma": 0.4, "label_smoothing": SMOOTHING, "cpo_alpha": 0.7}),
        ("orpo", {}),
    ],
    ids=["dpo", "cpo-simpo", "orpo"],
)
def test_preference_loss_and_gradient_match_trl(
    objective: str,
    settings: dict[str, Any],
    checkpoint: tuple[Path, Any, Any],
    built: tuple[Any, Any],
    tmp_path: Path,
) -> None:
    mesh, ours_built = built
    trainer = trl_trainer(objective, checkpoint, ours_built, tmp_path, **settings)
    inputs, batch = collated(trainer)
    assert batch["loss_mask"][: 2 * len(PAIRS)].any(1).all()
    trainer.model.train()
    expected = trainer.compute_loss(trainer.model, inputs)
    expected.backward()
    gradients = {
        name[name.index("layers.") :].removesuffix(".default.weight"): parameter.grad.numpy()
        for name, parameter in trainer.model.named_parameters()
        if parameter.grad is not None
    }
    value, metrics, found = ours(mesh, ours_built, batch, objective, **settings)
    difference = max(
        np.abs(found[name.rpartition(".lora_")[0]]["AB".index(name[-1])] - gradient).max()
        for name, gradient in gradients.items()
    )
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    print(
        f"\n{objective}: loss differs by {abs(value - float(expected)):.1e} of {float(expected):.2f}, "
        f"gradients by {difference:.1e} of {largest:.1f}"
    )
    assert len(gradients) == 2 * len(found)
    assert abs(value - float(expected)) <= 1e-4
    assert difference <= 1e-4 * max(1.0, largest)
    logged = (trainer._metrics if objective == "dpo" else trainer._stored_metrics)["train"]
    assert metrics["rewards_accuracy"] == pytest.approx(np.mean(logged["rewards/accuracies"]))
    assert metrics["rewards_margin"] == pytest.approx(np.mean(logged["rewards/margins"]), abs=1e-3)


def write_pairs(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepared(folder: Path, tokenizer: Any, **options: Any) -> Any:
    data = DataSettings(
        train=("pairs.jsonl",),
        max_length=options.pop("max_length", 64),
        format="preference",
        loss_on="completion",
        max_invalid_ratio=1.0,
        shuffle_seed=None,
        packing=False,
    )
    train = TrainSettings(epochs=1, global_batch_size=4, micro_batch_size=1, objective="dpo")
    return prepare(data, train, 4, tokenizer, folder, vocabulary=512)


def test_pair_tokenization_matches_trl(
    checkpoint: tuple[Path, Any, Any], built: tuple[Any, Any], tmp_path: Path
) -> None:
    write_pairs(tmp_path, PAIRS)
    found = prepared(tmp_path, checkpoint[2]).micro_batch(0)
    trainer = trl_trainer("dpo", checkpoint, built[1], tmp_path)
    expected = {}
    for row in trainer.train_dataset:
        for kind in ("chosen", "rejected"):
            expected[tuple(row["prompt_ids"] + row[f"{kind}_ids"])] = len(row["prompt_ids"])
    assert found["tokens"].shape == (8, 64)
    assert float(found["norm"]) == 4
    for i, row in enumerate(found["tokens"]):
        ids = tuple(row[found["segment_ids"][i] > 0].tolist())
        assert expected[ids] == int(found["loss_mask"][i].argmax()), "the completion begins where TRL's does"
        assert found["loss_mask"][i].sum() == len(ids) - expected[ids]


def test_overlong_pair_is_dropped_whole_and_reported_once(
    checkpoint: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    long = {"prompt": "Name a river.", "chosen": " Rhine.", "rejected": " and on" * 100}
    write_pairs(tmp_path, [PAIRS[0], long, PAIRS[1], PAIRS[2]])
    whole = prepared(tmp_path, checkpoint[2])
    report = whole.report.train
    assert (report.read, report.kept, report.overlong.count) == (4, 3, 1)
    assert report.overlong.first[0].origin == "pairs.jsonl:2"
    assert whole.total_steps == 1
    batch = whole.micro_batch(0)
    assert (batch["segment_ids"].any(1)).tolist() == [True] * 6 + [False] * 2
    assert float(batch["norm"]) == 3
    assert whole.origins(0) == [f"pairs.jsonl:{line}" for line in (1, 1, 3, 3, 4, 4)]
