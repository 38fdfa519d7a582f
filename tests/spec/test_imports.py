"""`recipe build` has to work where neither jax nor numpy is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = [
    "jax",
    "jaxlib",
    "numpy",
    "tunix",
    "qwix",
    "torch",
    "flax",
    "optax",
    "orbax",
    "grain",
    "transformers",
    "ml_dtypes",
]


@pytest.mark.parametrize(
    "module", ["spec", "spec.load", "spec.validate", "compiler", "compiler.lower", "compiler.cli"]
)
def test_importing_it_imports_nothing_heavy(module: str) -> None:
    program = f"import sys, {module}; print(sorted(set(sys.modules) & {set(HEAVY)!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_checking_a_recipe_needs_nothing_heavy(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """With every heavy package made impossible to import."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "recipe: 1\nname: example\nmodel: {id: google/gemma-4-31B-it}\n"
        "mesh: {accelerator: v5p-8, axes: {fsdp: 4}}\n"
        "lora: {rank: 16}\ndata: {train: [gs://bucket/train.jsonl]}\n"
    )
    program = (
        f"import sys\nfor name in {HEAVY!r}: sys.modules[name] = None\n"
        "from pathlib import Path\nfrom compiler.lower import lower\nfrom spec.load import load\n"
        f"assert lower(load(Path({str(recipe)!r}))).program is not None\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
