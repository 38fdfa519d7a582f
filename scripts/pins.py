"""Rewrite compiler/data/pins.json from the packages in the environment of this script's Python.

    .venv/bin/python scripts/pins.py

Run it in an environment in which the tests pass. Packages that are not installed there (libtpu, gcsfs and
its dependencies, vllm-tpu, bitsandbytes) keep their version in the file. In an environment of lm-eval, it
rewrites only lm-eval's set:

    python3 -m venv eval && eval/bin/pip install -U setuptools 'lm-eval[api]' transformers
    eval/bin/python scripts/pins.py

In an environment of mlflow-skinny, constrained by the file's other versions, it rewrites MLflow's set:

    python3 -m venv mlflow && mlflow/bin/pip install -c CONSTRAINTS mlflow-skinny
    mlflow/bin/python scripts/pins.py

In an environment of vllm-tpu, it rewrites compiler/data/serve_environment.json, the packages that
`recipe plan --serve` installs:

    python3.12 -m venv serve && serve/bin/pip install vllm-tpu==VERSION
    serve/bin/python scripts/pins.py
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PINS = Path(__file__).resolve().parent.parent / "compiler" / "data" / "pins.json"
SERVE = PINS.with_name("serve_environment.json")

COMPILE = ("PyYAML", "jinja2", "pydantic", "rich", "ruamel.yaml", "typer")

TRAIN = (
    "array-record",
    "datasets",
    "etils",
    "flax",
    "fsspec",
    "google-tunix",
    "grain",
    "huggingface-hub",
    "jax",
    "jinja2",
    "ml-dtypes",
    "numpy",
    "optax",
    "orbax-checkpoint",
    "protobuf",
    "pyarrow",
    "qwix",
    "safetensors",
    "tensorboardX",
    "tensorflow-datasets",
    "tokenizers",
    "tqdm",
    "transformers",
)
"""Packages that the generated scripts and runtime/ import, and safetensors, whose format they write."""

TORCHAX = ("peft", "torch", "torchax")
"""Packages that train_torchax.py needs in addition to those of train.py."""

JAX = ("flax", "google-tunix", "jax", "optax", "orbax-checkpoint", "qwix")
"""Packages of train.py that train_trl.py does not need."""

TRL = ("accelerate", "peft", "torch", "trl", *(name for name in TRAIN if name not in JAX))

WANDB = ("wandb",)
"""Packages for logging to Weights & Biases, in addition to those of any training script."""

MLFLOW = ("mlflow-skinny",)
"""Packages for logging to an MLflow server, in addition to those of any training script."""

PICTURES = ("pillow",)
"""Packages of train_trl.py for data with pictures; those of train.py include them."""

JSONSCHEMA = ("jsonschema", "referencing")
"""Packages of the reward json_schema, in addition to those of train.py."""

EVALUATE = ("lm-eval[api]", "transformers")
"""Packages that serve/eval.sh runs; transformers tokenizes for tasks that do not use chat."""

NOT_COMPILING = {
    *("cuda-bindings", "nvidia-cuda-nvrtc-cu12", "nvidia-cusolver-cu12", "nvidia-nvtx-cu12", "triton"),
    *("cmake", "nixl", "ray", "runai-model-streamer", "runai-model-streamer-gcs", "runai-model-streamer-s3"),
}
"""Dependencies of vllm-tpu, 2 GB, that compiling its step for a TPU does not import: programs for GPUs,
clusters and streamed weights. PyPI's torch is the CUDA build, which loads the other CUDA libraries."""


def closure(roots: Iterable[str], without: Collection[str] = ()) -> dict[str, str]:
    """Return the installed versions of packages and of all their dependencies, by canonical name.

    Args:
        without: canonical names to leave out, together with dependencies that only they need.
    """
    versions: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name in without or (name, frozenset(wanted.extras)) in seen:
            continue
        seen.add((name, frozenset(wanted.extras)))
        distribution = metadata.distribution(name)
        versions[name] = distribution.version
        for text in distribution.requires or []:
            needed = Requirement(text)
            extras = ("", *wanted.extras)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)
    return dict(sorted(versions.items()))


def pins() -> dict[str, dict[str, dict[str, str]] | dict[str, str]]:
    """Build the contents of pins.json."""
    before = json.loads(PINS.read_text(encoding="utf-8"))
    versions = closure(TRAIN)
    train, trl = in_addition({}, TRAIN), in_addition({}, TRL)
    shared = {**trl["direct"], **trl["transitive"]}
    libtpu = {"libtpu": before["train-tpu"]["transitive"]["libtpu"]}
    return {
        "compile": {canonicalize_name(name): metadata.version(name) for name in COMPILE},
        "train-cpu": train,
        "train-tpu": {
            "direct": {"jax[tpu]" if name == "jax" else name: pin for name, pin in train["direct"].items()},
            "transitive": dict(sorted({**train["transitive"], **libtpu}.items())),
        },
        "torchax": in_addition(versions, TORCHAX),
        "trl": trl,
        "trl-quantized": before["trl-quantized"],
        "trl-pictures": in_addition(shared, PICTURES),
        "gcs": before["gcs"],
        "wandb": in_addition({name: pin for name, pin in versions.items() if name in shared}, WANDB),
        "mlflow": before["mlflow"],
        "jsonschema": in_addition(versions, JSONSCHEMA),
        "serve": before["serve"],
        "eval": before["eval"],
    }


def in_addition(versions: Mapping[str, str], roots: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the packages, with dependencies, that are needed in addition to others.

    Args:
        versions: of the other packages.
    """
    more = {name: version for name, version in closure(roots).items() if name not in versions}
    direct = {canonicalize_name(name) for name in roots}
    return {
        "direct": {name: public(version) for name, version in more.items() if name in direct},
        "transitive": {name: public(version) for name, version in more.items() if name not in direct},
    }


def public(version: str) -> str:
    """Return a version without its build part ("2.13.0+cpu" becomes "2.13.0")."""
    return version.partition("+")[0]


def with_evaluation() -> dict[str, dict[str, dict[str, str]] | dict[str, str]]:
    """Return the contents of pins.json with this environment's lm-eval set."""
    versions = closure(EVALUATE)
    direct = {name: versions[canonicalize_name(Requirement(name).name)] for name in EVALUATE}
    names = {canonicalize_name(Requirement(name).name) for name in EVALUATE}
    transitive = {name: version for name, version in versions.items() if name not in names}
    before = json.loads(PINS.read_text(encoding="utf-8"))
    return {**before, "eval": {"direct": direct, "transitive": transitive}}


def with_mlflow() -> dict[str, dict[str, dict[str, str]] | dict[str, str]]:
    """Return the contents of pins.json with this environment's MLflow set."""
    before = json.loads(PINS.read_text(encoding="utf-8"))
    trained = [{**before[name]["direct"], **before[name]["transitive"]} for name in ("train-cpu", "trl")]
    shared = {name: version for name, version in trained[0].items() if name in trained[1]}
    return {**before, "mlflow": in_addition(shared, MLFLOW)}


def is_installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def serving() -> dict[str, str]:
    """Build the contents of serve_environment.json."""
    versions = closure(["vllm-tpu"], without=NOT_COMPILING)
    return {name: public(version) for name, version in versions.items()}


if __name__ == "__main__":
    path: Path
    contents: Mapping[str, Any]
    if is_installed("vllm-tpu"):
        path, contents = SERVE, serving()
    elif is_installed("mlflow-skinny"):
        path, contents = PINS, with_mlflow()
    elif is_installed("lm-eval"):
        path, contents = PINS, with_evaluation()
    else:
        path, contents = PINS, pins()
    path.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path}")
