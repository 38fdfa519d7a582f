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

from recipec.runtime.merging import folder as folders
from recipec.runtime.merging.folder import LocalFolder, RemoteFolder, output_folder
from recipec.runtime.merging.journal import JOURNAL
from recipec.runtime.peft.adapter import WEIGHTS
from recipec.runtime.weights.checkpoint import INDEX
from tests.runtime.llama_bases import contents, write_base
from tests.runtime.merge_faults.disks import mounted, remount
from tests.runtime.merge_faults.merges import Place, Run, interrupt, times


def test_an_output_that_is_read_only_is_left_and_goes_on_once_it_can_be_written(
    place: Place, run: Run, tmp_path: Path
) -> None:
    """Try a new folder, one with an unfinished merge, and one with a finished merge."""
    disk = tmp_path / "disk"
    with mounted(disk, "size=4m") as real, pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalFolder, "free", lambda self: None)
        interrupt(disk / "begun", run, after="model-00001-of-00003.safetensors")
        assert run(disk / "whole").status == 0
        before = contents(disk)
        if real:
            remount(disk, "ro")
        else:
            refuse_writes(patched)
        for name in ("new", "begun"):
            run(disk / name).refused(
                f"{disk / name}: cannot be written: Read-only file system", "get access to it", "--output"
            )
        assert run(disk / "whole").out == f"{disk / 'whole'}: already holds this merge\n"
        assert contents(disk) == before
        if real:
            remount(disk, "rw")
        patched.undo()
        patched.setattr(LocalFolder, "free", lambda self: None)
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
def test_a_file_where_a_folder_should_be_stays(output: str, run: Run, tmp_path: Path) -> None:
    """In the last case, refuse a file in the adapter's place before the weights are written."""
    for name in ("file", "merged-adapter"):
        (tmp_path / name).write_text("mine")
    run(tmp_path / output).refused("is a file, not a folder", "another folder with --output")
    assert contents(tmp_path) == {"file": b"mine", "merged-adapter": b"mine"}


def test_a_folder_that_another_process_writes_is_refused(place: Place, run: Run, tmp_path: Path) -> None:
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


def test_a_folder_with_another_merge_is_refused_with_what_differs(
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


@pytest.mark.parametrize(
    "name", ["notes.txt", "below/notes.txt", ".notes.txt.partial", "chat_template.jinja"]
)
def test_a_users_files_in_the_folder_stay(name: str, place: Place, run: Run, tmp_path: Path) -> None:
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


def test_a_finished_merge_is_left_alone(place: Place, run: Run, tmp_path: Path) -> None:
    target = tmp_path / "merged"
    assert run(target).status == 0
    (target / "notes.txt").write_text("mine")
    before = times(tmp_path)
    outcome = run(target)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == f"{target}: already holds this merge\n"
    assert times(tmp_path) == before


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "tokenizer.json", INDEX])
def test_a_finished_merge_that_was_changed_is_not_called_finished(
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


def test_an_adapter_that_was_removed_is_written_again(place: Place, run: Run, tmp_path: Path) -> None:
    """Write it again, as for a recipe that requests an adapter later."""
    assert run(tmp_path / "merged", adapter=False).status == 0
    before = times(tmp_path / "merged")
    assert run(tmp_path / "merged").status == 0
    place.expect(tmp_path / "merged")
    assert times(tmp_path / "merged") == before


def test_a_journal_that_is_none_is_refused_and_left(run: Run, tmp_path: Path) -> None:
    for content in (b"", b"[]", b"{}", b'{"identity": 1}', b"\xff"):
        (tmp_path / "merged").mkdir(exist_ok=True)
        (tmp_path / "merged" / JOURNAL).write_bytes(content)
        run(tmp_path / "merged").refused("which did not finish (it cannot be read)", "remove the folder")
        assert contents(tmp_path) == {f"merged/{JOURNAL}": content}


def test_an_address_that_fails_on_the_way_is_gone_on_with(
    place: Place, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail at any file: named files are complete, old ones are removed, and a retry ends as undisturbed."""
    import fsspec

    memory = fsspec.filesystem("memory")
    with contextlib.suppress(FileNotFoundError):
        memory.rm("/faults", recursive=True)
    create = RemoteFolder.create
    names = len(place.merged) + len(place.adapter)
    try:
        for at in range(0, names, 4):
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
                assert not name.endswith(folders.PARTIAL), at
                assert name == JOURNAL or folder.read(name) == place.merged[name], at
            assert INDEX not in folder.names()
            assert run(target).status == 0
            for address, whole in ((target, place.merged), (f"{target}-adapter", place.adapter)):
                folder = output_folder(address)
                assert {name: folder.read(name) for name in folder.names()} == whole, at
    finally:
        memory.rm("/faults", recursive=True)
