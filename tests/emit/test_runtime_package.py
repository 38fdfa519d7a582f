"""Tests of what artifacts run on: the wheel next to them, or runtime/ copied whole."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from emitting import RECIPE, compiled
from typer.testing import CliRunner

from recipec.compiler.artifacts import artifact, runtime
from recipec.compiler.artifacts.artifact import LOCK, SCHEMA, write
from recipec.compiler.artifacts.runtime import PAGE, runtime_files, wheel, wheel_file
from recipec.compiler.cli.main import app
from recipec.compiler.emitters.emit import emit
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.pack import pack
from recipec.runtime.build_check import LIST, demand_whole
from recipec.runtime.errors import UserError

OUT = Path("generated")


@pytest.fixture
def project(recipes: Path) -> Path:
    """Make a working folder with a recipe and its data, and build it."""
    assert built() == (0, "")
    return recipes


def built(*options: str, recipe: str = "sample") -> tuple[int, str]:
    """Build a recipe; return the exit status, and what is said besides diagnostics."""
    done = CliRunner().invoke(app, ["build", f"recipes/{recipe}.yaml", *options])
    if isinstance(done.exception, ArtifactError):
        return 1, f"error: {done.exception}\n"
    lines = re.findall(r"^(?:note|warning|error|Error): .*\n", done.stderr, re.MULTILINE)
    return done.exit_code, "".join(lines)


def another_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change a module of the runtime, as another version would."""
    others = {path: text for path, text in runtime_files().items() if path != LIST}
    changed = runtime.listed({**others, "errors.py": others["errors.py"] + b"# mended\n"})
    for module in (artifact, runtime):
        monkeypatch.setattr(module, "runtime_files", lambda: changed)


def names() -> set[str]:
    return {path.name for path in OUT.iterdir()}


def test_build_writes_the_wheel_once_and_names_it_by_hash(project: Path) -> None:
    assert names() == {"sample", wheel_file(), PAGE, SCHEMA, artifact.IGNORE}
    lock = json.loads((OUT / "sample" / LOCK).read_bytes())
    version = lock["runtime"]["package"].removeprefix("recipec-runtime==")
    assert lock["runtime"]["sha256"] == hashlib.sha256(runtime_files()[LIST]).hexdigest()
    assert version.partition("+")[2] == lock["runtime"]["sha256"][:12] and version in wheel_file()
    assert lock["runtime"]["package"] in (OUT / "sample/requirements-train.txt").read_text().splitlines()
    content = (OUT / wheel_file()).read_bytes()
    assert runtime.linked((OUT / PAGE).read_bytes()) == {wheel_file(): hashlib.sha256(content).hexdigest()}


def test_wheel_contains_the_runtime_and_is_reproducible() -> None:
    content = wheel()
    runtime._wheel.cache_clear()
    assert wheel() == content
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        packed = {info.filename: archive.read(info) for info in archive.infolist()}
        assert {info.date_time for info in archive.infolist()} == {runtime.EPOCH}
    package = {path.partition("/")[2]: text for path, text in packed.items() if path.startswith("runtime/")}
    assert package == runtime_files()
    assert {path.split("/")[0] for path in packed} == {
        "runtime",
        f"recipec_runtime-{runtime.version()}.dist-info",
    }


def test_source_is_copied_once_per_folder_until_the_option_differs(project: Path) -> None:
    assert built("--runtime", "source", "--check")[0] == 1
    assert built("--runtime", "source")[0] == 0
    copied = artifact.modules(OUT / "runtime")
    assert {*copied, LIST} == runtime_files().keys() and wheel_file() in names()
    done = subprocess.run(["sha256sum", "--check", "--quiet", LIST], cwd=OUT / "runtime", timeout=60)
    assert done.returncode == 0
    assert built() == (0, "") == built("--check") and (OUT / "runtime" / LIST).is_file()
    status, text = built("--runtime", "wheel")
    assert status == 0 and "`--runtime source` copies runtime/ too" in text
    assert not (OUT / "runtime").exists() and built("--check") == (0, "")


def test_earlier_spelling_of_runtime_is_refused_with_the_new_one(project: Path) -> None:
    status, text = built("--runtime", "copy")
    assert status == 2 and "--runtime source copies all of them" in text


def test_edited_source_is_packed_and_kept_as_a_copy_by_the_next_build(project: Path) -> None:
    assert built("--runtime", "source")[0] == 0
    module = OUT / "runtime/training/trainer.py"
    module.write_text(edited := module.read_text() + "# mine\n")
    assert built("--check")[0] == 1
    with tarfile.open(pack("sample", OUT)) as archive:
        packed = archive.extractfile("runtime/training/trainer.py")
        assert packed is not None and packed.read() == edited.encode()
    status, text = built()
    kept = module.with_name("trainer.py.kept")
    assert (
        status == 0 and f"warning: {module} was edited after it was built: replaced, a copy is {kept}" in text
    )
    assert kept.read_text() == edited and module.read_bytes() == runtime_files()["training/trainer.py"]


def test_folder_of_0_2_is_replaced_and_the_users_files_stay(project: Path) -> None:
    """Rebuild a folder with a copy of some modules, and one that named a wheel."""
    modules = {"__init__.py", "settings.py", "errors.py", "gone.py", "model/families/base.py"}
    for path in modules:
        (OUT / "runtime" / path).parent.mkdir(parents=True, exist_ok=True)
        (OUT / "runtime" / path).write_text("of 0.2\n")
    lock = json.loads((OUT / "sample" / LOCK).read_bytes())
    digest = hashlib.sha256(b"of 0.2\n").hexdigest()
    (OUT / "sample" / LOCK).write_text(json.dumps(lock | {"runtime": dict.fromkeys(modules, digest)}))
    (OUT / "runtime/errors.py").write_text("mine\n")
    (OUT / "runtime/notes.md").write_text("mine\n")
    (OUT / "runtime.txt").write_text("./recipec_runtime-0.2.0-py3-none-any.whl # recipec-runtime\n")
    (OUT / wheel_file()).unlink()
    (OUT / PAGE).unlink()
    status, text = built()
    assert status == 0
    copied = OUT / "runtime"
    assert f"note: what builds wrote in {copied} is removed: the scripts run on {OUT / wheel_file()}" in text
    assert (
        f"{copied}/errors.py was edited after it was built: replaced, a copy is {copied}/errors.py.kept"
        in text
    )
    left = {path.name: path.read_text() for path in (OUT / "runtime").rglob("*") if path.is_file()}
    assert left == {"errors.py.kept": "mine\n", "notes.md": "mine\n"}
    assert names() == {"sample", "runtime", wheel_file(), PAGE, SCHEMA, artifact.IGNORE}
    assert built("--check") == (0, "")


def test_artifacts_of_two_versions_keep_their_wheels(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = project / "recipes/other.yaml"
    other.write_text(RECIPE.replace("name: sample", "name: other"))
    assert built(recipe="other")[0] == 0
    old = wheel_file()
    another_runtime(monkeypatch)
    assert old != wheel_file() and built("--check")[0] == 1
    status, text = built()
    assert status == 0 and "generated/other was built with another runtime: build it again too" in text
    assert {old, wheel_file()} <= names()
    assert runtime.linked((OUT / PAGE).read_bytes()).keys() == {old, wheel_file()}
    assert built(recipe="other")[0] == 0
    assert old not in names() and runtime.linked((OUT / PAGE).read_bytes()).keys() == {wheel_file()}


def test_check_needs_no_wheel_but_refuses_another(project: Path) -> None:
    """git has no wheel, so a check in a clone passes, and says which command writes it."""
    (OUT / wheel_file()).unlink()
    command = "recipe build recipes/sample.yaml"
    assert built("--check") == (0, f"note: {OUT / wheel_file()} is missing; write it: {command}\n")
    assert built() == (0, "") and (OUT / wheel_file()).read_bytes() == wheel()
    (OUT / wheel_file()).write_bytes(wheel() + b"\0")
    status, text = built("--check")
    assert status == 1 and f"{OUT / wheel_file()} differs" in text
    assert built()[0] == 0 and built("--check") == (0, "")


def test_build_refuses_user_files_with_the_names_of_page_and_runtime(project: Path) -> None:
    (OUT / PAGE).write_text("mine")
    assert "is in the way" in built()[1] and (OUT / PAGE).read_text() == "mine"
    (OUT / PAGE).unlink()
    (OUT / "runtime").mkdir()
    (OUT / "runtime/__init__.py").write_text("mine")
    assert "holds other modules" in built()[1] and (OUT / "runtime/__init__.py").read_text() == "mine"


INSTALLERS = {
    "pip": ["pip", "install", "--no-compile", "--no-index"],
    "uv": [
        "uv",
        "pip",
        "install",
        "--offline",
        "--no-cache",
    ],  # which would hold the wheel of an earlier test
}


@pytest.mark.parametrize(("installer", "where"), [("pip", "elsewhere"), ("uv", "away/sample")])
def test_packed_wheel_installs_from_any_folder_by_its_hash(installer: str, where: str, project: Path) -> None:
    with tarfile.open(pack("sample", OUT)) as archive:
        archive.extractall("away", filter="data")
    folder, site = project / "away/sample", project / "site"
    lines = (folder / "requirements-train.txt").read_text().splitlines()
    own = [line for line in lines if line.startswith(("--find-links", "recipec-runtime"))]
    (folder / "own.txt").write_text("\n".join([*own, ""]))
    Path(where).mkdir(exist_ok=True)
    command = [sys.executable, "-m", *INSTALLERS[installer], "--target", site, "-r", folder / "own.txt"]

    def install() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=120)

    file = project / "away" / wheel_file()
    file.write_bytes(wheel() + b"\0")
    done = install()
    assert done.returncode != 0 and "hash" in done.stderr.lower(), done.stderr
    file.write_bytes(wheel())
    done = install()
    assert done.returncode == 0, done.stderr
    assert (site / "runtime" / LIST).read_bytes() == runtime_files()[LIST]


@pytest.mark.e2e
def test_installed_runtime_has_all_modules_that_scripts_import(project: Path) -> None:
    program = replace(compiled(Path("recipes/sample.yaml")))
    write(OUT, {"sample": emit(program, [Backend.TRL, Backend.TORCHAX])})
    with zipfile.ZipFile(OUT / wheel_file()) as archive:
        archive.extractall("site")
    alone = [sys.executable, "-P", Path(__file__).parent / "alone.py", project / "site", OUT / "sample"]
    done = subprocess.run(alone, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


def test_scripts_refuse_another_runtime_and_tell_of_edited_files(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipec.runtime import build_check as started

    assert built("--runtime", "source")[0] == 0
    here, source = project / "generated/sample", project / "generated/runtime"
    monkeypatch.setattr(started, "__file__", str(source / "build_check.py"))
    demand_whole(here)
    assert capsys.readouterr().err == ""
    (source / "errors.py").write_text("mine\n")
    demand_whole(here)
    assert capsys.readouterr().err == (
        f"warning: {source / 'errors.py'} was edited after it was built; recipe.lock.json does not say so\n"
    )
    (source / LIST).write_text("")
    with pytest.raises(UserError, match="sample was built for recipec-runtime==") as refused:
        demand_whole(here)
    assert refused.value.help == "build it again where recipec is installed: recipe build RECIPE"
    shutil.move(source, project / "site")
    monkeypatch.setattr(started, "__file__", str(project / "site/build_check.py"))
    with pytest.raises(UserError) as refused:
        demand_whole(here)
    assert refused.value.help == f"install it: pip install -r {here / 'requirements-train.txt'}"


def test_a_script_without_its_wheel_says_what_writes_it(project: Path) -> None:
    (OUT / wheel_file()).unlink()
    command = ["bash", OUT / "sample/serve/smoke.sh", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, timeout=60)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: there is no {OUT.resolve() / wheel_file()}\n"
        "  = help: recipe build writes it, and recipe pack packs it\n"
    )
    assert built()[0] == 0
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--base-url" in done.stdout, done.stderr
