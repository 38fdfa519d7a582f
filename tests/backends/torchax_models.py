"""Small models under torchax on virtual devices, and the same models under torch with PEFT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import torch

from recipec.runtime.model.adapters import LoraSettings
from recipec.runtime.model.sharding import shard_rows
from recipec.runtime.settings import MeshSettings, ModelSettings, TrainSettings
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests.runtime.training import LENGTH, ROWS, TARGETS

RATE, DECAY = 1e-3, 0.01
TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass
class Torchax:
    """A checkpoint's model on a mesh.

    Attributes:
        arrays: the base's arrays.
        trained: adapters with a nonzero B, or all weights.
    """

    base: HFCheckpoint
    settings: ModelSettings
    lora: LoraSettings | None
    mesh: Any
    model: Any
    arrays: dict[str, Any]
    trained: dict[str, Any]
    _compiled: Any = None

    def step(self, optimizer: Any, accumulation: int = 1, seed: int = 0) -> Any:
        """Return a Step of the model. Create and use it within `with mesh:`."""
        from recipec.runtime.backends.torchax.torchax_step import Step

        train = TrainSettings(steps=100, global_batch_size=ROWS * accumulation, micro_batch_size=1, seed=seed)
        return Step(self.model, optimizer, train, accumulation, self.mesh)

    def gradients(self, batch: Mapping[str, np.ndarray]) -> tuple[float, dict[str, np.ndarray]]:
        """Return a micro-batch's training loss and its gradients."""
        with self.mesh:
            placed = shard_rows(dict(batch), self.mesh)
            if self._compiled is None:
                step = self.step(optax.sgd(1.0))
                # Let jax compile at the call, because an ahead-of-time program takes no four-bit arrays.
                self._compiled = jax.jit(step._differentiate, compiler_options=QUICK)
            (loss, _), found = self._compiled(self.trained, self.arrays, placed)
        return float(loss), {name: np.asarray(array) for name, array in found.items()}


QUICK = {"xla_backend_optimization_level": 0}
OF_MODEL = ("dtype", "quantization", "attention", "remat")
"""The options of `build` that are fields of ModelSettings."""


def compiled(function: Any, *arguments: Any) -> Any:
    """Compile a jitted function in half the time."""
    return function.lower(*arguments).compile(compiler_options=QUICK)


def build(directory: Path, axes: Mapping[str, int], **options: Any) -> Torchax:
    """Build a checkpoint's model on a mesh of 8 virtual devices.

    Args:
        options: OF_MODEL and rules; full for a model without LoRA; and LoraSettings' fields.
    """
    from recipec.runtime.backends.torchax import hf_model as models
    from recipec.runtime.model.sharding import start_mesh

    base = HFCheckpoint.open(directory)
    settings = ModelSettings(
        id=str(directory),
        family=base.family.name,
        **{"dtype": "float32", "remat": "none"}
        | {name: options.pop(name) for name in OF_MODEL if name in options},
    )
    rules, full = options.pop("rules", ()), options.pop("full", False)
    lora = (
        None
        if full
        else LoraSettings(**{"dropout": 0.0, "rank": 4, "alpha": 8.0, "targets": TARGETS, **options})
    )
    mesh = start_mesh(MeshSettings("cpu", 8, axes))
    with mesh:
        model = models.abstract_model(base.config, settings, lora, mesh, rules, base.architecture)
        arrays = models.load_base(model, base)
        trained = (
            models.load_trained(model, base)
            if lora is None
            else models.place_trained(model, start_values(base, lora))
        )
    return Torchax(base, settings, lora, mesh, model, arrays, trained)


def start_values(base: HFCheckpoint, lora: LoraSettings) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return a recipe's initial adapters with a random B. With its zero B, A would have no gradient."""
    from recipec.runtime.backends.peft_model import start

    random = np.random.default_rng(0)
    return {
        name: (a, (0.1 * random.standard_normal(b.shape)).astype(np.float32))
        for name, (a, b) in start(base, lora, seed=0).items()
    }


def reference(built: Torchax) -> Any:
    """Return transformers' model of the checkpoint, with PEFT's adapters of the same values."""
    from recipec.runtime.backends.peft_model import attach, load_model, set_adapters

    assert built.lora is not None
    peft_model = attach(load_model(built.base, built.settings), built.base, built.settings, built.lora)
    set_adapters(peft_model, built.base, start_values(built.base, built.lora))
    return peft_model.eval()


def torch_loss(model: Any, batch: Mapping[str, np.ndarray]) -> Any:
    """Return a micro-batch's loss with transformers' own masks: summed over targets, divided by `norm`."""
    tokens, positions, segments = (
        torch.tensor(np.asarray(batch[name], np.int64)) for name in ("tokens", "positions", "segment_ids")
    )
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits.float()
    nll = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    ).view(len(tokens), -1)
    counted = torch.tensor(batch["loss_mask"])[:, 1:] & (segments[:, 1:] == segments[:, :-1])
    return (nll * counted).sum() / float(batch["norm"])


def torch_gradients(model: Any, batch: Mapping[str, np.ndarray], base: HFCheckpoint) -> tuple[float, Any]:
    """Return the loss and the adapters' gradients, by a trace's names."""
    from recipec.runtime.backends.peft_model import adapter_parameters

    model.zero_grad()
    loss = torch_loss(model, batch)
    loss.backward()
    found = adapter_parameters(model, base).items()
    return loss.item(), {name: parameter.grad.numpy() for name, parameter in found}


def packed_batch(padding: int = 3) -> dict[str, np.ndarray]:
    """Return rows of two samples, the second of random length, with padding at the end."""
    random = np.random.default_rng(5)
    place = np.arange(LENGTH)[None]
    cut = random.integers(4, 8, (ROWS, 1))
    end = LENGTH - random.integers(0, padding + 1, (ROWS, 1))
    segments = np.where(place >= cut, 2, 1) * (place < end)
    positions = np.where(place >= cut, place - cut, place) * (place < end)
    within = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return {
        "tokens": (random.integers(3, 500, (ROWS, LENGTH)) * (place < end)).astype(np.int32),
        "positions": positions.astype(np.int32),
        "segment_ids": segments.astype(np.int32),
        "loss_mask": segments > 0,
        "norm": np.asarray(within.sum(), np.float32),
        "index": np.asarray(0, np.int32),
    }


def largest_difference(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
    """Return the largest difference over two sets of arrays, which must have the same names."""
    assert one.keys() == other.keys()
    return max(float(np.abs(np.asarray(one[name]) - np.asarray(other[name])).max()) for name in one)


def steps(
    built: Torchax, batches: Sequence[Mapping[str, np.ndarray]], accumulation: int
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Run AdamW, and return the steps' losses and the trained arrays."""
    out = []
    with built.mesh:
        placed = [shard_rows(dict(batch), built.mesh) for batch in batches]
        step = built.step(optax.adamw(RATE, weight_decay=DECAY), accumulation)
        # A step donates its state to the next one.
        live = step.start({name: array.copy() for name, array in built.trained.items()})
        train = compiled(step.jit(), live, built.arrays, placed[0])
        for first in range(0, len(batches), accumulation):
            window = []
            for batch in placed[first : first + accumulation]:
                live, loss, *_ = train(live, built.arrays, batch)
                window.append(float(loss))
            out.append(float(np.mean(window)))
    return out, {name: np.asarray(array) for name, array in live[0].items()}


def torch_steps(
    built: Torchax, batches: Sequence[Mapping[str, np.ndarray]], accumulation: int
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Run `steps` in torch with PEFT."""

    from recipec.runtime.backends.peft_model import adapter_parameters

    model = reference(built)
    parameters = adapter_parameters(model, built.base)
    optimizer = torch.optim.AdamW(parameters.values(), lr=RATE, weight_decay=DECAY)
    out = []
    for first in range(0, len(batches), accumulation):
        window = [torch_loss(model, one) for one in batches[first : first + accumulation]]
        loss = sum(window) / accumulation
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out, {name: parameter.detach().numpy() for name, parameter in parameters.items()}
