"""Tests of Muon against singular values, and in a model against transformers' parameters."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipec.compiler.lowering.optimization import matrices
from recipec.runtime.checkpoints.full import hugging_face
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny
from tests.runtime import decoders, training
from tests.runtime.references import torch_loss

RATE, DECAY, STEPS = 1e-3, 0.1, 4
MODELS = {
    "gemma3": functools.partial(tiny.make_gemma3, num_hidden_layers=1),
    "phi3": functools.partial(decoders.make, "phi3"),
    "starcoder2": functools.partial(decoders.make, "starcoder2", num_hidden_layers=1),
}


def orthogonal(gradients: np.ndarray) -> np.ndarray:
    """Return a matrix whose singular values are those of five Newton-Schulz steps, for an RMS of 0.2."""
    u, s, v = np.linalg.svd(gradients.astype(np.float64), full_matrices=False)
    s = s / (np.sqrt((s**2).sum()) + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v * 0.2 * np.sqrt(max(gradients.shape))


class Reference:
    """LLaMA-Factory's rule for torch's parameters, by singular values."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}
        self.steps = 0

    def step(self, weights: dict[str, Any], rate: float) -> None:
        self.steps += 1
        for name, weight in weights.items():
            g = weight.grad.numpy().astype(np.float64)
            if weight.ndim == 2 and "embed" not in name and "lm_head" not in name:
                buffer = self.sums[name] = self.sums.get(name, 0.0) * 0.95 + g
                update = orthogonal(g + 0.95 * buffer)
            else:
                first, second = self.sums.get(name, (0.0, 0.0))
                first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
                self.sums[name] = first, second
                corrected = np.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
                update = first / (1e-8 + np.sqrt(second)) * corrected
            weight.data.mul_(1 - rate * DECAY)
            weight.data.sub_(weight.data.new_tensor(rate * update))


def rule(axes: Any, dtype: str = "float32") -> Any:
    import optax

    from recipec.runtime.training.muon import scale_by_muon

    return optax.chain(
        scale_by_muon(axes, 0.95, 0.9, 0.999, 1e-8, dtype=dtype),
        optax.add_decayed_weights(DECAY),
        optax.scale_by_learning_rate(lambda step: RATE / (1 + step)),
    )


def train_torch(model: Any) -> dict[str, np.ndarray]:
    """Train transformers' model, and return its parameters by name."""
    weights, reference = dict(model.named_parameters()), Reference()
    for step in range(STEPS):
        model.zero_grad()
        torch_loss(model, training.batch(step)).backward()
        reference.step(weights, RATE / (1 + step))
    return {name: weight.detach().numpy() for name, weight in weights.items()}


def test_muon_matrix_axes_match_hugging_face_shapes() -> None:
    """Check the axes of each array of the catalog's models against the shapes in Hugging Face's layout.

    Models of one config.json are one case, of which each kind of layer is checked once.
    """
    import json
    import math
    import re

    from recipec.compiler.lowering import catalog
    from recipec.compiler.lowering.fewer_layers import pattern, with_layers
    from recipec.runtime.model.families import family_of

    entries = {id: entry["config"] for id, entry in catalog.entries().items() if "unsupported" not in entry}
    distinct = {json.dumps(config, sort_keys=True): id for id, config in entries.items()}
    assert len(distinct) > 100
    for id in distinct.values():
        config, family = entries[id], family_of(entries[id])
        parameters = family.parameters(family.architecture(with_layers(config, pattern(config))))
        axes = matrices(parameters)
        for parameter in parameters:
            found = axes.get(re.sub(r"\.\d+\.", ".*.", parameter.path))
            for source in parameter.sources:
                turned = len(source.shape) == 2 and not re.search("embed|lm_head", source.name)
                assert (found is not None) == turned, (id, source.name)
                if found is not None:
                    sides = [math.prod(parameter.shape[axis] for axis in some) for some in found]
                    assert (sides[1], sides[0]) == source.shape, (id, source.name)


@pytest.mark.parametrize(
    "name", ["gemma3", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("phi3", "starcoder2"))]
)
def test_muon_steps_match_torch_reference(name: str, tmp_path: Path) -> None:
    """Cover stacked keys and values, Hugging Face's fused projections, and biases."""
    import jax

    model = MODELS[name](tmp_path / "base")
    base = HFCheckpoint.open(tmp_path / "base")
    parameters = base.family.parameters(base.architecture)
    before = {name: weight.detach().numpy().copy() for name, weight in model.named_parameters()}
    with jax.default_matmul_precision("highest"):
        mesh, built = training.build(tmp_path / "base", {"fsdp": 4, "tp": 2}, full=True)
        with mesh:
            chain = rule(matrices(parameters))
            trainer = training.trainer(built, mesh, tmp_path / "run", chain, 1, every_steps=STEPS)
            training.fit(trainer, tmp_path / "run", STEPS, lambda step: RATE, 1)
    arrays, expected = training.weights(built), train_torch(model)
    worst = []
    for parameter in (one for one in parameters if one.trainable):
        for number, source in enumerate(parameter.sources):
            found = hugging_face(arrays[parameter.path][parameter.place(number)], source)
            named = source.full_name(base.prefix)
            moved = np.abs(expected[named] - before[named]).max()
            worst.append((np.abs(found - expected[named]).max() / moved, named))
            assert moved > RATE / 10
    print(f"\n{name}: {max(worst)}")
    assert max(worst)[0] <= 1e-2
