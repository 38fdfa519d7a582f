"""Tests of output folders that a merge may not write to: their files stay, and the message says why."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from recipec.runtime.merging.job import output_folder
from recipec.runtime.merging.journal import JOURNAL
from recipec.runtime.merging.output_folder import RemoteFolder
from recipec.runtime.peft.peft_names import WEIGHTS
from recipec.runtime.weights.checkpoint import INDEX
from tests.runtime.llama_bases import contents, write_base
from tests.runtime.merge_faults.merges import Place, Run, interrupt, times


def test_merge_leaves_read_only_output_unchanged_and_resumes_once_writable(
    place: Place, run: Run, tmp_path: Path
) -> None:
    """Try a new folder, one with an unfinished merge, and one with a finished merge."""
    disk = tmp_path / "disk"
    with pytest.MonkeyPatch.context() as patched:
        interrupt(disk / "begun", run, after="model-00001-of-00003.safetensors")
        assert run(disk / "whole").status == 0
        before = contents(disk)
        refuse_writes(patched)
        for name in ("new", "begun"):
            run(disk / name).refused(
                f"{disk / name}: cannot be written: Read-only file system", "get access to it", "--output"
            )
        assert run(disk / "whole").out == f"{disk / 'whole'}: already holds this merge\n"
        assert contents(disk) == before
    assert run(disk / "begun").status == 0
    place.expect(disk / "begun")


def refuse_writes(patched: pytest.MonkeyPatch) -> None:
    opened, made = Path.open, Path.mkdir

    def open_file(path: Path, mode: str = "r", *rest: Any, **options: Any) -> IO[Any]:
        if "w" in mode:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, mode, *rest, **options)

    def make(path: Path, *rest: Any, **options: Any) -> None:
        if not path.exists():
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        made(path, *rest, **options)

    patched.setattr(Path, "open", open_file)
    patched.setattr(Path, "mkdir", make)


@pytest.mark.parametrize("output", ["file", "file/below", "merged"])
def test_merge_refuses_output_path_that_is_a_file(output: str, run: Run, tmp_path: Path) -> None:
    """In the last case, refuse a file in the adapter's place before the weights are written."""
    for name in ("file", "merged-adapter"):
        (tmp_path / name).write_text("mine")
    run(tmp_path / output).refused("is a file, not a folder", "another folder with --output")
    assert contents(tmp_path) == {"file": b"mine", "merged-adapter": b"mine"}


def test_merge_refuses_output_folder_locked_by_another_process(
    place: Place, run: Run, tmp_path: Path
) -> None:
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)"
    code += "; print(1, flush=True); input()"
    for locked in ("merged", "merged-adapter"):
        (tmp_path / locked).mkdir()
        command = [sys.executable, "-S", "-c", code, str(tmp_path / locked)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None and other.stdout.readline()
            run(tmp_path / "merged").refused("another process is writing it", "wait until that process ends")
            assert contents(tmp_path) == {}
            other.communicate("\n")
    assert run(tmp_path / "merged").status == 0
    place.expect(tmp_path / "merged")


def test_merge_refuses_folder_of_another_merge_and_names_the_difference(
    place: Place, run: Run, tmp_path: Path
) -> None:
    """Refuse unfinished and finished merges, name the difference, and change nothing."""
    other_base = write_base(tmp_path / "base", seed=1)
    interrupt(tmp_path / "begun", run, after="model-00001-of-00003.safetensors")
    assert run(tmp_path / "whole").status == 0
    before, stamps = contents(tmp_path), times(tmp_path)
    for folder, holds in (("begun", ", which did not finish"), ("whole", "")):
        for change, differs in (
            (["--step", "2"], "another checkpoint, another step"),
            ({"dtype": "float32"}, "another dtype"),
            ({"max_shard_size": "base"}, "another max_shard_size"),
            ({"chat_template": "{{ x }}"}, "another chat_template"),
            ({"base": other_base}, "another base"),
        ):
            argv, settings = (change, {}) if isinstance(change, list) else ([], change)
            outcome = run(tmp_path / folder, *argv, **settings)
            outcome.refused(f"{tmp_path / folder}: holds another merge{holds} ({differs})", "--output")
    assert contents(tmp_path) == before and times(tmp_path) == stamps
    assert run(tmp_path / "begun").status == 0
    place.expect(tmp_path / "begun")


@pytest.mark.parametrize("name", ["below/notes.txt", ".notes.txt.partial"])
def test_merge_refuses_folder_with_user_files_and_keeps_them(
    name: str, place: Place, run: Run, tmp_path: Path
) -> None:
    """Put files next to the weights or the adapter, alone or next to an unfinished merge."""
    for number, folder in enumerate(("merged", "merged-adapter")):
        for begun in (False, True):
            target = tmp_path / f"{number}-{begun}" / "merged"
            mine = target.with_name(folder) / name
            if begun:
                last = "model-00003-of-00003.safetensors"
                interrupt(target, run, after=last if number == 0 else f"../merged-adapter/{WEIGHTS}")
                assert number == 0 or (target.with_name(folder) / JOURNAL).exists()
            mine.parent.mkdir(parents=True, exist_ok=True)
            mine.write_text("mine")
            before, stamps = contents(target.parent), times(target.parent)
            words = f"holds {name}, which is not part of a merge" if begun else "is not empty"
            run(target).refused(f"{target.with_name(folder)}: {words}", "another")
            assert contents(target.parent) == before and times(target.parent) == stamps
            mine.unlink()
            with contextlib.suppress(OSError):
                mine.parent.rmdir()
            assert run(target).status == 0
            place.expect(target)


def test_repeated_merge_leaves_a_finished_merge_unchanged(place: Place, run: Run, tmp_path: Path) -> None:
    target = tmp_path / "merged"
    assert run(target).status == 0
    (target / "notes.txt").write_text("mine")
    before = times(tmp_path)
    outcome = run(target)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == f"{target}: already holds this merge\n"
    assert times(tmp_path) == before


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", INDEX])
def test_repeated_merge_refuses_changed_or_missing_output_file(
    name: str, place: Place, run: Run, tmp_path: Path
) -> None:
    """Name the missing file, or the file of another size."""
    target = tmp_path / "merged"
    assert run(target).status == 0
    size = (target / name).stat().st_size
    with (target / name).open("ab") as file:
        file.write(b"x")
    before = contents(tmp_path)
    run(target).refused(f"holds this merge, but {name} is {size + 1} bytes, not {size}", "remove it")
    (target / name).unlink()
    run(target).refused(f"holds this merge, but {name} is missing", "remove it", "--output")
    assert contents(tmp_path) == {key: data for key, data in before.items() if key != f"merged/{name}"}


def test_repeated_merge_writes_a_missing_adapter_and_keeps_the_weights(
    place: Place, run: Run, tmp_path: Path
) -> None:
    """Write it again, as for a recipe that requests an adapter later."""
    assert run(tmp_path / "merged", adapter=False).status == 0
    before = times(tmp_path / "merged")
    assert run(tmp_path / "merged").status == 0
    place.expect(tmp_path / "merged")
    assert times(tmp_path / "merged") == before


def test_merge_refuses_invalid_journal_and_keeps_it(run: Run, tmp_path: Path) -> None:
    for content in (b"", b"[]", b"{}", b'{"identity": 1}', b"\xff"):
        (tmp_path / "merged").mkdir(exist_ok=True)
        (tmp_path / "merged" / JOURNAL).write_bytes(content)
        run(tmp_path / "merged").refused("which did not finish (it cannot be read)", "remove the folder")
        assert contents(tmp_path) == {f"merged/{JOURNAL}": content}


def test_merge_to_a_remote_address_resumes_after_write_errors(
    place: Place, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail at a file of weights: named files are complete, and a retry ends as undisturbed."""
    import fsspec

    memory = fsspec.filesystem("memory")
    with contextlib.suppress(FileNotFoundError):
        memory.rm("/faults", recursive=True)
    create = RemoteFolder.create
    try:
        for at in (0, 2):
            begun = 0

            @contextlib.contextmanager
            def fail(self: RemoteFolder, name: str, at: int = at) -> Iterator[IO[bytes]]:
                nonlocal begun
                begun += 1
                with create(self, name) as file:
                    yield file
                    if begun > at:
                        raise OSError("the connection broke")

            target = f"memory://faults/{at}/merged"
            with monkeypatch.context() as patched:
                patched.setattr(RemoteFolder, "create", fail)
                run(target).refused("cannot be written: the connection broke")
            folder = output_folder(target)
            for name in folder.names():
                assert name == JOURNAL or folder.read(name) == place.merged[name], at
            assert INDEX not in folder.names()
            assert run(target).status == 0
            for address, whole in ((target, place.merged), (f"{target}-adapter", place.adapter)):
                folder = output_folder(address)
                assert {name: folder.read(name) for name in folder.names()} == whole, at
    finally:
        memory.rm("/faults", recursive=True)
