"""Tests of `recipe serve pin` and `up` with a real engine, and a registry on this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deployment.up_artifact import build
from tests.e2e.docker_engine import Engine
from tests.e2e.image_registry import STATUS, Registry, registry
from tests.ports import free_port

RECIPE = """\
recipe: 1
# Only its server matters here.
serve:
  image: "{image}"   # moves
"""

Recipe = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def images() -> Iterator[Registry]:
    with registry() as running:
        yield running


@pytest.fixture
def recipe(engine: Engine, tmp_path: Path) -> Recipe:
    """Return a function that runs `recipe serve` in a folder and returns its status and both streams."""

    def run(*words: str | Path) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "recipec.compiler.cli.main", "serve", *map(str, words)],
            cwd=tmp_path,
            env=engine.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(done.stdout)
        return done.returncode, done.stdout

    return run


@pytest.mark.e2e
def test_pin_follows_a_tag_that_moves(images: Registry, recipe: Recipe, tmp_path: Path) -> None:
    name = f"{images.address}/vllm/vllm-tpu:v0.32.0"
    path = tmp_path / "a.yaml"
    path.write_text(RECIPE.format(image=name))
    status, told = recipe("pin", path)
    assert status == 1 and f"{images.address} has no image {name} for this user:" in told
    assert path.read_text() == RECIPE.format(image=name)
    before = name
    for seed in (1, 2):
        digest = images.publish("v0.32.0", seed)
        assert recipe("pin", path, "--check")[0] == 1
        status, told = recipe("pin", path)
        assert (status, told) == (0, f"a.yaml: image: {name}@{digest} (was {before})\n")
        before = f"{name}@{digest}"
        assert path.read_text() == RECIPE.format(image=before)
        assert recipe("pin", path, "--check") == (
            0,
            f"a.yaml has image: {before}, as the registry has it now\n",
        )


@pytest.mark.e2e
@pytest.mark.parametrize("detach", [(), ("--detach",)])
def test_up_pulls_the_pinned_image_and_says_why_its_server_ended(
    detach: tuple[str, ...], images: Registry, recipe: Recipe, engine: Engine, tmp_path: Path
) -> None:
    digest = images.publish("v0.32.0", 3 + len(detach))
    # The tag moves on, and the pinned image stays.
    images.publish("v0.32.0", 9)
    name = f"{images.address}/vllm/vllm-tpu:v0.32.0@{digest}"
    folder = build(tmp_path, f"serve.image={name}", f"serve.port={free_port()}")
    status, told = recipe("up", folder, *detach)
    assert status == 1 and f"pulling {name}: 3.0 MB, compressed\n" in told
    why = f"error: sample did not stay up: it ended with exit status {STATUS}: ValueError: no TPU\n"
    assert why in told
    assert engine.containers() == []
    assert "pulling" not in recipe("up", folder, *detach)[1]


@pytest.mark.e2e
def test_detached_server_runs_once_its_health_check_passes(
    images: Registry, recipe: Recipe, engine: Engine, tmp_path: Path
) -> None:
    digest = images.publish("healthy", 20, healthy=True)
    name = f"{images.address}/vllm/vllm-tpu:healthy@{digest}"
    folder = build(tmp_path, f"serve.image={name}", f"serve.port={free_port()}")
    status, told = recipe("up", folder, "--detach", "--wait", "3")
    assert status == 0 and "sample is ready: http://127.0.0.1:" in told
    form = "{{.State.Health.Status}} {{.HostConfig.RestartPolicy.Name}}"
    assert engine.docker("inspect", "--format", form, "sample-vllm-1").split() == [
        "healthy",
        "unless-stopped",
    ]
    assert recipe("down", folder, "--volumes")[0] == 0
    assert engine.containers() == []
    status, told = recipe("up", folder, "--detach", "--wait", "0.02")
    assert status == 1 and "error: sample did not become ready within 1 s" in told
    assert engine.containers() == []
