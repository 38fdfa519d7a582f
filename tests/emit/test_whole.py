"""Tests of builds that end at each of their steps: the folder then holds the old build or the new one."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from emitting import RECIPE
from typer.testing import CliRunner

from recipec.compiler.artifacts import artifact, runtime, whole
from recipec.compiler.artifacts.artifact import LOCK, write
from recipec.compiler.artifacts.whole import STAGING, finish
from recipec.compiler.cli.main import app
from recipec.compiler.emitters.emit import emit
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lower import lower
from recipec.compiler.writing import replacing
from recipec.runtime.build_check import demand_whole
from recipec.runtime.errors import UserError
from recipec.spec.load import load

STEPS = ("mkdir", "replace", "rmdir", "unlink")
"""The functions of `os` that change a folder."""


class Killed(BaseException):
    """A fake death of the process: no cleanup runs."""


def files(**texts: str) -> dict[str, bytes]:
    """Return an artifact's files, with its lock."""
    made = {path.replace("__", "/").replace("_", "."): text.encode() for path, text in texts.items()}
    lock = {
        "files": {path: whole.digest(content) for path, content in made.items()},
        "runtime": runtime.record(),
    }
    return {**made, LOCK: json.dumps(lock).encode()}


OLD = {"one": files(train_py="old", serve__serve_sh="old", serve__Dockerfile="old"), "two": files(a="old")}
NEW = {"one": files(train_py="new", launch__vm_sh="new"), "two": files(a="new", b="new")}


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder that was built with an older runtime, and that holds the user's files."""
    folder = tmp_path / "generated"
    small = runtime.listed({"model/families/base.py": b"old", "gone.py": b"old"})
    small_now = runtime.listed({"model/families/base.py": b"new", "new/more.py": b"new"})
    with monkeypatch.context() as older:
        for module in (artifact, runtime):
            older.setattr(module, "runtime_files", lambda: small)
        locks = {name: {**old, LOCK: relocked(old[LOCK])} for name, old in OLD.items()}
        write(folder, locks, source=True)
    for module in (artifact, runtime):
        monkeypatch.setattr(module, "runtime_files", lambda: small_now)
    (folder / "one/checkpoints/100").mkdir(parents=True)
    (folder / "one/checkpoints/100/weights").write_text("precious")
    (folder / "one/serve/mine.yaml").write_text("mine")
    return folder


def relocked(lock: bytes) -> bytes:
    return json.dumps(json.loads(lock) | {"runtime": runtime.record()}).encode()


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@contextmanager
def ended(number: int, how: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """End the process at a step, and yield the list of all steps."""
    seen: list[int] = []

    def stepping(step: Callable[..., object]) -> Callable[..., object]:
        def stepped(*given: object, **named: object) -> object:
            seen.append(len(seen))
            if len(seen) >= number:
                how()
            return step(*given, **named)

        return stepped

    write_bytes = Path.write_bytes

    def half(self: Path, data: bytes) -> int:
        write_bytes(self, data[: len(data) // 2])
        seen.append(len(seen))
        if len(seen) >= number:
            how()
        return write_bytes(self, data)

    with monkeypatch.context() as patched:
        for name in STEPS:
            patched.setattr(os, name, stepping(getattr(os, name)))
        patched.setattr(Path, "write_bytes", half)
        yield seen


def build_ended(out: Path, number: int, how: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Build NEW, ended at a step, and return whether the build had fewer steps."""
    with ended(number, how, monkeypatch) as seen, suppress(Killed, SystemExit):
        write(out, NEW)
    return len(seen) < number


def die() -> None:
    raise Killed


def test_killed_build_is_all_old_or_all_new_after_the_next_command(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(out)
    write(shutil.copytree(out, tmp_path / "built"), NEW)
    after = tree(tmp_path / "built")
    assert after["one/checkpoints/100/weights"] == b"precious" and "one/serve/serve.sh" not in after
    found = set()
    for number in range(1, 1000):
        folder = shutil.copytree(out, tmp_path / f"{number}")
        if build_ended(folder, number, die, monkeypatch):
            break
        # The next command may be killed, too.
        with ended(1 + number % 7, die, monkeypatch), suppress(Killed):
            finish(folder)
        finish(folder)
        assert tree(folder) in (before, after), number
        assert not (folder / STAGING).exists()
        assert not any(path.is_dir() and not list(path.iterdir()) for path in folder.rglob("*")), number
        found.add(tree(folder) == after)
        shutil.rmtree(folder)
    assert found == {False, True} and number > 40


def test_build_ended_by_sigterm_is_all_old_or_all_new_at_once(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    sent: list[bool] = []

    def once() -> None:
        if not sent:
            sent.append(True)
            signal.raise_signal(signal.SIGTERM)

    before = tree(out)
    write(shutil.copytree(out, tmp_path / "built"), NEW)
    after = tree(tmp_path / "built")
    earlier = signal.signal(signal.SIGTERM, leave)
    try:
        for number in range(1, 1000, 3):
            sent.clear()
            folder = shutil.copytree(out, tmp_path / f"{number}")
            if build_ended(folder, number, once, monkeypatch):
                break
            assert tree(folder) in (before, after), number
            assert not (folder / STAGING).exists()
            shutil.rmtree(folder)
    finally:
        signal.signal(signal.SIGTERM, earlier)
    assert number > 40


def test_next_command_completes_a_build_stopped_by_a_full_disk(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(shutil.copytree(out, tmp_path / "built"), NEW)
    replace, moved = os.replace, list[str]()

    def third(source: str, target: str) -> None:  # of the journal and the files; files begin to move after it
        moved.append(target)
        if len(moved) == 3:
            raise OSError(28, "No space left on device", str(target))
        replace(source, target)

    with monkeypatch.context() as full:
        full.setattr(os, "replace", third)
        with pytest.raises(ArtifactError, match=r"is not complete: .*: No space left"):
            write(out, NEW)
    assert finish(out) and tree(out) == tree(tmp_path / "built")


def test_finish_ignores_copied_journal_and_refuses_paths_outside_folder(out: Path) -> None:
    before = tree(out)
    (out / STAGING / "new/one").mkdir(parents=True)
    (out / STAGING / "new/one/train.py").write_text("theirs")
    journal = {"folder": 0, "new": ["one/train.py"], "gone": {"one/checkpoints/100/weights": ""}}
    (out / STAGING / "journal.json").write_text(json.dumps(journal))
    assert finish(out) is False and tree(out) == before
    journal["new"] = ["../elsewhere"]
    (out / STAGING / "new").mkdir(parents=True)
    journal["folder"] = (out / STAGING).stat().st_ino
    (out / STAGING / "journal.json").write_text(json.dumps(journal))
    with pytest.raises(ArtifactError, match="is outside of"):
        finish(out)


def test_build_refuses_user_folder_with_the_staging_name(out: Path) -> None:
    (out / STAGING).mkdir()
    (out / STAGING / "notes").write_text("mine")
    before = tree(out)
    with pytest.raises(ArtifactError, match="is in the way"):
        write(out, NEW)
    assert tree(out) == before


@pytest.mark.parametrize(
    "path", ["one/launch/vm.sh", "two/b", "runtime/mine.py", f"three/{LOCK}", "three/train.py"]
)
def test_build_replaces_user_file_only_with_force_and_keeps_a_copy(path: str, out: Path) -> None:
    (out / path).parent.mkdir(exist_ok=True)
    (out / path).write_text("mine")
    before, built = tree(out), {**NEW, "three": files(train_py="new")}
    with pytest.raises(ArtifactError, match=f"{path} would be replaced, but no build wrote") as refused:
        write(out, built, forced="recipe build x.yaml --force")
    assert str(refused.value.help).endswith(": recipe build x.yaml --force")
    assert tree(out) == before
    (out / f"{path}.kept").write_text("an earlier copy")
    notes, kept = write(out, built, force=True), out / f"{path}.kept-2"
    assert f"warning: {out / path} was not written by a build: replaced, a copy is {kept}" in notes
    assert kept.read_text() == "mine" and (out / f"{path}.kept").read_text() == "an earlier copy"
    assert artifact.check(out, built) == []


def test_build_removes_only_temporary_files_of_killed_commands(out: Path) -> None:
    ours = [out / ".recipe-abcd_123.part", out / ".recipe-zyxw9876.part"]
    theirs = [out / ".recipe-settings", out / ".recipe-mine0001.part", out / ".recipe-folder_1.part"]
    theirs[2].mkdir(mode=0o700)
    for file in (*ours, *theirs[:2]):
        file.write_text("half")
        file.chmod(0o600)
    theirs[1].chmod(0o644)
    with replacing(out / "page.html") as first:
        write(out, NEW)
        first.write(b"whole")
    assert not any(map(os.path.lexists, ours)) and all(map(os.path.lexists, theirs))
    assert (out / "page.html").read_bytes() == b"whole"
    assert {path.name for path in out.glob(".recipe-*")} == {path.name for path in theirs}


@pytest.fixture
def mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Build a recipe, change it, and kill the next build between its first two files."""
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "sample.yaml"
    recipe.write_text(RECIPE.replace("data/train.jsonl", "gs://bucket/train.jsonl"))
    assert CliRunner().invoke(app, ["-q", "build", "sample.yaml"]).exit_code == 0
    recipe.write_text(f"{recipe.read_text()}train: {{seed: 7}}\n")
    replace, moved = os.replace, list[str]()

    def second(source: str, target: str) -> None:
        moved.append(str(target))
        if len(moved) == 3:  # after the journal and a file
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(os, "replace", second)
        changed = lower(load(recipe)).program
        assert changed is not None
        write(Path("generated"), {"sample": emit(changed)})
    assert (tmp_path / "generated" / STAGING / "journal.json").is_file()
    return tmp_path


def test_pack_completes_an_interrupted_build(mixture: Path) -> None:
    done = CliRunner().invoke(app, ["pack", "sample"])
    assert done.exit_code == 0, done.output
    assert "note: an interrupted build in generated was completed" in done.stderr
    assert not (mixture / "generated" / STAGING).exists()


@pytest.mark.parametrize("command", ["pack sample", "chat generated/sample", "serve up generated/sample"])
def test_reading_a_copy_of_an_interrupted_build_says_so(command: str, mixture: Path) -> None:
    shutil.copytree("generated", "copy")
    shutil.rmtree("generated")
    os.rename("copy", "generated")
    for _ in range(2):  # nothing is removed that would hide it
        done = CliRunner().invoke(app, command.split())
        assert done.exit_code == 1
        assert "a build in generated was cut short before the folder was copied" in str(done.exception)
    assert CliRunner().invoke(app, ["-q", "build", "sample.yaml"]).exit_code == 0
    assert CliRunner().invoke(app, ["pack", "sample"]).exit_code == 0


def test_check_and_scripts_refuse_an_interrupted_build(mixture: Path) -> None:
    done = CliRunner().invoke(app, ["build", "sample.yaml", "--check"])
    assert done.exit_code == 1 and "a build in generated was cut short" in str(done.exception)
    with pytest.raises(UserError, match="sample may have files of two builds"):
        demand_whole(mixture / "generated/sample")
    assert CliRunner().invoke(app, ["-q", "build", "sample.yaml"]).exit_code == 0
    assert CliRunner().invoke(app, ["build", "sample.yaml", "--check"]).exit_code == 0
    demand_whole(mixture / "generated/sample")
