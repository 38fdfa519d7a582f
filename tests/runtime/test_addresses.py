"""Tests that the runtime refuses Python versions that crash when they write to a bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from recipec.runtime import stores
from recipec.runtime.addresses import check_uploads
from recipec.runtime.errors import UserError
from recipec.runtime.merging import merge
from recipec.runtime.merging.job import MergeSettings
from recipec.runtime.training.session import begin

BUCKET = "gs://bucket/run"
ANY = cast(Any, SimpleNamespace(output=Path("out")))
"""Stands for arguments that are not used before the addresses."""


@pytest.fixture
def python(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes the runtime see another version of Python."""

    def become(*version: int) -> None:
        monkeypatch.setattr(stores, "sys", SimpleNamespace(version_info=(*version, "final", 0)))

    return become


def test_python_version_that_crashes_in_gcs_writes_is_refused(python: Callable[..., None]) -> None:
    for version in ((3, 11, 9), (3, 12, 2), (3, 13, 0)):
        python(*version)
        check_uploads(BUCKET)
    python(3, 12, 1)
    check_uploads("run", Path("run"), "s3://bucket/run", "gs", None)
    with pytest.raises(UserError) as caught:
        check_uploads("run", None, "gcs://bucket/run")
    assert caught.value.message == "gcs://bucket/run: Python 3.12.1 crashes while gcsfs writes to a bucket"
    assert caught.value.help == "run it with Python 3.12.2 or newer, or with 3.11"


def training(directory: str, cache: str | None) -> None:
    begin(Path("artifact"), ANY, directory, ANY, cache, ANY)


def merging(*argv: str) -> None:
    arguments = merge.parse_arguments(Path("artifact"), argv)
    if arguments.import_adapter:
        merge.import_peft(arguments, ANY, Path("artifact"), "checkpoints")
    else:
        merge.run(arguments, ANY, Path(), "checkpoints", "merged", MergeSettings("bfloat16", "5GB"), True)


@pytest.mark.parametrize(
    ("work", "named"),
    [
        pytest.param(lambda: training(BUCKET, None), BUCKET, id="checkpoints"),
        pytest.param(lambda: training("/run", "gs://bucket/cache"), "gs://bucket/cache", id="cache"),
        pytest.param(lambda: merging("--output", BUCKET), f"{BUCKET}/merged", id="merged"),
        pytest.param(lambda: merging("--checkpoint", BUCKET), BUCKET, id="trained"),
        pytest.param(lambda: merging("--import-adapter", "a", "--checkpoint", BUCKET), BUCKET, id="imported"),
    ],
)
def test_train_and_merge_refuse_a_crashing_python_first(
    work: Callable[[], None], named: str, python: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    python(3, 12, 1)
    with pytest.raises(UserError, match=f"^{named}: Python 3.12.1 crashes"):
        work()
