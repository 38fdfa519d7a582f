"""Fixtures of several test modules: a whole run, compiled programs, buckets."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.runtime import artifacts


@pytest.fixture(scope="session")
def shared_whole(
    shared_place: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The output of an uninterrupted run, and its process. It starts as users start theirs."""
    folder = tmp_path_factory.mktemp("whole")
    done = subprocess.run(
        [sys.executable, *artifacts.script(shared_place, str(folder))],
        env=dict(artifacts.environment(shared_place)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return folder, done


@pytest.fixture
def whole(
    place: Path, shared_whole: tuple[Path, subprocess.CompletedProcess[str]]
) -> subprocess.CompletedProcess[str]:
    """An uninterrupted run with which others are compared. A copy of its output is in the test's place."""
    folder, done = shared_whole
    shutil.copytree(folder, place / "whole")
    return done


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
