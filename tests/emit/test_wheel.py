"""Tests of `recipe build --runtime wheel`: scripts use a wheel, by version and hash, instead of a copy."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from emitting import program_of
from typer.testing import CliRunner

from recipec.compiler.artifacts import artifact, wheel
from recipec.compiler.artifacts.archive import pack
from recipec.compiler.artifacts.artifact import LOCK, SCHEMA, check, write
from recipec.compiler.artifacts.runtime import runtime_files
from recipec.compiler.cli.main import app
from recipec.compiler.emitters.backends import Backend
from recipec.compiler.emitters.emit import emit
from recipec.compiler.errors import ArtifactError


def installing(folder: Path) -> dict[str, bytes]:
    program = replace(program_of(folder, ["evaluate.tasks=[gsm8k]"]), installs_runtime=True)
    return emit(program, [Backend.TRL, Backend.TORCHAX])


@pytest.fixture
def project(recipes: Path) -> Path:
    """Make a working folder with a recipe and its data, and build it."""
    assert built("--runtime", "wheel") == 0
    return recipes


def built(*options: str) -> int:
    return CliRunner().invoke(app, ["build", "recipes/sample.yaml", *options]).exit_code


def test_wheel_build_names_the_wheel_and_has_no_runtime_copy(project: Path) -> None:
    names = {path.name for path in Path("generated").iterdir()}
    assert names == {"sample", "runtime.txt", SCHEMA, artifact.IGNORE}
    lock = json.loads(Path("generated/sample", LOCK).read_bytes())
    assert lock["runtime"] == wheel.REQUIREMENT
    assert artifact.digest(wheel.wheel()) in Path("generated/runtime.txt").read_text()


def test_rebuild_keeps_wheel_or_copy_until_runtime_option_differs(project: Path) -> None:
    assert built("--check") == 0 == built() and not Path("generated/runtime").exists()
    assert built("--runtime", "copy", "--check") == 1
    assert built("--runtime", "copy") == 0
    copied = Path("generated/runtime/training/train.py")
    assert copied.is_file() and not Path("generated/runtime.txt").exists()
    assert built() == 0 == built("--check") and copied.is_file()


def test_wheel_contains_the_runtime_and_is_reproducible() -> None:
    content = wheel.wheel()
    wheel.wheel.cache_clear()
    assert wheel.wheel() == content
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        packed = {info.filename: archive.read(info) for info in archive.infolist()}
        assert {info.date_time for info in archive.infolist()} == {wheel.EPOCH}
    package = {path.partition("/")[2]: text for path, text in packed.items() if path.startswith("runtime/")}
    assert package == runtime_files()
    assert {path.split("/")[0] for path in packed} == {"runtime", wheel.INFO}


def test_packed_wheel_installs_by_hash_and_train_py_starts(project: Path) -> None:
    """Install with pip, which checks the hash and uses no index."""
    with tarfile.open(pack("sample", Path("generated"))) as archive:
        archive.extractall("away", filter="data")
    assert {path.name for path in Path("away").iterdir()} == {
        *("sample", "runtime", "runtime.txt", wheel.FILE, SCHEMA)
    }
    launch = {path.name for path in Path("away/runtime/launch").iterdir()}
    assert launch == {"host.sh", "owner.sh", "tpu-vm.sh", "xpk.sh"}
    # The clients come from the wheel, without an installation.
    smoke = ["bash", "away/sample/serve/smoke.sh", "--help"]
    done = subprocess.run(smoke, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--base-url" in done.stdout, done.stderr
    options = ["--quiet", "--no-compile", "--target", "../site", "-r", "runtime.txt"]
    command = [sys.executable, "-m", "pip", "install", *options]
    done = subprocess.run(command, cwd="away", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in Path("site").iterdir()} == {"runtime", wheel.INFO}
    code = (
        "import runpy, sys; sys.path.insert(0, 'site'); sys.argv = ['away/sample/train.py', '--help'];"
        "sys.meta_path = [one for one in sys.meta_path if 'editable' not in repr(one).lower()];"
        "import runtime; print(runtime.__file__); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--data-dir" in done.stdout, done.stderr
    assert done.stdout.startswith("site/runtime/__init__.py") or "/site/runtime/" in done.stdout
    Path("away", wheel.FILE).write_bytes(wheel.wheel() + b"\0")
    done = subprocess.run([*command, "--upgrade"], cwd="away", capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr


def test_runtime_change_alters_only_runtime_txt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "generated"
    write(out, {"sample": installing(tmp_path)})
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    mended = {**runtime_files(), "errors.py": runtime_files()["errors.py"] + b"# mended\n"}
    for module in (artifact, wheel):
        monkeypatch.setattr(module, "runtime_files", lambda: mended)
    wheel.wheel.cache_clear()
    try:
        files = {"sample": installing(tmp_path)}
        assert f"+./{wheel.FILE} --hash" in "".join(map(str, check(out, files)))
        assert write(out, files) == [] and check(out, files) == []
    finally:
        wheel.wheel.cache_clear()
    after = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert [path.name for path in after if after[path] != before.get(path)] == ["runtime.txt"]
    assert after.keys() == before.keys()


@pytest.mark.parametrize(("content", "said"), [(None, "is missing"), (b"recipec-runtime==0\n", "is stale")])
def test_pack_refuses_missing_or_stale_runtime_txt(project: Path, content: bytes | None, said: str) -> None:
    path = Path("generated/runtime.txt")
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ArtifactError, match=rf"runtime\.txt {said}"):
        pack("sample", Path("generated"))
    assert built("--check") == 1 and built() == 0 == built("--check")


def test_build_refuses_user_file_named_runtime_txt(project: Path) -> None:
    Path("generated/runtime.txt").write_text("mine")
    assert built() == 1 and Path("generated/runtime.txt").read_text() == "mine"
