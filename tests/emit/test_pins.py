"""Tests that the pinned sets hold all imports, agree with pyproject.toml, and are complete."""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from emitting import files_of
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from recipec.compiler.lowering import pins

DISTRIBUTIONS = {"orbax": "orbax-checkpoint", "tunix": "google-tunix", "google": "protobuf", "PIL": "pillow"}
"""Packages whose import has another name than their distribution."""

OPTIONAL = {"wandb", "mlflow", "pillow", "jsonschema", "referencing", "jaxlib"}
"""Packages of recipes that use them; a run without one says which. jaxlib comes with jax, in jax's version,
referencing with jsonschema, and pillow with Tunix: all are pinned as dependencies of these."""


BACKENDS = {"torchax": {"train-cpu", "torchax"}, "trl": {"trl"}}
"""The sets of pins that another backend's script runs on."""


def imported(*files: Path) -> set[str]:
    """Return the packages that modules import, except the standard library and runtime itself."""
    names: set[str] = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    names -= {*sys.stdlib_module_names, "runtime"}
    return {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in names}


def test_runtime_imports_are_pinned(root: Path) -> None:
    modules = set((root / "runtime").rglob("*.py")) - set((root / "runtime" / "backends").rglob("*.py"))
    assert imported(*modules) - OPTIONAL <= set(pins.sets()["train-cpu"]["direct"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_imports_are_pinned(backend: str, root: Path) -> None:
    folder = root / "runtime" / "backends"
    needed = imported(*folder.glob("*.py"), *(folder / backend).rglob("*.py"))
    assert needed <= {name for part in BACKENDS[backend] for name in pins.sets()[part]["direct"]}


def test_pyproject_versions_agree_with_the_pins(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = pins.sets()["train-cpu"]["direct"]
    for text in project["optional-dependencies"]["train"]:
        requirement = Requirement(text)
        if any(specifier.operator == "==" for specifier in requirement.specifier):
            assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), text
    for text in project["dependencies"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins.sets()["compile"][canonicalize_name(requirement.name)]), (
            text
        )


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_train_pins_include_every_transitive_dependency(platform: str) -> None:
    given = pins.sets()[f"train-{platform}"]
    versions = {name.partition("[")[0]: version for part in given.values() for name, version in part.items()}
    assert set(given["direct"]).isdisjoint(given["transitive"])
    for name, version in versions.items():
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if distribution.version != version:
            continue
        for text in distribution.requires or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                found = versions.get(canonicalize_name(needed.name))
                assert found is not None, f"{name} needs {needed}"
                assert needed.specifier.contains(found, prereleases=True), f"{name} needs {needed}"


def test_requirements_depend_on_platform_and_bucket_paths(tmp_path: Path) -> None:
    tpu = files_of(tmp_path)["requirements-train.txt"].decode()
    assert "\njax[tpu]==0.10.2\n" in tpu and "\nlibtpu==" in tpu and "gcsfs" not in tpu
    cpu_mesh = "mesh={accelerator: cpu-8, axes: {fsdp: 4, tp: 2}}"
    cpu = files_of(tmp_path, [cpu_mesh])["requirements-train.txt"].decode()
    assert "\njax==0.10.2\n" in cpu and "libtpu" not in cpu
    for place in ("checkpoint.directory", "lora.start_from"):
        bucket = files_of(tmp_path, [f"{place}=gs://bucket/run"])["requirements-train.txt"].decode()
        assert "\ngcsfs==" in bucket
    lines = [line for line in bucket.splitlines() if line and not line.startswith(("#", "--"))]
    assert all(Requirement(line) for line in lines)
    assert len(lines) == len({Requirement(line).name for line in lines})
