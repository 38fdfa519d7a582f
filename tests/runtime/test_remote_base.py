"""Tests that a base checkpoint at an address equals the same local folder, without being copied."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from recipec.compiler import catalog
from recipec.compiler.miniature.small_checkpoint import complete, write_checkpoint
from recipec.runtime import stores
from recipec.runtime.settings import ModelSettings
from recipec.runtime.weights import headers
from recipec.runtime.weights.checkpoint import CONFIG, INDEX, HFCheckpoint
from recipec.runtime.weights.locate import locate_model, open_base
from tests.refusals import refusal

MEMORY = fsspec.filesystem("memory")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a Gemma 4 in three files, with a side folder and files that are no part of a checkpoint."""
    target = tmp_path_factory.mktemp("remote") / "model"
    config = json.loads(json.dumps(complete(catalog.entries()["recipec/tiny-gemma4"]["config"])))
    write_checkpoint(target, config, shards=3)
    (target / "additional_chat_templates").mkdir()
    (target / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (target / "original").mkdir()
    (target / "original" / "params.json").write_text("{}")
    (target / ".gitattributes").write_text("*.safetensors filter=lfs")
    (target / "training_args.bin").write_bytes(b"x")
    return target


@pytest.mark.parametrize("header_at_once", [headers.HEAD, 16])
def test_remote_tensors_and_side_files_match_local_folder(
    folder: Path, uploaded: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch, header_at_once: int
) -> None:
    local = HFCheckpoint.open(folder)
    # Small pieces, so that a tensor takes several rounds of several requests.
    monkeypatch.setattr(stores, "PIECE", 1000)
    monkeypatch.setattr(stores, "AT_ONCE", 3)
    monkeypatch.setattr(headers, "HEAD", header_at_once)
    remote = HFCheckpoint.open(uploaded(folder))
    remote.verify()
    assert remote.directory is None and local.directory == folder
    assert remote.headers == local.headers and list(remote.tensors) == list(local.tensors)
    assert (
        remote.side_files == local.side_files and "additional_chat_templates/tools.jinja" in local.side_files
    )
    assert not {"original/params.json", ".gitattributes", "training_args.bin"} & set(local.side_files)
    assert remote.config == local.config and remote.prefix == local.prefix and remote.index == INDEX
    for name in local.tensors:
        assert remote.bytes_of(name) == local.bytes_of(name) and remote.bytes_of(name).readonly
        np.testing.assert_array_equal(remote.read(name), local.read(name))
        remote.release(name)
    for name in (*local.side_files, INDEX):
        assert remote.side_file(name) == local.side_file(name) == (folder / name).read_bytes()


def test_byte_range_of_tensor_is_read(folder: Path, uploaded: Callable[[Path], str]) -> None:
    for base in (HFCheckpoint.open(folder), HFCheckpoint.open(uploaded(folder))):
        name = base.prefix + "embed_tokens.weight"
        whole = bytes(base.bytes_of(name))
        assert base.bytes_of(name, 100, 5000) == whole[100:5000]
        assert base.bytes_of(name, len(whole) - 3, len(whole) + 50) == whole[-3:]


BROKEN: dict[str, Callable[[Path], object]] = {
    "nothing of it": lambda folder: shutil.rmtree(folder),
    "a missing file": lambda folder: shard(folder).unlink(),
    "within the header": lambda folder: shard(folder).write_bytes(shard(folder).read_bytes()[:100]),
    "a web page": lambda folder: (folder / "tokenizer.json").write_text("<!DOCTYPE html>"),
}


def shard(folder: Path) -> Path:
    """Return the second weight file."""
    return folder / "model-00002-of-00003.safetensors"


@pytest.mark.parametrize("what", BROKEN)
def test_broken_remote_base_gives_same_error_as_local_folder(
    folder: Path, tmp_path: Path, uploaded: Callable[[Path], str], what: str
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    BROKEN[what](copy)
    here = refusal(lambda: HFCheckpoint.open(copy))
    address = uploaded(copy)
    there = refusal(lambda: HFCheckpoint.open(address))
    assert here.message.startswith(str(copy)) and there.message.startswith(address)
    assert (there.message.removeprefix(address), there.help) == (
        here.message.removeprefix(str(copy)),
        here.help,
    )


def test_remote_file_truncated_or_removed_after_open_gives_error(
    folder: Path, uploaded: Callable[[Path], str]
) -> None:
    address = uploaded(folder)
    base = HFCheckpoint.open(address)
    name = list(base.headers[shard(folder).name].tensors)[-1]
    path = f"{address}/{shard(folder).name}"
    MEMORY.pipe_file(path, MEMORY.cat_file(path)[:-1])
    error = refusal(lambda: base.read(name))
    assert error.message.startswith(f"{path}: cannot be read: ends before byte") and error.help


def test_unopenable_address_gives_error_with_help(no_buckets: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(lambda: HFCheckpoint.open("s3://bucket/model")).help == "pip install s3fs"
    training = ModelSettings(id="s3://bucket/model", family="gemma4")
    assert refusal(lambda: locate_model(training)).help == "pip install s3fs"
    assert "nowhere://x" in refusal(lambda: HFCheckpoint.open("nowhere://x")).message

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError("403: Forbidden")

    monkeypatch.setattr(type(MEMORY), "ls", refused)
    error = refusal(lambda: HFCheckpoint.open("memory://model"))
    assert "memory://model cannot be opened: 403" in error.message and "credentials" in str(error.help)


def test_merging_reads_an_address_in_place_and_training_copies_it(
    folder: Path, tmp_path: Path, uploaded: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = uploaded(folder)
    model = ModelSettings(id=address, family="gemma4")
    assert open_base(model).name == address and not (tmp_path / "cache").exists()
    assert open_base(model, folder).directory == folder
    assert open_base(ModelSettings(id="some/model", family="gemma4"), address).name == address
    assert open_base(ModelSettings(id=str(folder), family="gemma4")).directory == folder
    copied = locate_model(model)
    assert copied.is_relative_to(tmp_path / "cache")
    assert HFCheckpoint.open(copied).headers == HFCheckpoint.open(folder).headers


def test_copy_of_a_bucket_has_only_its_files_and_names_a_full_disk(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bucket = tmp_path / "bucket"
    write_checkpoint(bucket, json.loads((folder / CONFIG).read_text()), shards=1)
    model = ModelSettings(id=f"file://{bucket}", family="gemma4")
    copied = locate_model(model)
    assert HFCheckpoint.open(copied).files == ("model.safetensors",)
    assert {path.name for path in copied.iterdir()} == {path.name for path in bucket.iterdir()}
    stamp = (copied / "model.safetensors").stat().st_mtime_ns
    assert (locate_model(model) / "model.safetensors").stat().st_mtime_ns == stamp, "copied once"
    (bucket / "model.safetensors").unlink()
    shutil.copytree(folder, bucket, dirs_exist_ok=True)
    copied = locate_model(model)
    assert HFCheckpoint.open(copied).headers == HFCheckpoint.open(folder).headers

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (bucket / "new.json").write_text("{}")
    monkeypatch.setattr(shutil, "copyfileobj", full)
    error = refusal(lambda: locate_model(model))
    assert error.message == f"{copied}: the copy of {model.id} does not fit: No space left on device"
    assert "XDG_CACHE_HOME" in str(error.help)
