"""Name a compile's result in the cache by everything that it depends on."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from recipec.compiler import store
from recipec.compiler.artifacts.artifact import digest
from recipec.compiler.artifacts.runtime import runtime_digest
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.optimization import hyperparameters, optimizer, schedule
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.runtime_settings import run_settings
from recipec.compiler.packages import version_of
from recipec.compiler.plan.results import Job
from recipec.compiler.python_text import source
from recipec.spec.language import Train

PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "qwix", "google-tunix")
"""Packages whose code becomes part of the compiled step, or compiles it."""
OF_TORCHAX = ("torch", "torchax", "transformers", "peft")
"""Packages that the step of the TorchAX backend also uses."""

FLAGS = "LIBTPU_INIT_ARGS"
"""The environment variable with libtpu's flags."""

PHYSICAL = (
    *("name", "topology", "slices", "hosts", "devices", "chips"),
    *("hbm_gib", "bf16_tflops", "hbm_gb_per_s", "ici_gb_per_s"),
)
"""The facts of an accelerator that a step and its estimate depend on."""
OF_A_COMPILE = (*("abstract", "depth", "kernels", "results", "schedule", "torus", "worker"),)
"""Modules of this folder that a compile runs, besides all of hlo/. The others work on its result."""


def name(program: Program, job: Job) -> str:
    """Return the name of a job's result in the cache."""
    packages = versions(job.backend)
    # train.py's model is built from the architecture; transformers' is built from all of config.json.
    config = program.config if job.backend is Backend.TORCHAX else None
    outer = os.environ.get(FLAGS, "")
    further = (_rollout(program),) if job.generates else ()
    return store.key(
        step(program), config, job.layers, job.scheduled, job.backend, packages, sources(), outer, *further
    )


def _rollout(program: Program) -> list[Any]:
    """Return what else the program that generates completions depends on."""
    recipe = program.recipe
    return [recipe.rollout.model_dump(mode="json"), recipe.train.global_batch_size]


def _architecture(program: Program) -> Any:
    """Return the description of a program's model, as far as its step depends on it.

    Without pictures, heads turn by tokens' places alone. With them, the names of the tower's tensors do not
    count.
    """
    architecture = described(program.architecture)
    if program.architecture.vision is None:
        architecture.pop("turned_axes", None)
    else:
        architecture["vision"].pop("prefixes", None)
    return architecture


def step(program: Program) -> dict[str, Any]:
    """Return everything in a program that its compiled step depends on.

    A field with its default is left out. So a new key of the language, or a new part of one family's
    description, leaves the names of other steps unchanged.
    """
    recipe, settings = program.recipe, run_settings(program)
    train = described(settings.train)
    return {
        "family": program.family.name,
        "architecture": _architecture(program),
        "model": described(settings.model),
        "lora": described(settings.lora),
        # The first matching pattern wins, so the order of the mapping counts.
        "patterns": list(settings.lora.rank_pattern.items()) if settings.lora is not None else [],
        "rules": described(settings.rules),
        "train": {key: value for key, value in train.items() if key not in Train.after_compiling()},
        "optimizer": [
            hyperparameters(recipe.train),
            source(schedule(recipe.train)),
            source(optimizer(recipe)),
        ],
        "max_length": settings.data.max_length,
        "mesh": described(settings.mesh),
        "accelerator": {key: getattr(program.accelerator, key) for key in PHYSICAL},
    }


def described(value: Any) -> Any:
    """Return a value as a JSON value: a dataclass as its fields, without those that have their default."""
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    if isinstance(value, Mapping):
        return {key: described(item) for key, item in value.items()}
    if not is_dataclass(value):
        return value
    return {
        field.name: described(getattr(value, field.name))
        for field in fields(value)
        if getattr(value, field.name) != _default(field)
    }


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


@functools.cache
def versions(backend: Backend = Backend.TUNIX) -> dict[str, str]:
    """Return the installed versions of the packages of a backend's step; "" for a missing package."""
    packages = (*PACKAGES, *OF_TORCHAX) if backend is Backend.TORCHAX else PACKAGES
    return {package: version_of(package) for package in packages}


@functools.cache
def sources() -> str:
    """Return a digest of the code that builds the step and reads the compiler's output."""
    root = Path(__file__).resolve().parent.parent
    files = [*(root / "plan" / f"{name}.py" for name in OF_A_COMPILE), *root.glob("plan/hlo/*.py")]
    files += [root / "data" / "kernels.json", root / "data" / "hardware.json"]
    files += [root / "python_text.py", root / "lowering" / "optimization.py"]
    files += [root / "miniature" / "fewer_layers.py"]
    digests = [f"{path.relative_to(root)} {digest(path.read_bytes())}" for path in sorted(files)]
    return digest("\n".join([runtime_digest(), *digests]).encode())
