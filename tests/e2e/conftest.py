"""Fixtures that download or train something once for all tests with real models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import gemma3_answers
from tests.e2e import chromium, docker_engine, gemma3, serving_artifacts, serving_image


@pytest.fixture(scope="session")
def checkpoint(root: Path) -> Path:
    """Make the base model Gemma 3 270M once, as a Hugging Face folder in build/."""
    directory = root / "build" / "gemma-3-270m"
    gemma3.run(root, "scripts/gemma3_270m.py", directory)
    return directory


@pytest.fixture(scope="session")
def questions() -> list[str]:
    """Return the held-out questions, which are in no training sample."""
    held_out, trained = (gemma3_answers.questions(name) for name in ("eval.jsonl", "train.jsonl"))
    assert not set(held_out) & set(trained)
    return held_out


@pytest.fixture(scope="session")
def tuned(root: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> gemma3.Tuned:
    """Fine-tune and merge Gemma 3 270M with its recipe's artifact."""
    return gemma3.tune(root, checkpoint, tmp_path_factory.mktemp("gemma3-270m"))


@pytest.fixture(scope="session")
def engine() -> Iterator[docker_engine.Engine]:
    """Start a Docker engine for the tests only."""
    with docker_engine.engine() as running:
        yield running


@pytest.fixture(scope="session")
def vllm_image(engine: docker_engine.Engine) -> str:
    """Make the image that replaces vllm/vllm-tpu as the base of serving images."""
    name, seconds = serving_image.image(engine)
    size = int(engine.docker("image", "inspect", "--format", "{{.Size}}", name))
    print(f"\n{name}: {size / 1e9:.2f} GB, made in {seconds:.0f} s")
    return name


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> serving_artifacts.Tiny:
    """Make and merge a tiny Gemma 4, with its adapter."""
    return serving_artifacts.tiny_gemma4(tmp_path_factory.mktemp("tiny-gemma4"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Tab]:
    """Open a tab for the pages of a module."""
    with chromium.tab(tmp_path_factory.mktemp("profile")) as one:
        yield one
