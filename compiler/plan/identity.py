"""Name a compile's result in the cache by everything that it depends on."""

from __future__ import annotations

import functools
import os
from dataclasses import asdict, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from recipec.compiler.artifacts.artifact import digest, runtime_digest
from recipec.compiler.emitters.backends import Backend
from recipec.compiler.lowering.libtpu import flags
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.settings import model_settings
from recipec.compiler.plan import store
from recipec.compiler.plan.results import Job
from recipec.runtime.model.families import Architecture

PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "qwix", "google-tunix")
"""Packages whose code becomes part of the compiled step, or compiles it."""
OF_TORCHAX = ("torch", "torchax", "transformers", "peft")
"""Packages that the step of the TorchAX backend also uses."""

FLAGS = "LIBTPU_INIT_ARGS"
"""The environment variable with libtpu's flags."""

OUTSIDE = (
    *("name", "extends", "checkpoint", "cache", "merge", "serve"),
    *("benchmark", "evaluate", "launch", "cost", "budget"),
)
"""Sections of a recipe that do not affect the step. All keys of other sections count, except these:"""
IRRELEVANT = {"train": ("epochs", "steps", "eval_every", "early_stopping", "samples", "log")}
LATER: dict[str, dict[str, tuple[Any, ...]]] = {
    "train": {
        **{"router_aux_loss_coef": (0.0,), "z_loss": (0.0,), "neftune_noise_alpha": (None,)},
        **{"loss_type": ("sigmoid", "nll"), "simpo_gamma": (0.5,), "cpo_alpha": (1.0,)},
        **{"eaft_alpha": (1.0,), "eaft_top_k": (20,), "eaft_entropy": (3.0,), "asft_alpha": (0.1,)},
        **{"desirable_weight": (1.0,), "undesirable_weight": (1.0,), "only": ([],), "qat": (None,)},
        **{"continue_from": (None,)},
    },
    "model": {"attention_block": (None, 512), "add_tokens": ({},), "vocab_size": (None,)},
    "lora": {
        **{"products": (None,), "plus_ratio": (None,), "start_from": (None,)},
        **{"kind": ("lora",), "train_also": ([],), "train_tokens": ([],)},
    },
}
"""Keys that are newer than cached plans. They count only if their value is not one of these, so that older
results keep their names."""
NEWER = {
    "Norm": ("weighted",),
    "Experts": ("balanced", "latent", "summed", "eps"),
    "ExpertTensors": ("boxed", "correction", "beside"),
    "Mamba": ("rank",),
}
"""Fields of the parts of a description that are newer than cached plans, by class. They count only if they
differ from their default."""
OF_A_COMPILE = (*("abstract", "depth", "kernels", "results", "schedule", "torus", "worker"),)
"""Modules of this folder that a compile runs, besides all of hlo/. The others work on its result."""
OF_DATA = ("max_length",)
"""The only keys of `data` that affect the step."""


def name(program: Program, job: Job) -> str:
    """Return the name of a job's result in the cache."""
    found = versions(job.backend)
    # Tunix's model is built from the architecture; transformers' is built from all of config.json.
    config = program.config if job.backend is Backend.TORCHAX else None
    outer = os.environ.get(FLAGS, "")
    return store.key(step(program), config, job.layers, job.scheduled, job.backend, found, sources(), outer)


def step(program: Program) -> dict[str, Any]:
    """Return everything in a program that its compiled step depends on."""
    recipe: dict[str, Any] = program.recipe.model_dump(mode="json", exclude=set(OUTSIDE))
    settings = model_settings(program.recipe, program.family, program.accelerator)
    recipe["model"]["attention_block"] = settings.attention_block
    recipe["xla"] = flags(program)
    if not recipe["xla"]:
        del recipe["xla"]
    recipe["data"] = {key: recipe["data"][key] for key in OF_DATA}
    for section, keys in IRRELEVANT.items():
        recipe[section] = {key: value for key, value in recipe[section].items() if key not in keys}
    for section, known in LATER.items():
        for key, values in known.items() if recipe[section] else ():
            if recipe[section][key] in values:
                del recipe[section][key]
    accelerator = asdict(program.accelerator)
    for name in ("attention_block", "eight_bits", "eight_bit_tflops"):
        del accelerator[name]
    return {
        "recipe": recipe,
        # The first matching pattern wins, so the order of the mapping counts.
        "patterns": [list((program.lora.rank_pattern if program.lora else {}).items())],
        "family": program.family.name,
        "architecture": described(program.architecture),
        "accelerator": accelerator,
    }


def described(architecture: Architecture) -> dict[str, Any]:
    """Return a model's description without fields that have their default.

    A new field for one family then leaves the cache names of the other families unchanged.
    """
    return {
        field.name: _part(getattr(architecture, field.name))
        for field in fields(architecture)
        if getattr(architecture, field.name) != field.default
    }


def _part(value: Any) -> Any:
    """Return a part of a description as a JSON value, without the fields of NEWER that have their default."""
    if isinstance(value, list | tuple):
        return [_part(one) for one in value]
    if isinstance(value, dict):
        return {key: _part(one) for key, one in value.items()}
    if not is_dataclass(value):
        return value
    newer = NEWER.get(type(value).__name__, ())
    return {
        field.name: _part(getattr(value, field.name))
        for field in fields(value)
        if field.name not in newer or getattr(value, field.name) != field.default
    }


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
    files += [*root.glob("emitters/*.py"), root / "lowering" / "fewer_layers.py"]
    own = [f"{path.relative_to(root)} {digest(path.read_bytes())}" for path in sorted(files)]
    return digest("\n".join([runtime_digest(), *own]).encode())


def version_of(package: str) -> str:
    """Return the version of an installed package, "" of another."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
