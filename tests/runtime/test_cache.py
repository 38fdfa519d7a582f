"""Tests that a run uses programs that an earlier process compiled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipec.runtime import cache
from tests import tiny
from tests.conftest import ROOT

RUN = """
import json, sys
from collections import Counter
from pathlib import Path
import tests.conftest
import jax, optax
from runtime.cache import keep_compiled
from tests.runtime import training

events = Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.rpartition("/")[2]]))
model, folder, caches = sys.argv[1:]
keep_compiled(caches)
mesh, built = training.build(Path(model), {"fsdp": 4, "tp": 2}, remat="none")
with mesh:
    trainer = training.trainer(built, mesh, Path(folder) / "run", optax.adamw(1e-3), every_steps=10)
    outcome = training.fit(trainer, Path(folder), 1, lambda step: 1e-3)
print(json.dumps([events, outcome.loss]))
"""


def run(*arguments: Path) -> tuple[dict[str, int], float]:
    """Run one step in a new process, and return jax's cache counters and the loss."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    events, loss = json.loads(found.stdout.splitlines()[-1])
    return events, loss


@pytest.mark.nightly
def test_a_second_run_compiles_nothing(tmp_path: Path) -> None:
    tiny.make_gemma3(tmp_path / "model", num_hidden_layers=1)
    first, loss = run(tmp_path / "model", tmp_path / "1", tmp_path / "cache")
    assert first["cache_misses"] > 10
    files = {path.name for path in (tmp_path / "cache" / "xla").iterdir() if path.name.endswith("-cache")}
    assert len(files) == first["cache_misses"]
    second, again = run(tmp_path / "model", tmp_path / "2", tmp_path / "cache")
    assert second.get("cache_misses", 0) == 0
    assert second["cache_hits"] == second["compile_requests_use_cache"]
    assert again == loss


SMALL = """
import sys
from collections import Counter
import jax
from runtime.cache import keep_compiled

events = Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.rpartition("/")[2]]))
keep_compiled(sys.argv[1])
jax.jit(lambda x: x * 2)(1.0)
print(events["cache_hits"], events["cache_misses"])
"""


def test_copied_compilation_cache_is_used(tmp_path: Path) -> None:
    def hits_and_misses(folder: Path) -> list[str]:
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", SMALL, str(folder)]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return done.stdout.split()

    hits, misses = hits_and_misses(tmp_path / "one")
    assert hits == "0"
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert hits_and_misses(tmp_path / "two") == [misses, "0"]


def test_cache_directory_resolves_relative_home_and_bucket_paths(tmp_path: Path) -> None:
    assert cache.cache_directory(None, tmp_path) is None
    assert cache.cache_directory("cache", tmp_path) == str(tmp_path / "cache")
    assert cache.cache_directory("/somewhere/else", tmp_path) == "/somewhere/else"
    assert cache.cache_directory("~/cache", tmp_path) == str(Path.home() / "cache")
    assert cache.cache_directory("gs://bucket/cache", tmp_path) == "gs://bucket/cache"


def test_unwritable_compilation_cache_is_reported_and_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import jax

    (tmp_path / "cache").write_text("a file where the folder should be")
    before = jax.config.jax_compilation_cache_dir
    cache.keep_compiled(str(tmp_path / "cache"))
    assert jax.config.jax_compilation_cache_dir == before
    assert f"{tmp_path}/cache{os.sep}xla cannot be written" in capsys.readouterr().err
