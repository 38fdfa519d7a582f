"""Record a run of train.py as a `runtime.training.trace.Trace`, for `train.py --trace FILE`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from ..checkpoints.trained_weights import hugging_face
from ..data.token_cache import installed
from ..model.adapters import PARTS
from ..model.families.family import parameter_path
from ..model.loading import Built
from ..settings import ModelSettings
from ..weights.checkpoint import HFCheckpoint
from .losses import Batch
from .step import trained_type
from .trace import ROWS, Trace, count_targets

PACKAGES = ("jax", "google-tunix", "qwix", "optax")


class Recorder:
    """Record each micro-batch of a run before it trains, and each step after it.

    Args:
        built: the model.
        base: the checkpoint that the weights come from; it names the tensors of full fine-tuning.
        settings: of the model.
        accumulation: micro-batches of an optimizer step.
        recipe: name of the artifact.

    Attributes:
        trace: filled while the run trains.
    """

    def __init__(
        self, built: Built, base: HFCheckpoint, settings: ModelSettings, accumulation: int, recipe: str
    ) -> None:
        self._built, self._base, self._accumulation = built, base, accumulation
        self._sum: dict[str, np.ndarray] = {}
        self._seen = 0
        self._batches: list[Batch] = []
        device = jax.devices()[0]
        about = {"dtype": settings.dtype, "device": device.device_kind, "devices": jax.device_count()}
        self.trace = Trace("tunix", recipe, about | {name: installed(name) for name in PACKAGES})

    def begin(self, model: nnx.Module) -> None:
        """Record the adapters before the first step, which donates them."""
        if self._built.adapters:
            arrays = self._arrays(nnx.state(model, trained_type(self._built)))
            self.trace.initial = {name: array.copy() for name, array in arrays.items()}

    def before(self, batch: Batch, gradients: Callable[[], Any]) -> None:
        """Record a micro-batch that is about to train.

        Args:
            gradients: computes the gradients of the micro-batch's loss, as a state of the trained variables;
                called only during the first optimizer step.
        """
        self._batches.append({name: np.asarray(batch[name]) for name in ROWS})
        self._seen += 1
        if self._seen > self._accumulation:
            return
        for name, array in self._arrays(gradients()).items():
            self._sum[name] = self._sum.get(name, 0.0) + array
        if self._seen == self._accumulation:
            # A step's gradient is the mean over its micro-batches, whose losses are normalized for that.
            self.trace.gradients = {name: array / self._accumulation for name, array in self._sum.items()}

    def after(self, step: int, losses: list[jax.Array]) -> None:
        """Record an optimizer step that is done: the loss of each micro-batch."""
        batches, self._batches = self._batches, []
        loss = float(np.mean([float(loss) for loss in losses]))
        self.trace.add(step, loss, sum(map(count_targets, batches)), batches)

    def end(self, model: nnx.Module) -> Trace:
        """Return the whole trace, with the current values of what was trained."""
        self.trace.trained = self._arrays(nnx.state(model, trained_type(self._built)))
        return self.trace

    def _arrays(self, state: Any) -> dict[str, np.ndarray]:
        """Return a state's arrays in Hugging Face's layout, in float32, by their names in a trace."""
        leaves = jax.tree_util.tree_flatten_with_path(nnx.pure(state))[0]
        arrays = {parameter_path(path): np.asarray(leaf, np.float32) for path, leaf in leaves}
        out: dict[str, np.ndarray] = {}
        for adapter in self._built.adapters:
            matrices = adapter.to_peft(*(arrays[path] for path, *_ in adapter.arrays))
            out |= {
                f"{adapter.name}.lora_{which}": part for which, part in zip(PARTS, matrices, strict=False)
            }
        whole = self._built.whole
        if not self._built.adapters:
            whole = tuple(parameter for parameter in self._built.parameters if parameter.trainable)
        if whole:
            for parameter in whole:
                for number, source in enumerate(parameter.sources):
                    part = arrays[parameter.path][parameter.place(number)]
                    out[source.full_name(self._base.prefix)] = hugging_face(part, source)
        return out
