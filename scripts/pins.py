"""Rewrites compiler/data/pins.json from the packages that are installed beside this script's Python.

    .venv/bin/python scripts/pins.py

Run it in an environment that the tests pass in. What is not installed there (libtpu, gcsfs and what it
needs, vllm-tpu, bitsandbytes) keeps the version that the file has. In an environment of lm-eval it rewrites
that set alone:

    python3 -m venv eval && eval/bin/pip install -U setuptools 'lm-eval[api]' transformers
    eval/bin/python scripts/pins.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PINS = Path(__file__).resolve().parent.parent / "compiler" / "data" / "pins.json"

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
"""What the generated scripts and runtime/ import, and safetensors' format that they write."""

TORCHAX = ("peft", "torch", "torchax")
"""What train_torchax.py needs beside the packages of train.py."""

JAX = ("flax", "google-tunix", "jax", "optax", "orbax-checkpoint", "qwix")
"""What of train.py's packages train_trl.py needs none of."""

TRL = ("accelerate", "peft", "torch", "trl", *(name for name in TRAIN if name not in JAX))

EVALUATE = ("lm-eval[api]", "transformers")
"""What serve/eval.sh runs; transformers tokenises where no chat is asked."""


def closure(roots: Iterable[str]) -> dict[str, str]:
    """The installed versions of packages and of all that they need, by canonical name."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if (name, frozenset(wanted.extras)) in seen:
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
    """The contents of pins.json."""
    before = json.loads(PINS.read_text(encoding="utf-8"))
    versions = closure(TRAIN)
    names = sorted(canonicalize_name(name) for name in TRAIN)
    direct = {name: versions[name] for name in names}
    transitive = {name: version for name, version in versions.items() if name not in direct}
    libtpu = {"libtpu": before["train-tpu"]["transitive"]["libtpu"]}
    return {
        "compile": {canonicalize_name(name): metadata.version(name) for name in COMPILE},
        "train-cpu": {"direct": direct, "transitive": transitive},
        "train-tpu": {
            "direct": {"jax[tpu]" if name == "jax" else name: version for name, version in direct.items()},
            "transitive": dict(sorted({**transitive, **libtpu}.items())),
        },
        "torchax": beside(versions, TORCHAX),
        "trl": alone(TRL),
        "trl-quantized": before["trl-quantized"],
        "gcs": before["gcs"],
        "serve": before["serve"],
        "eval": before["eval"],
    }


def beside(versions: Mapping[str, str], roots: Sequence[str]) -> dict[str, dict[str, str]]:
    """The set of packages that some need beside others.

    Args:
        versions: of the others.
    """
    more = {name: version for name, version in closure(roots).items() if name not in versions}
    direct = {canonicalize_name(name) for name in roots}
    return {
        "direct": {name: public(version) for name, version in more.items() if name in direct},
        "transitive": {name: public(version) for name, version in more.items() if name not in direct},
    }


def alone(roots: Sequence[str]) -> dict[str, dict[str, str]]:
    """The set of packages, and of all that they need."""
    versions = {name: public(version) for name, version in closure(roots).items()}
    direct = {canonicalize_name(name) for name in roots}
    return {
        "direct": {name: version for name, version in versions.items() if name in direct},
        "transitive": {name: version for name, version in versions.items() if name not in direct},
    }


def public(version: str) -> str:
    """A version without the part that names a build of it ("2.13.0+cpu")."""
    return version.partition("+")[0]


def with_evaluation() -> dict[str, dict[str, dict[str, str]] | dict[str, str]]:
    """The contents of pins.json, with the set of this environment's lm-eval."""
    versions = closure(EVALUATE)
    direct = {name: versions[canonicalize_name(Requirement(name).name)] for name in EVALUATE}
    names = {canonicalize_name(Requirement(name).name) for name in EVALUATE}
    transitive = {name: version for name, version in versions.items() if name not in names}
    before = json.loads(PINS.read_text(encoding="utf-8"))
    return {**before, "eval": {"direct": direct, "transitive": transitive}}


def is_installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    contents = with_evaluation() if is_installed("lm-eval") else pins()
    PINS.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {PINS}")
