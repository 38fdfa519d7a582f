"""What goes wrong with a merge: nothing that was there is lost, the message says what to do, and the same
command, once that is done, comes to the same bytes as a merge that nothing disturbed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from runtime import merge
from runtime.checkpoint import CONFIG, INDEX, BaseCheckpoint
from runtime.errors import UserError
from runtime.export import folder as folders
from runtime.export import job as jobs
from runtime.export import record, writer
from runtime.export.folder import LocalFolder, RemoteFolder, output_folder
from runtime.export.journal import JOURNAL, Journal
from runtime.export.record import MergeSettings
from runtime.peft_export import WEIGHTS
from runtime.settings import ModelSettings
from tests.runtime.llama_bases import TINY, contents, flip, rewrite, write_base, write_sums
from tests.runtime.runs import lora_section, save_run, write_lock

MODEL = ModelSettings(id="./base", family="llama3")
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "adapter": True, "max_shard_size": "4KB"}
"""Three files of weights."""
SHARDS = 3


@dataclass(frozen=True)
class Place:
    """A base, a run with two checkpoints of it, and what an undisturbed merge writes."""

    base: Path
    run: Path
    merged: dict[str, bytes]
    adapter: dict[str, bytes]

    def expect(self, folder: Path) -> None:
        """Checks both folders of a merge, byte for byte."""
        assert contents(folder) == self.merged
        assert contents(folder.with_name(f"{folder.name}-adapter")) == self.adapter


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    def refused(self, *words: str) -> None:
        """Checks that it failed with one error and a help that say this."""
        assert self.status == 1, self
        assert self.err.startswith("error: ") and "\n  = help: " in self.err and "Traceback" not in self.err
        for word in words:
            assert word in self.err, (word, self.err)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("place")
    base = write_base(root / "base")
    save_run(root / "run", BaseCheckpoint.open(base), lora_section(), steps=(2, 4))
    assert start(base, root / "run", root / "whole") == 0
    whole = Place(base, root / "run", contents(root / "whole"), contents(root / "whole-adapter"))
    assert sum(name.endswith(".safetensors") for name in whole.merged) == SHARDS
    return whole


@pytest.fixture(autouse=True)
def durable_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power does not fail here, and waiting for the disk takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


Run = Callable[..., Outcome]


@pytest.fixture
def run(place: Place, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a merge as a script does."""

    def run(output: Path | str, *argv: str, base: Path | str | None = None, **settings: Any) -> Outcome:
        capsys.readouterr()
        trained = settings.pop("checkpoint", place.run)
        status = start(base or place.base, trained, output, *argv, **settings)
        return Outcome(status, *capsys.readouterr())

    return run


def start(base: Path | str, trained: Path, output: Path | str, *argv: str, **settings: Any) -> int:
    values = {"checkpoint": str(trained), "output": str(output), **SETTINGS, **settings}
    return merge.main(Path("/nowhere"), MODEL, argv=["--model", str(base), *argv], **values)


class Killed(BaseException):
    """The process is gone."""


class Disk:
    """Stands between a merge and its files: its operations are counted, and fail from one on.

    Args:
        at: the operation, from 0 on.
        how: "killed": neither this operation nor a later one is done, whatever tidies up; half of what is
            being written is. "interrupted": this one alone fails, with KeyboardInterrupt. "full": from this
            one on whatever takes room fails.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int | None = None, how: str = "killed") -> None:
        self.at, self.how, self.done = at, how, 0
        opened, replace, unlink = Path.open, Path.replace, Path.unlink

        def open_file(path: Path, mode: str = "r", *rest: Any, **options: Any) -> IO[Any]:
            if mode != "wb":
                return opened(path, mode, *rest, **options)
            self.step(room=True)
            return _Counted(path, self)

        def replace_file(path: Path, target: Path) -> Path:
            self.step()
            return replace(path, target)

        def unlink_file(path: Path, missing_ok: bool = False) -> None:
            if path.exists():
                self.step()
            unlink(path, missing_ok)

        monkeypatch.setattr(Path, "open", open_file)
        monkeypatch.setattr(Path, "replace", replace_file)
        monkeypatch.setattr(Path, "unlink", unlink_file)
        if how != "killed":  # which finds the same before it as after it
            monkeypatch.setattr(os, "fsync", lambda descriptor: self.step(room=True))

    def step(self, room: bool = False) -> None:
        number, self.done = self.done, self.done + 1
        if self.at is None or number < self.at:
            return
        if self.how == "killed":
            raise Killed
        if self.how == "interrupted" and number == self.at:
            raise KeyboardInterrupt
        if self.how == "full" and room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Counted(io.FileIO):
    """A file whose writes are operations; of the one that fails, half is written."""

    def __init__(self, path: Path, disk: Disk) -> None:
        super().__init__(path, "wb")
        self.disk = disk

    def write(self, data: Any) -> int:
        try:
            self.disk.step(room=True)
        except BaseException:
            super().write(memoryview(data)[: memoryview(data).nbytes // 2])
            raise
        return super().write(data)


@pytest.fixture(scope="module")
def job(place: Place) -> Callable[[Path, MergeSettings], merge.Job]:
    """A merge of `place` into any folder; what it takes to begin one is done once."""
    made: dict[MergeSettings, merge.Job] = {}

    def job(target: Path, settings: MergeSettings) -> merge.Job:
        if settings not in made:
            arguments = merge.parse_arguments(Path("/nowhere"), ["--model", str(place.base)])
            made[settings] = merge._job(arguments, MODEL, str(place.run), "unused", settings, True)
        adapter = LocalFolder(target.with_name(f"{target.name}-adapter"))
        return dataclasses.replace(made[settings], target=LocalFolder(target), adapter=adapter)

    return job


def times(folder: Path) -> dict[str, tuple[int, int]]:
    """What tells whether a file was written anew."""
    entries = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {name: (entry.st_ino, entry.st_mtime_ns) for name, entry in entries.items()}


def loads(folder: Path) -> bool:
    """Whether anyone would take a folder for a checkpoint."""
    try:
        BaseCheckpoint.open(folder)
    except UserError:
        return False
    return True


def noted(folder: Path) -> set[str]:
    """The files that an unfinished folder's journal calls whole."""
    journal = folder / JOURNAL
    return set(json.loads(journal.read_bytes())["files"]) if journal.exists() else set()


def watch_journals(patched: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """The files that the journal of each folder was last seen to call whole, by the folder's name."""
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
        ("killed", 1, MergeSettings("bfloat16", "4KB")),
        ("killed", 4, MergeSettings("bfloat16", "5GB")),
        ("killed", 9, MergeSettings("bfloat16", "4KB", "int8")),
        ("interrupted", 6, MergeSettings("bfloat16", "4KB")),
        ("full", 4, MergeSettings("bfloat16", "4KB")),
    ],
    ids=["killed", "killed-one-file", "killed-int8", "interrupted", "full"],
)
def test_stopped_at_any_operation(
    how: str,
    every: int,
    settings: MergeSettings,
    job: Callable[[Path, MergeSettings], merge.Job],
    tmp_path: Path,
) -> None:
    """At every one of a merge's operations on files: the second run ends with an undisturbed one's bytes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalFolder, "free", lambda self: None)
        disk = Disk(patched, None, how)
        merge.merge(job(tmp_path / "whole", settings))
    whole, adapter = contents(tmp_path / "whole"), contents(tmp_path / "whole-adapter")
    ends = {"killed": Killed, "interrupted": KeyboardInterrupt, "full": UserError}
    resumed = 0
    for at in range(0, disk.done - (how == "full"), every):  # the last one, a removal, needs no room
        target = tmp_path / f"{how}-{at}"
        stopped = job(target, settings)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(LocalFolder, "free", lambda self: None)
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


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[bool]:
    """A small file system of its own in a folder; False where this process may mount none."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        done = False
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, *options: str) -> None:
    subprocess.run(["mount", "-o", ",".join(["remount", *options]), str(folder)], check=True)


@pytest.mark.parametrize("room", [8, 16, 28])
def test_disk_that_is_full(room: int, place: Place, run: Run, tmp_path: Path) -> None:
    """A file system that does not say how much room it has, and has room for a part of it, in KiB."""
    target = tmp_path / "disk" / "merged"
    with mounted(tmp_path / "disk", f"size={room}k") as real, pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalFolder, "free", lambda self: None)
        with pytest.MonkeyPatch.context() as full:
            if not real:
                Disk(full, room * 3, "full")
            outcome = run(target)
        outcome.refused(
            "cannot be written: No space left on device", str(target), "make room", "same command"
        )
        kept, before = noted(target), times(target)
        assert not [name for name in before if name.endswith(folders.PARTIAL)]
        assert all(contents(target)[name] == place.merged[name] for name in before if name != JOURNAL)
        assert not {INDEX, CONFIG} & set(before)
        if real:
            remount(tmp_path / "disk", "size=1m")
        assert run(target).status == 0
        place.expect(target)
        assert all(times(target)[name] == before[name] for name in kept)


def test_disk_without_room_for_the_merge(
    place: Place, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalFolder, "free", lambda self: 1_000_000)
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


def interrupt(target: Path, run: Run, after: str, **settings: Any) -> Outcome:
    """Interrupts a merge as Ctrl-C does, once a file has its name and is noted."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalFolder, "free", lambda self: None)
        create = LocalFolder.create

        def begin(self: LocalFolder, name: str) -> Any:
            if name != JOURNAL and (self.path / after).exists():
                raise KeyboardInterrupt
            return create(self, name)

        patched.setattr(LocalFolder, "create", begin)
        outcome = run(target, **settings)
    assert outcome.status == 130 and (target / JOURNAL).exists()
    return outcome


def test_ctrl_c(place: Place, run: Run, tmp_path: Path) -> None:
    outcome = interrupt(tmp_path / "merged", run, after="model-00002-of-00003.safetensors")
    assert "the same command goes on" in outcome.err and "Traceback" not in outcome.err
    assert noted(tmp_path / "merged") == {f"model-0000{i}-of-00003.safetensors" for i in (1, 2)}
    assert run(tmp_path / "merged").status == 0
    place.expect(tmp_path / "merged")


def test_disk_whose_last_write_fails(
    place: Place, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk tells of a write that failed once, to whoever asks first: here to the thread that brings the
    file's parts to it."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(writer, "FLUSH_BYTES", 2048)
        patched.setattr(os, "fdatasync", fail)
        patched.setattr(writer._Behind, "put", lambda self, item: self._items.put(item))  # nobody asks before
        run(tmp_path / "merged").refused("Input/output error", "0 of 3 weight files are whole")
    assert noted(tmp_path / "merged") == set()
    assert run(tmp_path / "merged").status == 0
    place.expect(tmp_path / "merged")


# Of the base.


def copy(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target, symlinks=True)
    return target


def cached(base: Path, root: Path) -> Path:
    """A base as Hugging Face's cache keeps it; the folder of its revision."""
    snapshot = root / "snapshots" / "0f"
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for path in base.iterdir():
        content = path.read_bytes()
        large = path.suffix == ".safetensors"
        name = (hashlib.sha256 if large else hashlib.sha1)(content).hexdigest()
        (root / "blobs" / name).write_bytes(content)
        (snapshot / path.name).symlink_to(f"../../blobs/{name}")
    return snapshot


def summed(base: Path, root: Path) -> Path:
    write_sums(copy(base, root))
    return root


@pytest.mark.parametrize("file", ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"])
@pytest.mark.parametrize("made, knows", [(summed, "SHA256SUMS"), (cached, "Hugging Face's cache")])
def test_flipped_bit_in_a_base_whose_hashes_are_known(
    made: Callable[[Path, Path], Path], knows: str, file: str, place: Place, run: Run, tmp_path: Path
) -> None:
    base = made(place.base, tmp_path / "base")
    assert run(tmp_path / "whole", base=base).status == 0
    flip(base / file, -5)
    target = tmp_path / "merged"
    run(target, base=base).refused(f"{base / file}: is not the file that its hash names", f"{knows} says")
    assert contents(target) == {}, "nothing is left of what was made of it"
    flip(base / file, -5)
    assert run(target, base=base).status == 0
    assert contents(target) == contents(tmp_path / "whole")


def test_base_that_is_damaged_between_a_merge_and_its_continuation(
    place: Place, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the tidying up is killed, nothing that was made of the damaged file counts as whole."""
    monkeypatch.setattr(record, "SAMPLE_BYTES", 0)  # the damage is nowhere where the bases are told apart
    base = summed(place.base, tmp_path / "base")
    assert run(tmp_path / "whole", base=base).status == 0
    file = base / "model-00001-of-00003.safetensors"
    tidied = 0
    for at in range(0, 40, 2):
        target = tmp_path / f"merged-{at}"
        flip(file, -5)
        with pytest.MonkeyPatch.context() as patched:
            # The merge that began knew of no hashes.
            patched.setattr(jobs, "known_hashes", lambda folder: {})
            interrupt(target, run, after=CONFIG, base=base)
        with pytest.MonkeyPatch.context() as patched:
            Disk(patched, at + 3)
            with contextlib.suppress(Killed):
                run(target, base=base).refused("is not the file that its hash names")
                assert contents(target) == {}
                break
        if noted(target):  # it was killed before the damage was found
            run(target, base=base).refused("is not the file that its hash names")
            assert contents(target) == {}
        else:
            tidied += 1
        flip(file, -5)
        assert run(target, base=base).status == 0
        assert contents(target) == contents(tmp_path / "whole"), at
    else:
        pytest.fail("the tidying up had no end")
    assert tidied > 2


def test_base_that_cannot_be_read_for_a_while(
    place: Place, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written before a network failed is kept."""
    target, read = tmp_path / "merged", BaseCheckpoint.bytes_of

    def fail(self: BaseCheckpoint, *rest: Any) -> memoryview:
        if noted(target):
            raise UserError("gs://base: cannot be read: timed out", "run the same command again")
        return read(self, *rest)

    monkeypatch.setattr(BaseCheckpoint, "bytes_of", fail)
    run(target).refused("timed out")
    kept, before = noted(target), times(target)
    assert kept
    monkeypatch.undo()
    assert run(target).status == 0
    place.expect(target)
    assert all(times(target)[name] == before[name] for name in kept)


def cut(base: Path) -> None:
    path = base / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def cut_header(base: Path) -> None:
    path = base / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def narrow(base: Path) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        name = "model.layers.0.self_attn.q_proj.weight"
        arrays[name] = np.ascontiguousarray(arrays[name][:, :-1])

    rewrite(shard_of(base, "layers.0.self_attn.q_proj"), change)


def integers(base: Path) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        arrays[name] = arrays[name].view(np.int16)

    rewrite(shard_of(base, "layers.0.mlp.up_proj"), change)


def without_module(base: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(shard_of(base, "layers.0.mlp.down_proj"), lambda arrays: arrays.__delitem__(name))
    change_index(base, lambda names: {key: file for key, file in names.items() if key != name})


def renamed(base: Path) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        for name in list(arrays):
            arrays[f"transformer.{name}"] = arrays.pop(name)

    for path in base.glob("*.safetensors"):
        rewrite(path, change)
    change_index(base, lambda names: {f"transformer.{key}": file for key, file in names.items()})


def shard_of(base: Path, module: str) -> Path:
    index = json.loads((base / INDEX).read_text())
    return base / str(index["weight_map"][f"model.{module}.weight"])


def change_index(base: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    index = json.loads((base / INDEX).read_text())
    (base / INDEX).write_text(json.dumps(index | {"weight_map": change(index["weight_map"])}))


def configured(**changes: Any) -> Callable[[Path], None]:
    """Another base of other sizes."""

    def change(base: Path) -> None:
        shutil.rmtree(base)
        write_base(base, {**TINY, **changes})

    return change


@pytest.mark.parametrize(
    "damage, words",
    [
        (cut, ["model-00002-of-00003.safetensors: truncated:", "download the checkpoint again"]),
        (cut_header, ["model-00002-of-00003.safetensors: truncated within its header"]),
        (narrow, ["q_proj.weight has shape [16, 15], expected [16, 16] from config.json"]),
        (integers, ["up_proj.weight has type I16, which is no float", "use the original"]),
        (without_module, ["down_proj.weight is missing; config.json promises it with shape [16, 24]"]),
        (renamed, ["no text embedding among its", "not a checkpoint in Hugging Face's layout"]),
        (configured(intermediate_size=32), ["is 32; the run trained a model with 24", "--model"]),
        (configured(num_hidden_layers=3), ["layer_types is", "the run trained a model with", "--model"]),
        (
            configured(model_type="qwen3"),
            [
                "is of the family qwen3; the run trained one of llama3",
                "base checkpoint of the run with --model",
            ],
        ),
    ],
    ids=lambda value: getattr(value, "__qualname__", "").removesuffix(".<locals>.change") or None,
)
def test_base_that_is_damaged_or_another(
    damage: Callable[[Path], None], words: list[str], place: Place, run: Run, tmp_path: Path
) -> None:
    base = copy(place.base, tmp_path / "base")
    damage(base)
    run(tmp_path / "merged", base=base).refused(*words)
    assert not list(tmp_path.glob("merged*")), "refused before anything is written"


def test_flipped_bit_in_a_header(place: Place, tmp_path: Path) -> None:
    """Wherever it is: a message, or a header that means the same."""
    base = copy(place.base, tmp_path / "base")
    path = base / "model-00001-of-00003.safetensors"
    content, choose = path.read_bytes(), random.Random(0)
    header = BaseCheckpoint.open(base).headers[path.name]
    refused = 0
    places = range(header.data_start)
    for at in places:
        damaged = bytearray(content)
        damaged[at] ^= 1 << choose.randrange(8)
        path.write_bytes(damaged)
        try:
            opened = BaseCheckpoint.open(base)
            opened.verify()
        except UserError:
            refused += 1
        else:
            assert opened.headers[path.name].tensors == header.tensors, at
    assert refused > len(places) * 0.8


def test_record_of_another_run(place: Place, run: Run, tmp_path: Path) -> None:
    """Adapters that do not fit the record beside them."""
    trained = copy(place.run, tmp_path / "run")
    write_lock(trained, BaseCheckpoint.open(place.base), lora_section(rank=4))
    run(tmp_path / "merged", checkpoint=trained).refused("has shape", "must be of one run")
    assert not list(tmp_path.glob("merged*"))


# Of the output.


def test_output_that_is_read_only(place: Place, run: Run, tmp_path: Path) -> None:
    """A new folder, one in which a merge was begun, and one that holds it whole."""
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
                f"{disk / name}: cannot be written: Read-only file system", "get the right to it", "--output"
            )
        assert run(disk / "whole").out == f"{disk / 'whole'}: holds this merge already\n"
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
def test_file_where_a_folder_should_be(output: str, run: Run, tmp_path: Path) -> None:
    """The last one is where the adapter would lie: refused before the weights are written."""
    for name in ("file", "merged-adapter"):
        (tmp_path / name).write_text("mine")
    run(tmp_path / output).refused("is a file, not a folder", "another folder with --output")
    assert contents(tmp_path) == {"file": b"mine", "merged-adapter": b"mine"}


def test_folder_that_another_process_writes(place: Place, run: Run, tmp_path: Path) -> None:
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)"
    code += "; print(1, flush=True); input()"
    for locked in ("merged", "merged-adapter"):
        (tmp_path / locked).mkdir()
        command = [sys.executable, "-S", "-c", code, str(tmp_path / locked)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None and other.stdout.readline()
            run(tmp_path / "merged").refused("another process is writing it", "wait for that one to end")
            assert contents(tmp_path) == {}
            other.communicate("\n")
    assert run(tmp_path / "merged").status == 0
    place.expect(tmp_path / "merged")


def test_folder_with_another_merge(place: Place, run: Run, tmp_path: Path) -> None:
    """Begun or finished: refused, naming what differs; nothing in it changes."""
    other_base = write_base(tmp_path / "base", seed=1)
    interrupt(tmp_path / "begun", run, after="model-00001-of-00003.safetensors")
    assert run(tmp_path / "whole").status == 0
    before, stamps = contents(tmp_path), times(tmp_path)
    for folder, holds in (("begun", "that was begun and not finished "), ("whole", "")):
        for change, differs in (
            (["--step", "2"], "another checkpoint, another step"),
            ({"dtype": "float32"}, "another dtype"),
            ({"max_shard_size": "base"}, "another max_shard_size"),
            ({"chat_template": "{{ x }}"}, "another chat_template"),
            ({"base": other_base}, "another base"),
        ):
            argv, settings = (change, {}) if isinstance(change, list) else ([], change)
            outcome = run(tmp_path / folder, *argv, **settings)
            outcome.refused(f"{tmp_path / folder}: holds another merge {holds}({differs})", "--output")
    assert contents(tmp_path) == before and times(tmp_path) == stamps
    assert run(tmp_path / "begun").status == 0
    place.expect(tmp_path / "begun")


@pytest.mark.parametrize(
    "name", ["notes.txt", "below/notes.txt", ".notes.txt.partial", "chat_template.jinja"]
)
def test_folder_with_files_of_the_user(name: str, place: Place, run: Run, tmp_path: Path) -> None:
    """In the folder of the weights or of the adapter; alone, or beside a merge that was begun."""
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
            words = f"holds {name}, which is no part of a merge" if begun else "is not empty"
            run(target).refused(f"{target.with_name(folder)}: {words}", "another")
            assert contents(target.parent) == before and times(target.parent) == stamps
            mine.unlink()
            with contextlib.suppress(OSError):
                mine.parent.rmdir()
            assert run(target).status == 0
            place.expect(target)


def test_finished_merge_is_left_alone(place: Place, run: Run, tmp_path: Path) -> None:
    target = tmp_path / "merged"
    assert run(target).status == 0
    (target / "notes.txt").write_text("mine")
    before = times(tmp_path)
    outcome = run(target)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == f"{target}: holds this merge already\n"
    assert times(tmp_path) == before


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "tokenizer.json", INDEX])
def test_finished_merge_that_was_changed(name: str, place: Place, run: Run, tmp_path: Path) -> None:
    """It is not called finished: what is missing or of another size is named."""
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


def test_adapter_that_was_removed_is_written_again(place: Place, run: Run, tmp_path: Path) -> None:
    """As it is for a recipe that wants one later on."""
    assert run(tmp_path / "merged", adapter=False).status == 0
    before = times(tmp_path / "merged")
    assert run(tmp_path / "merged").status == 0
    place.expect(tmp_path / "merged")
    assert times(tmp_path / "merged") == before


def test_journal_that_is_no_journal(run: Run, tmp_path: Path) -> None:
    for content in (b"", b"[]", b"{}", b'{"identity": 1}', b"\xff"):
        (tmp_path / "merged").mkdir(exist_ok=True)
        (tmp_path / "merged" / JOURNAL).write_bytes(content)
        run(tmp_path / "merged").refused("begun and not finished (it cannot be read)", "remove the folder")
        assert contents(tmp_path) == {f"merged/{JOURNAL}": content}


def test_address_that_fails_on_the_way(
    place: Place, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any file: what has a name is whole, what is stale goes, and the same command ends as undisturbed."""
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
