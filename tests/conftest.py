"""Settings that every test shares. JAX reads the environment when it is first imported."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
# What is tested are programs that run for a moment; LLVM's optimisations of them would take most of the time.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell's background job ignores SIGINT, and so would the scripts that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite the golden files")


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten."""
    return bool(request.config.getoption("--update"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT
