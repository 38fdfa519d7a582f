"""Tests of merges that are killed, interrupted or out of space.

No existing file is lost, the message says what to do, and the same command then gives the bytes of an
undisturbed merge.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from recipec.runtime.errors import UserError
from recipec.runtime.merging import merge, writer
from recipec.runtime.merging import output_folder as folders
from recipec.runtime.merging.job import MergeSettings
from recipec.runtime.merging.journal import JOURNAL, Journal
from recipec.runtime.merging.output_folder import OutputFolder
from recipec.runtime.merging.writer import Behind
from recipec.runtime.weights.checkpoint import CONFIG, INDEX, HFCheckpoint
from tests.runtime.llama_bases import contents
from tests.runtime.merge_faults.disks import Disk, Killed
from tests.runtime.merge_faults.merges import MODEL, Place, Run, interrupt, noted, times


@pytest.fixture(scope="module")
def job(place: Place) -> Callable[[Path, MergeSettings], merge.MergeJob]:
    """Return a function that merges `place` into any folder, and that prepares a merge once."""
    made: dict[MergeSettings, merge.MergeJob] = {}

    def job(target: Path, settings: MergeSettings) -> merge.MergeJob:
        if settings not in made:
            artifact = Path("/nowhere")
            arguments = merge.parse_arguments(artifact, ["--model", str(place.base)])
            made[settings] = merge._job(arguments, MODEL, artifact, str(place.run), "unused", settings, True)
        adapter = OutputFolder(target.with_name(f"{target.name}-adapter"))
        return dataclasses.replace(made[settings], target=OutputFolder(target), adapter=adapter)

    return job


def loads(folder: Path) -> bool:
    """Return whether the folder opens as a checkpoint."""
    try:
        HFCheckpoint.open(folder)
    except UserError:
        return False
    return True


def watch_journals(patched: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Return the files that each folder's journal last listed as complete, by the folder's name."""
    saved: dict[str, set[str]] = {}
    save = Journal.save

    def note(self: Journal) -> None:
        save(self)
        saved[self.folder.name] = set(self.files)

    patched.setattr(Journal, "save", note)
    return saved


@pytest.mark.parametrize(
    "how, every, settings",
    [
        ("killed", 5, MergeSettings("bfloat16", "4KB")),
        pytest.param("killed", 1, MergeSettings("bfloat16", "4KB"), marks=pytest.mark.nightly),
        ("killed", 11, MergeSettings("bfloat16", "4KB", "int8")),
        ("interrupted", 11, MergeSettings("bfloat16", "4KB")),
        ("full", 11, MergeSettings("bfloat16", "4KB")),
    ],
    ids=["killed", "killed-everywhere", "killed-int8", "interrupted", "full"],
)
def test_merge_stopped_at_any_file_operation_resumes_to_the_same_bytes(
    how: str,
    every: int,
    settings: MergeSettings,
    job: Callable[[Path, MergeSettings], merge.MergeJob],
    tmp_path: Path,
) -> None:
    """Stop at each of a merge's file operations: the second run gives an undisturbed merge's bytes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OutputFolder, "free", lambda self: None)
        disk = Disk(patched, None, how)
        merge.merge(job(tmp_path / "whole", settings))
    whole, adapter = contents(tmp_path / "whole"), contents(tmp_path / "whole-adapter")
    ends = {"killed": Killed, "interrupted": KeyboardInterrupt, "full": UserError}
    resumed = 0
    for at in range(0, disk.done - (how == "full"), every):  # the last operation, a removal, needs no space
        target = tmp_path / f"{how}-{at}"
        stopped = job(target, settings)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(OutputFolder, "free", lambda self: None)
            Disk(patched, at, how)
            saved = watch_journals(patched)
            with pytest.raises(ends[how]) as caught:
                merge.merge(stopped)
            if isinstance(caught.value, UserError):
                assert "cannot be written: No space left on device" in caught.value.message
                assert "run the same command again" in str(caught.value.help)
        left = contents(target)
        assert noted(target) >= saved.get(str(target), set()), "whole files stay"
        assert all(whole[name] == left[name] for name in noted(target))
        if loads(target):
            assert {name: data for name, data in left.items() if name != JOURNAL} == whole, at
        if how != "killed":
            names = [*left, *contents(tmp_path / f"{target.name}-adapter")]
            assert not [name for name in names if name.endswith(folders.PARTIAL)], at
        kept, before = noted(target), times(target)
        merge.merge(stopped)
        assert contents(target) == whole, at
        assert contents(tmp_path / f"{target.name}-adapter") == adapter, at
        after = times(target)
        assert all(after[name] == before[name] for name in kept), "whole files are not written again"
        resumed += bool(kept)
    assert resumed > disk.done // every // 2


def test_merge_reports_full_disk_and_resumes_once_space_is_free(
    place: Place, run: Run, tmp_path: Path
) -> None:
    """Use a file system that does not report its free space."""
    target = tmp_path / "merged"
    with pytest.MonkeyPatch.context() as full:
        full.setattr(OutputFolder, "free", lambda self: None)
        Disk(full, 24, "full")
        outcome = run(target)
    outcome.refused(
        "cannot be written: No space left on device", str(target), "free disk space", "same command"
    )
    kept, before = noted(target), times(target)
    assert kept and not {INDEX, CONFIG} & set(before)
    assert run(target).status == 0
    place.expect(target)
    assert all(times(target)[name] == before[name] for name in kept)


def test_merge_refuses_disk_with_too_little_free_space_before_writing(
    place: Place, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OutputFolder, "free", lambda self: 1_000_000)
    run(tmp_path / "merged").refused("needs 67.1MB, 1.0MB are free", "another disk with --output")
    assert contents(tmp_path) == {}
    interrupt(tmp_path / "merged", run, after="model-00001-of-00003.safetensors")
    before = times(tmp_path / "merged")
    run(tmp_path / "merged").refused("1.0MB are free")
    after = times(tmp_path / "merged")
    assert all(after[name] == before[name] for name in before if name != JOURNAL)
    monkeypatch.undo()
    assert run(tmp_path / "merged").status == 0
    place.expect(tmp_path / "merged")


def test_file_whose_sync_fails_is_not_recorded_as_complete(
    place: Place, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail a write late.

    A disk reports a failed write once, to the first caller that asks: here to the thread that syncs the
    file's parts.
    """

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    put = Behind.put

    def put_quietly(behind: Behind, item: object) -> None:
        """Hide the error of an earlier item, which thus has no earlier caller."""
        with suppress(OSError):
            put(behind, item)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(writer, "FLUSH_BYTES", 2048)
        patched.setattr(os, "fdatasync", fail)
        patched.setattr(Behind, "put", put_quietly)
        run(tmp_path / "merged").refused("Input/output error", "0 of 3 weight files are complete")
    assert noted(tmp_path / "merged") == set()
    assert run(tmp_path / "merged").status == 0
    place.expect(tmp_path / "merged")
