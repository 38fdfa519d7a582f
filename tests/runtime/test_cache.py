"""Tests of the cache of compiled programs, and of the compiler's flags."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from recipec.runtime import compilation_cache
from recipec.runtime.model.sharding import LIBTPU_FLAGS, compile_with
from tests.conftest import ROOT

SMALL = """
import sys
from collections import Counter
import jax
from runtime.compilation_cache import keep_compiled

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
    assert compilation_cache.cache_directory(None, tmp_path) is None
    assert compilation_cache.cache_directory("cache", tmp_path) == str(tmp_path / "cache")
    assert compilation_cache.cache_directory("/somewhere/else", tmp_path) == "/somewhere/else"
    assert compilation_cache.cache_directory("~/cache", tmp_path) == str(Path.home() / "cache")
    assert compilation_cache.cache_directory("gs://bucket/cache", tmp_path) == "gs://bucket/cache"


def test_unwritable_compilation_cache_is_reported_and_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    before = jax.config.jax_compilation_cache_dir
    compilation_cache.keep_compiled(str(tmp_path / "cache"))
    assert jax.config.jax_compilation_cache_dir == before
    assert f"{tmp_path}/cache{os.sep}xla cannot be written" in capsys.readouterr().err


RECIPE = ("--xla_tpu_scoped_vmem_limit_kib=65536", "--xla_enable_async_all_gather=true")


def test_recipe_libtpu_flags_are_set_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIBTPU_FLAGS, raising=False)
    compile_with(())
    assert LIBTPU_FLAGS not in os.environ
    monkeypatch.setenv(LIBTPU_FLAGS, "")
    compile_with(RECIPE)
    assert os.environ[LIBTPU_FLAGS] == " ".join(RECIPE)


def test_environment_flag_overrides_recipe_flag_and_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LIBTPU_FLAGS, "--xla_tpu_scoped_vmem_limit_kib=98304 --xla_other=1")
    compile_with(RECIPE)
    found = os.environ[LIBTPU_FLAGS].split()
    assert found == [RECIPE[1], "--xla_tpu_scoped_vmem_limit_kib=98304", "--xla_other=1"]
    assert capsys.readouterr().err == f"{LIBTPU_FLAGS} replaces the recipe's {RECIPE[0]}\n"
