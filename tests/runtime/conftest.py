"""Fixtures of several test modules: a small artifact, processes that run it, compiled programs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.runtime import artifacts
from tests.runtime.lives import Lives


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a one-layer model, which is fast to trace, data and an artifact."""
    place = tmp_path_factory.mktemp("run")
    artifacts.write_place(place, layers=["sliding_attention"])
    return place


@pytest.fixture(scope="session")
def whole(place: Path) -> subprocess.CompletedProcess[str]:
    """An uninterrupted run with which others are compared. It starts as users start theirs."""
    return subprocess.run(
        [sys.executable, *artifacts.script(place, "whole")],
        env=dict(artifacts.environment(place)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="session")
def lives(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """A starter of processes that run a train.py."""
    lives = Lives(artifacts.environment(place), tmp_path_factory.mktemp("lives"))
    yield lives
    lives.close()


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Cache JAX's compiled programs for a test module that runs the same program repeatedly."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@pytest.fixture
def no_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make fsspec believe that gcsfs and s3fs are not installed."""
    from fsspec.registry import _registry as opened

    for name in ("gcsfs", "s3fs"):
        monkeypatch.setitem(sys.modules, name, None)
    for protocol in ("gs", "gcs", "s3"):
        monkeypatch.delitem(opened, protocol, raising=False)


@pytest.fixture
def uploaded(tmp_path: Path) -> Iterator[Callable[[Path], str]]:
    """A function that copies a folder into fsspec's memory and returns its address."""
    import fsspec

    memory = fsspec.filesystem("memory")
    root = f"/{tmp_path.parent.name}-{tmp_path.name}"

    def upload(folder: Path) -> str:
        for path in folder.rglob("*"):
            if path.is_file():
                memory.pipe_file(f"{root}/{path.relative_to(folder)}", path.read_bytes())
        return f"memory:/{root}"

    yield upload
    if memory.exists(root):
        memory.rm(root, recursive=True)
