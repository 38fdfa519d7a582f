"""Tests of the known hashes of a base's files: where they are found, and how other content is detected."""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from recipec.runtime.errors import UserError
from recipec.runtime.merging.known import PIECE, BaseSums, known_hashes

FILE = "model.safetensors"
CONTENT = bytes(range(256)) * 5
DIGEST = hashlib.sha256(CONTENT).hexdigest()
OTHER = "0" * 64


def in_cache(root: Path) -> Path:
    """Write huggingface_hub's cache layout. The large file's blob is in the store shared by repositories."""
    repo = root / "models--owner--tiny"
    snapshot, blobs, store = repo / "snapshots" / ("a" * 40), repo / "blobs", root / "blobs" / "12"
    for folder in (snapshot, blobs, store):
        folder.mkdir(parents=True)
    (store / ("12" * 32)).write_bytes(CONTENT)
    (blobs / DIGEST).symlink_to(f"../../blobs/12/{'12' * 32}")
    (snapshot / FILE).symlink_to(f"../../blobs/{DIGEST}")
    (blobs / ("b" * 40)).write_bytes(b"small")
    (snapshot / "small.safetensors").symlink_to(f"../../blobs/{'b' * 40}")
    return snapshot


def downloaded(root: Path) -> Path:
    """Write huggingface_hub's own download metadata of a large file and of a file in git."""
    from huggingface_hub._local_folder import write_download_metadata

    for name, content, etag in ((FILE, CONTENT, DIGEST), ("small.safetensors", b"small", "b" * 40)):
        (root / name).write_bytes(content)
        write_download_metadata(root, name, "a" * 40, etag)
    return root


def with_sums(root: Path) -> Path:
    (root / FILE).write_bytes(CONTENT)
    (root / "other.safetensors").write_bytes(CONTENT)
    (root / "SHA256SUMS").write_text(
        f"# a comment\n\n{DIGEST.upper()} *./{FILE}\n"
        f"SHA256 (other.safetensors) = {DIGEST}\n{OTHER}  gone.safetensors\n"
    )
    return root


def merged(root: Path) -> Path:
    (root / FILE).write_bytes(CONTENT)
    files = {FILE: {"size": len(CONTENT), "sha256": DIGEST}, "config.json": {"size": 2, "sha256": OTHER}}
    (root / "merge.json").write_text(json.dumps({"merge": 1, "files": files}))
    return root


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (in_cache, {FILE: DIGEST}),
        (downloaded, {FILE: DIGEST}),
        (with_sums, {FILE: DIGEST, "other.safetensors": DIGEST}),
        (merged, {FILE: DIGEST}),
    ],
)
def test_known_hashes_come_from_every_source(
    make: Callable[[Path], Path], expected: dict[str, str], tmp_path: Path
) -> None:
    found = known_hashes(make(tmp_path))
    assert found == expected
    assert json.loads(json.dumps(found)) == copy.deepcopy(found) == expected


def test_symlink_into_hub_cache_gives_cache_hashes(tmp_path: Path) -> None:
    snapshot = in_cache(tmp_path / "hub")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / FILE).symlink_to(snapshot / FILE)
    assert known_hashes(folder) == {FILE: DIGEST}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (".cache/huggingface/download/model.safetensors.metadata", "commit\n"),
        (".cache/huggingface/download/model.safetensors.metadata", "commit\nW/nothing\n1\n"),
        ("merge.json", '["of another program"]'),
        ("merge.json", '{"base": "google/gemma-3-270m-it", "tensors": 126}'),
        ("SHA256SUMS", f"{OTHER}  weights.gguf\n"),
    ],
)
def test_files_without_weight_hashes_are_ignored(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(CONTENT)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(content)
    assert known_hashes(tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("SHA256SUMS", b"<html>not found</html>\n", "SHA256SUMS:1: not a line of sha256sum"),
        ("SHA256SUMS", f"{DIGEST}  {FILE}\n{DIGEST[:40]}".encode(), "SHA256SUMS:2: not a line of sha256sum"),
        (
            "SHA256SUMS",
            f"{DIGEST}  {FILE}\n{OTHER}  {FILE}\n".encode(),
            "SHA256SUMS:2: a second hash of model",
        ),
        ("SHA256SUMS", b"\xff\xfe\x00", "SHA256SUMS: not text"),
        ("merge.json", b'{"merge": 1, "files": {"mod', "merge.json: not JSON"),
        ("merge.json", b'{"merge": 1}', "its list of files is damaged"),
        ("merge.json", b'{"merge": 1, "files": {"model.safetensors": {}}}', "its list of files is damaged"),
        (
            "merge.json",
            b'{"merge": 1, "files": {"model.safetensors": {"sha256": "00"}}}',
            "its list of files is damaged",
        ),
    ],
)
def test_damaged_hash_lists_are_refused(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(CONTENT)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        known_hashes(tmp_path)
    assert words in caught.value.message
    assert caught.value.help


def test_hashes_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    downloaded(tmp_path)
    (tmp_path / "SHA256SUMS").write_text(f"{DIGEST}  {FILE}\n")
    assert known_hashes(tmp_path) == {FILE: DIGEST}
    (tmp_path / "SHA256SUMS").write_text(f"{OTHER}  {FILE}\n")
    with pytest.raises(
        UserError, match=r"model.safetensors.metadata and SHA256SUMS give different hashes for it"
    ):
        known_hashes(tmp_path)


def feed(sums: BaseSums, file: str, content: bytes, block: int = 100) -> None:
    for start in range(0, len(content), block):
        sums.feed(file, memoryview(content)[start : start + block])
    sums.finish_file(file, len(content))


def test_base_sums_verify_correct_files() -> None:
    large = CONTENT * (2 * PIECE // len(CONTENT) + 1)  # hashed in three pieces
    known = {"a.safetensors": DIGEST, "b.safetensors": hashlib.sha256(large).hexdigest()}
    sums = BaseSums(known, "base")
    feed(sums, "a.safetensors", CONTENT)
    feed(sums, "unknown.safetensors", b"whatever")
    feed(sums, "b.safetensors", large, len(large))
    assert sums.close() == known


def test_base_sums_release_each_block_after_hashing() -> None:
    """Release memory after hashing, which maps released parts of a file again."""
    sums = BaseSums({FILE: DIGEST}, "base")
    done: list[int] = []
    for number, start in enumerate(range(0, len(CONTENT), 100)):
        sums.feed(FILE, CONTENT[start : start + 100], lambda number=number: done.append(number))
    sums.finish_file(FILE)
    assert sums.close() == {FILE: DIGEST}
    assert done == list(range(13))


def test_base_sums_give_no_result_for_unfinished_files() -> None:
    sums = BaseSums({FILE: DIGEST}, "base")
    sums.feed(FILE, CONTENT[:10])
    assert sums.close() == {}


def test_base_sums_start_no_thread_without_known_hashes() -> None:
    sums = BaseSums({}, "base")
    feed(sums, FILE, CONTENT)
    assert not any(thread.name == "base-sums" for thread in threading.enumerate())
    assert sums.close() == {}


@pytest.mark.parametrize(
    ("make", "source", "help"),
    [
        (in_cache, "Hugging Face's cache", f"{'12' * 32}, and the next run downloads it again"),
        (
            downloaded,
            ".cache/huggingface/download/model.safetensors.metadata",
            "remove it and download it again",
        ),
        (with_sums, "SHA256SUMS", "download the checkpoint again"),
        (merged, "merge.json", "download the checkpoint again"),
    ],
)
def test_flipped_bit_error_names_file_and_hash_source(
    make: Callable[[Path], Path], source: str, help: str, tmp_path: Path
) -> None:
    folder = make(tmp_path)
    content = bytearray((folder / FILE).read_bytes())
    content[700] ^= 4
    (folder / FILE).write_bytes(content)
    sums = BaseSums(known_hashes(folder), "base")
    feed(sums, FILE, bytes(content))
    with pytest.raises(UserError) as caught:
        sums.close()
    found = hashlib.sha256(content).hexdigest()[:12]
    assert caught.value.message == (
        f"base/{FILE}: is not the file that its hash names: {source} says {DIGEST[:12]}..., "
        f"its content has {found}..."
    )
    assert caught.value.help is not None and help in caught.value.help


def test_wrong_file_is_reported_while_next_file_is_read() -> None:
    """Report a wrong file soon, and never block, however much data follows."""
    sums = BaseSums({"a.safetensors": OTHER, "b.safetensors": DIGEST}, "base")
    feed(sums, "a.safetensors", CONTENT)
    with pytest.raises(UserError, match=r"a\.safetensors: is not the file"):
        for _ in range(1_000_000):
            sums.feed("b.safetensors", CONTENT)
    with pytest.raises(UserError, match=r"a\.safetensors: is not the file"):
        sums.close()


def test_abandon_ends_hash_thread() -> None:
    before = threading.active_count()
    sums = BaseSums({FILE: OTHER}, "base")
    sums.feed(FILE, CONTENT)
    assert threading.active_count() == before + 1
    sums.abandon()
    assert threading.active_count() == before


def test_missing_bytes_raise_assertion_instead_of_damage_error() -> None:
    sums = BaseSums({FILE: DIGEST}, "base")
    sums.feed(FILE, CONTENT[8:])
    with pytest.raises(AssertionError, match="1272 of 1280 bytes were fed"):
        sums.finish_file(FILE, len(CONTENT))
    sums.abandon()
