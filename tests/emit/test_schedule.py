"""Tests of the numbers of a generated script's schedule and optimizer."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from emitting import files_of

Rate = Callable[[int], float]


def script(folder: Path, sets: list[str]) -> types.ModuleType:
    """Load a generated train.py as a module, with the project's own runtime."""
    module = types.ModuleType("generated_train")
    module.__file__ = str(folder / "train.py")
    source = files_of(folder, ["train.steps=null", *sets])["train.py"].decode()
    exec(compile(source, "train.py", "exec"), module.__dict__)
    return module


def reference(name: str, steps: int, warmup: int, final: float) -> Rate:
    """Return a schedule of transformers with warmup: cosine, linear or constant, with a final share."""

    def factor(step: int) -> float:
        if step < warmup:
            return step / max(1, warmup)
        if name == "constant":
            return 1.0
        progress = (step - warmup) / max(1, steps - warmup)
        shape = 0.5 * (1 + math.cos(math.pi * progress)) if name == "cosine" else 1 - progress
        return final + (1 - final) * shape

    return factor


CASES = [
    ("cosine", "warmup_steps: 10", 50, 10, 0.0),
    ("cosine", "warmup_ratio: 0.03", 50, 2, 0.1),
    ("cosine", "warmup_steps: 0", 50, 0, 0.1),
    ("cosine", "warmup_steps: null", 50, 2, 0.1),
    ("cosine", "warmup_ratio: 0", 50, 0, 0.0),
    ("cosine", "warmup_steps: 100", 20, 100, 0.0),
    ("cosine", "warmup_ratio: 0.9", 1, 1, 0.0),
    ("linear", "warmup_steps: 10", 50, 10, 0.2),
    ("linear", "warmup_steps: 0", 50, 0, 0.0),
    ("linear", "warmup_ratio: 0.5", 1, 1, 0.0),
    ("constant", "warmup_steps: 10", 50, 10, 0.0),
    ("constant", "warmup_steps: null", 50, 0, 0.0),
]


@pytest.mark.parametrize(("name", "warmup_key", "steps", "warmup", "final"), CASES)
def test_learning_rate_schedule_matches_transformers(
    name: str, warmup_key: str, steps: int, warmup: int, final: float, tmp_path: Path
) -> None:
    setting = f"train.schedule={{name: {name}, {warmup_key}, min_lr_ratio: {final}}}"
    schedule = script(tmp_path, [setting, "train.optimizer.learning_rate=3.0e-4"]).learning_rate(steps)
    factor = reference(name, steps, warmup, final)
    seen = [float(schedule(step)) for step in range(steps)]
    np.testing.assert_allclose(seen, [3e-4 * factor(step) for step in range(steps)], rtol=1e-5, atol=1e-10)


def test_the_optimizer_is_adamw_with_the_recipes_values(tmp_path: Path) -> None:
    optimizer = "{learning_rate: 0.1, b1: 0.8, b2: 0.9, eps: 1.0e-3, weight_decay: 0.5, max_grad_norm: 1.0}"
    module = script(tmp_path, [f"train.optimizer={optimizer}", "train.schedule={name: constant}"])
    transform = module.optimizer(module.learning_rate(5))
    parameters = np.array([1.0, -2.0], np.float32)
    gradients = [np.array([3.0, 4.0], np.float32), np.array([0.3, -0.4], np.float32)]
    state = transform.init(parameters)
    expected, mean, square = parameters.astype(np.float64), np.zeros(2), np.zeros(2)
    for step, gradient in enumerate(gradients, 1):
        updates, state = transform.update(gradient, state, parameters)
        parameters = parameters + np.asarray(updates)
        clipped = gradient / max(1.0, float(np.linalg.norm(gradient)))
        mean, square = 0.8 * mean + 0.2 * clipped, 0.9 * square + 0.1 * clipped**2
        adam = (mean / (1 - 0.8**step)) / (np.sqrt(square / (1 - 0.9**step)) + 1e-3)
        expected = expected - 0.1 * (adam + 0.5 * expected)
        np.testing.assert_allclose(parameters, expected, rtol=1e-5)


def test_train_py_does_not_clip_without_max_grad_norm(tmp_path: Path) -> None:
    files = files_of(tmp_path, ["train.optimizer.max_grad_norm=null"])
    assert "clip" not in files["train.py"].decode()
    assert "optax.clip_by_global_norm(MAX_GRAD_NORM)" in files_of(tmp_path)["train.py"].decode()
