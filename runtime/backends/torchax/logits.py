"""Logits of a model without a family of its own, for `merge.py --verify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from ...model.adapters import LoraSettings
from ...model.partition_rules import Rule
from ...model.sharding import shard_rows
from ...settings import ModelSettings
from ...weights.checkpoint import HFCheckpoint
from ..peft_model import Pairs
from .hf_model import Arrays, abstract_model, load_base, place_trained


@dataclass(frozen=True)
class Run:
    """The settings that a model was trained with, changed to float32."""

    settings: ModelSettings
    lora: LoraSettings
    mesh: Mesh
    rules: Sequence[Rule]


def logits(
    run: Run, base: HFCheckpoint, rows: Mapping[str, np.ndarray], adapters: Pairs | None
) -> np.ndarray:
    """Return float32 logits of all tokens except padding: [tokens, vocabulary].

    Args:
        rows: tokens, positions and segment_ids, int32[B, T].
        adapters: A [rank, in] and B [out, rank] by module; None for the base without adapters.
    """
    mesh = run.mesh
    with mesh:
        model = abstract_model(base.config, run.settings, run.lora, mesh, run.rules, base.architecture)
        arrays = load_base(model, base)
        trained = {} if adapters is None else place_trained(model, adapters)

        def compute(trained: Arrays, arrays: Arrays, batch: Arrays) -> jax.Array:
            parts = (trained, arrays, None)
            head = model.head(parts)
            return head.logits(model.hidden(parts, *(batch[name] for name in rows)), *head.arrays)

        out = jax.jit(compute)(trained, arrays, shard_rows(dict(rows), mesh))
    return np.asarray(out, np.float32)[rows["segment_ids"] > 0]
