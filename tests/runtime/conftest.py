"""Fixtures of several test modules: a whole run, compiled programs, buckets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.runtime import artifacts


@pytest.fixture(scope="session")
def whole(place: Path) -> subprocess.CompletedProcess[str]:
    """An uninterrupted run with which others are compared. It starts as users start theirs."""
    return subprocess.run(
        [sys.executable, *artifacts.script(place, "whole")],
        env=dict(artifacts.environment()),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@contextmanager
def _compiled_in(folder: Path) -> Iterator[None]:
    """Make JAX keep what it compiles in a folder, and read it from there, until the block ends."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_compilation_cache_dir
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session", autouse=True)
def compiled() -> Iterator[None]:
    """Compile a program once, for all tests and for later sessions, unless it or the compiler changes."""
    with _compiled_in(artifacts.COMPILED):
        yield


@pytest.fixture(scope="module")
def compiled_apart(tmp_path_factory: pytest.TempPathFactory, compiled: None) -> Iterator[None]:
    """Use a cache of its own for a test module that counts compiled programs."""
    with _compiled_in(tmp_path_factory.mktemp("compiled")):
        yield


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
