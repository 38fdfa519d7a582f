"""Settings that every test shares. JAX reads the environment when it is first imported."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer.main
import typer.testing

from recipec.compiler.rehearse.artifact_run import QUICK_TO_COMPILE

if TYPE_CHECKING:
    from tests.runtime.lives import Lives

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests run programs that take a moment. Most of the time would go to XLA's and LLVM's optimizations of them,
# and to cutting each program into parts that several threads compile.
IN_ONE_PIECE = "--xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {QUICK_TO_COMPILE} {IN_ONE_PIECE}"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell's background job ignores SIGINT, and nohup ignores SIGHUP. Scripts that tests interrupt inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# typer derives every command of an application from its function, and its runner would do so for each call.
typer.testing._get_command = functools.cache(typer.main.get_command)

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite the golden files")


def pytest_configure(config: pytest.Config) -> None:
    """Give torch one thread: on models this small, several mostly wait for each other."""
    if "not e2e" in config.option.markexpr:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage during the collection of tests, which leaves millions of objects that stay.

    They are excluded from the garbage collections of the tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    """Whether to rewrite golden files."""
    return bool(request.config.getoption("--update"))


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Exclude objects of earlier modules from garbage collection.

    Otherwise, each collection visits all of them, and the code under test triggers some: verifying a merge
    took two and a half times as long.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def without_collections() -> Iterator[None]:
    """Collect no garbage in a module that parses: it would take four times as long, and trees have none."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def precision() -> None:
    """Start with JAX's own precision of matrix products. A run in float32 sets it for its whole process.

    A fixture of a module or of the session may be such a run, so the value before a test is not one to
    restore.
    """
    if (jax := sys.modules.get("jax")) is not None and jax.config.jax_default_matmul_precision is not None:
        jax.config.update("jax_default_matmul_precision", None)


@pytest.fixture
def highest() -> Iterator[None]:
    """Multiply matrices in full float32."""
    import jax

    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="session", autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set a folder for temporary files of the tests and of the processes that they start, and remove it."""
    folder = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("TPU_LOG_DIR", str(folder / "tpu_logs"))  # libtpu ignores TMPDIR
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's folder."""
    return ROOT


@pytest.fixture(scope="session")
def shared_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a one-layer model, which is fast to trace, data, an artifact and compiled programs.

    Tests do not write to it. Each gets its own copy: see `place`.
    """
    from tests.runtime import artifacts

    folder = tmp_path_factory.mktemp("run")
    artifacts.write_place(folder, layers=["sliding_attention"])
    return folder


@pytest.fixture
def place(shared_place: Path, tmp_path: Path) -> Path:
    """A test's own folder with that model, data and artifact, where its runs write their outputs."""
    from tests.runtime import artifacts

    return artifacts.copy_place(shared_place, tmp_path / "place")


@pytest.fixture(scope="session")
def lives(shared_place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """A starter of processes that run a train.py: one for all modules, because it imports for seconds."""
    from tests.runtime import artifacts
    from tests.runtime.lives import Lives

    lives = Lives(artifacts.environment(shared_place), tmp_path_factory.mktemp("lives"))
    yield lives
    lives.close()


def pytest_make_parametrize_id(val: object) -> str | None:
    """Return a case's id: the contents of a list, tuple or mapping, which pytest would only number."""
    if not isinstance(val, list | tuple | dict) or (text := _written(val)) is None:
        return None
    text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= 80 else f"{text[:77]}..."


def _written(value: object) -> str | None:
    """Return a value in a recipe's notation.

    Return None if a part of it is not a plain value, because its text may differ between processes.
    """
    if isinstance(value, dict):
        parts = [(_written(key), _written(part)) for key, part in value.items()]
        if any(None in pair for pair in parts):
            return None
        return "{" + ", ".join(f"{key}: {part}" for key, part in parts) + "}"
    if isinstance(value, list | tuple):
        items = [_written(part) for part in value]
        return None if None in items else f"[{', '.join(str(item) for item in items)}]"
    return str(value) if value is None or isinstance(value, str | int | float) else None
