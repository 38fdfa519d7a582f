"""The control: a second run of one library that starts from slightly perturbed adapters.

A tiny random model can be chaotic: rounding differences grow until two correct programs diverge. The control
measures how far one program diverges from itself if its initial adapters change by about a rounding error.
Differences between two programs matter only if they are clearly larger.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from recipec.compiler.lowering.program import Program
from recipec.runtime.backends.run_output import save_adapter
from recipec.runtime.model.initial import initial_adapters
from recipec.runtime.settings import ModelSettings
from recipec.runtime.weights.checkpoint import HFCheckpoint

PERTURBATION = 1e-7
"""Standard deviation of the noise added to A's entries of about 0.1; on the order of float32's rounding."""


def write_perturbed(folder: Path, program: Program, model: Path) -> None:
    """Write a PEFT adapter: the recipe's initial values, with noise of size PERTURBATION added to each A.

    B stays zero. With a nonzero B, A would get tiny gradients, and Adam would make full steps of them.

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
