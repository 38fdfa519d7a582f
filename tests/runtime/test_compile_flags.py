"""Tests of the flags that a run gives to libtpu."""

from __future__ import annotations

import os

import pytest

from recipec.runtime.model.mesh import LIBTPU_FLAGS, compile_with

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
