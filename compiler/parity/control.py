"""The control: adapters that begin a hair beside the recipe's own, for the same library to train once more.

A tiny random model can be chaotic: what rounding leaves of a difference grows until two correct programs
part. How far one program parts from itself, its first adapters moved by about what rounding moves them,
says how much of the difference between two programs means anything.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from recipec.compiler.lowering.program import Program
from recipec.runtime.backends.saving import save_adapter
from recipec.runtime.model.initial import initial_adapters
from recipec.runtime.settings import ModelSettings
from recipec.runtime.weights.checkpoint import HFCheckpoint

PERTURBATION = 1e-7
"""Standard deviation of what A's entries, of some 0.1, are moved by: the order of float32's rounding."""


def write_perturbed(folder: Path, program: Program, model: Path) -> None:
    """Writes a PEFT adapter: the recipe's initial values, each A moved by PERTURBATION.

    B stays zero: Adam would make whole steps of the smallest gradients that A had from it.

    Args:
        program: of the miniature, with LoRA.
        model: the miniature's folder.
    """
    assert program.lora is not None
    random = np.random.default_rng(0)
    values = {
        name: ((a + PERTURBATION * random.standard_normal(a.shape)).astype(np.float32), b)
        for name, (a, b) in initial_adapters(
            program.adapters, program.lora, program.recipe.train.seed
        ).items()
    }
    settings = ModelSettings(id=program.recipe.model.id, family=program.family.name, dtype="float32")
    save_adapter(folder, HFCheckpoint.open(model), settings, program.lora, values)
