"""Tests of the wheel and the source archive: reproducible bytes, and installation as users do it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from recipec.compiler import __version__, catalog
from recipec.compiler.miniature.small_checkpoint import complete, write_checkpoint
from tests.interpreters import interpreter

PACKAGES = ("recipec", "spec", "compiler", "port", "templates", "runtime")
OUTSIDE = ("port/scripts/", "port/README.md", "port/same-run.md")
"""Parts of the packages' folders that are for those who work on the project."""
NAMES = (f"recipec-{__version__}-py3-none-any.whl", f"recipec-{__version__}.tar.gz")
FLAGSHIP = "gemma4-31b-v5p8"
BESIDE = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore")
"""Files of the source archive in addition to the packages."""
STRAY = (
    *("tests/test_x.py", "generated/x/train.py", "recipes/x.yaml", "docs/x.md", "dist/x.whl", "x.py"),
    *("spec/__pycache__/load.pyc", "compiler/data/own.csv", "compiler/.load.py.swp", "templates/a~"),
)
"""Files in a checkout that are no part of a distribution."""
AXOLOTL = """\
base_model: Qwen/Qwen3-0.6B
datasets: [{path: org/chats, type: chat_template}]
adapter: lora
lora_r: 16
lora_alpha: 16
lora_target_linear: true
sequence_len: 1024
micro_batch_size: 1
num_epochs: 1
learning_rate: 1e-4
"""
ISOLATED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RECIPEC_CACHE")


def run(*command: str | Path, cwd: Path, **variables: str | Path) -> str:
    """Run a command and return its stdout.

    Args:
        cwd: the working folder.
        variables: added to the environment, from which paths to this checkout are removed.
    """
    environment = {key: value for key, value in os.environ.items() if key not in ISOLATED}
    environment |= {key: str(value) for key, value in variables.items()}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def tracked(root: Path) -> list[str]:
    """Return the packages' files in a clone, without the links between the packages."""
    text = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *PACKAGES, cwd=root)
    files = [line for line in text.splitlines() if (root / line).is_file()]
    return sorted(file for file in files if not file.startswith(OUTSIDE))


def clone(root: Path, folder: Path, mode: int | None = None, when: float = 1.0e9) -> Path:
    """Clone the repository with git, as its users do, and bring along what is not committed yet.

    Args:
        mode: the permissions of the distribution's files, for their bytes must not depend on them.
        when: their time.
    """
    run("git", "clone", "--quiet", "--no-hardlinks", root, folder, cwd=root)
    assert (folder / "recipec" / "spec").is_symlink(), "the links of a checkout are in the clone"
    changed = run("git", "ls-files", "-z", "-m", "-o", "--exclude-standard", cwd=root)
    for name in filter(None, changed.split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    for name in (*tracked(root), *BESIDE) if mode else ():
        (folder / name).chmod(mode)
        os.utime(folder / name, (when, when))
    return folder


def littered(folder: Path) -> Path:
    """Put files into a clone that are no part of a distribution."""
    for name in STRAY:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1\n")
    return folder


def built(folder: Path, *kinds: str, **variables: str) -> Path:
    """Run `python -m build` on a copy, and return the output folder."""
    command = (sys.executable, "-m", "build", "--no-isolation", "-o", folder / "out", *kinds)
    run(*command, cwd=folder, **variables)
    return folder / "out"


@pytest.fixture(scope="module")
def dist(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source archive, and the wheel from it, and return their folder."""
    return built(littered(clone(root, tmp_path_factory.mktemp("clone") / "recipec", 0o644)))


@pytest.fixture(scope="module")
def artifact(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Build the Gemma 4 31B recipe from the checkout."""
    folder = tmp_path_factory.mktemp("checkout")
    command = (
        sys.executable,
        "-m",
        "recipec.compiler.cli.main",
        "build",
        f"recipes/{FLAGSHIP}.yaml",
        "-o",
        folder,
    )
    run(*command, cwd=root)
    return digests(folder)


def digests(folder: Path) -> Mapping[str, str]:
    """Return sha256 by path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {f"{path.relative_to(folder)}": hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.e2e
def test_pyproject_pins_the_installed_hatchling(root: Path) -> None:
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["build-system"]["requires"]
    assert wanted == [f"hatchling=={metadata.version('hatchling')}"]


@pytest.mark.e2e
def test_builds_of_two_clones_give_the_same_bytes(root: Path, dist: Path, tmp_path: Path) -> None:
    """Build elsewhere, later, with other permissions, and from the tree instead of the archive."""
    other = littered(clone(root, tmp_path / "a" / "longer" / "path", 0o600, 1.7e9))
    again = built(other, "--sdist", "--wheel", TZ="Pacific/Auckland", LC_ALL="C", PYTHONHASHSEED="7")
    assert sorted(os.listdir(dist)) == sorted(NAMES)
    assert digests(again) == digests(dist)


@pytest.mark.e2e
def test_wheel_and_sdist_contain_exactly_the_tracked_files(root: Path, dist: Path) -> None:
    package = tracked(root)
    info = f"recipec-{__version__}.dist-info"
    own = [
        f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    ]
    with zipfile.ZipFile(dist / NAMES[0]) as archive:
        installed = {name: f"recipec/{name.removeprefix('recipec/')}" for name in package}
        assert sorted(archive.namelist()) == sorted([*installed.values(), *own])
        for name in package:
            assert archive.read(installed[name]) == (root / name).read_bytes(), name
        entry = archive.read(f"{info}/entry_points.txt").decode()
    assert entry == (
        "[console_scripts]\nrecipe = recipec.compiler.cli.main:main\n\n"
        "[recipec.commands]\nport = recipec.port.options:port\n"
    )
    with tarfile.open(dist / NAMES[1]) as source:
        names = sorted(name.partition("/")[2] for name in source.getnames())
    assert names == sorted([*package, *BESIDE, "PKG-INFO"])


@pytest.mark.e2e
def test_twine_check_passes_for_wheel_and_sdist(dist: Path) -> None:
    command = (sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir()))
    said = run(*command, cwd=dist, NO_COLOR="1")
    assert said.count("PASSED") == 2, said


def walk(root: Path, folder: Path, command: Path, artifact: Mapping[str, str]) -> None:
    """Take a user's first steps with an installed `recipe`, in a folder with packages of the same names.

    Args:
        folder: the new folder.
    """
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise ImportError('{name} of the working folder')\n")
    shutil.copytree(root / "recipes", folder / "recipes", ignore=lambda _, names: {"data"} & {*names})
    recipe = f"recipes/{FLAGSHIP}.yaml"

    def say(*arguments: str) -> str:
        return run(command, *arguments, cwd=folder, HOME=folder / "home", PATH="/usr/bin:/bin")

    assert say("--version") == f"recipec {__version__}\n"
    say("build", recipe)
    assert digests(folder / "generated") == artifact
    asked = ("--model", "google/gemma-3-270m-it", "--accelerator", "cpu-8", "--data", "gs://bucket/a.jsonl")
    say("new", "mine", *asked, "--format", "chat", "--serve", "none")
    made = str(next(folder.rglob("mine.yaml")))
    (folder / "axolotl.yaml").write_text(AXOLOTL)
    say("port", "axolotl.yaml", "-o", "ported.yaml", "--devices", "8")
    assert say("check", recipe, made, "ported.yaml").splitlines() == [
        f"{name}: ok" for name in (recipe, made, "ported.yaml")
    ]


def look(root: Path, python: Path, folder: Path) -> None:
    """Check that an environment holds only recipec and its dependencies."""
    code = (
        "import json, sys; from importlib import metadata; "
        "from recipec import spec, compiler, port, templates, runtime;"
        "print(json.dumps([sys.path, [m.__file__ for m in (spec, compiler, port, templates, runtime)],"
        "[d.name for d in metadata.distributions()]]))"
    )
    path, files, names = json.loads(run(python, "-P", "-c", code, cwd=folder))
    assert [entry for entry in path if Path(entry).is_relative_to(root)] == []
    assert all(Path(file).is_relative_to(python.parent.parent) for file in files)
    assert {canonicalize_name(name) for name in names} - {"pip"} <= needed()


def needed() -> set[str]:
    """Return recipec and its direct and indirect dependencies, without extras."""
    found: set[str] = set()
    wanted = ["recipec"]
    while wanted:
        name = canonicalize_name(wanted.pop())
        if name not in found:
            found.add(name)
            requirements = map(Requirement, metadata.requires(name) or ())
            wanted += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.e2e
def test_pipx_install_of_the_wheel_works_with_python_3_11(
    root: Path, dist: Path, tmp_path: Path, artifact: Mapping[str, str]
) -> None:
    command = (sys.executable, "-m", "pipx", "install", "--backend", "pip", "--python", interpreter("3.11"))
    run(*command, dist / NAMES[0], cwd=tmp_path, **places(tmp_path))
    look(root, tmp_path / "pipx" / "venvs" / "recipec" / "bin" / "python", tmp_path)
    walk(root, tmp_path / "walk", tmp_path / "bin" / "recipe", artifact)


def places(folder: Path) -> Mapping[str, Path]:
    """Return the variables that say where pipx and uv install commands."""
    return {
        "HOME": folder / "home",
        "PIPX_HOME": folder / "pipx",
        "PIPX_BIN_DIR": folder / "bin",
        "UV_TOOL_DIR": folder / "tools",
        "UV_TOOL_BIN_DIR": folder / "bin",
        "UV_CACHE_DIR": folder / "cache",
    }


INSTALLERS: Mapping[str, tuple[str, ...]] = {
    "pip": ("PYTHON", "-m", "venv", "ENV", "&&", "ENV/bin/python", "-m", "pip", "install", "--quiet", "."),
    "pipx": (sys.executable, "-m", "pipx", "install", "--backend", "pip", "--python", "PYTHON", "."),
    "uv": (sys.executable, "-m", "uv", "tool", "install", "--python", "PYTHON", "."),
}
"""The commands of README.md and docs/versions.md that install from a clone, which is the working folder."""


@pytest.mark.e2e
@pytest.mark.parametrize(("name", "version"), [("pip", "3.13"), ("pipx", "3.11"), ("uv", "3.12")])
def test_install_from_a_git_clone_builds_packs_and_adds_extras(
    name: str, version: str, root: Path, tmp_path: Path, artifact: Mapping[str, str]
) -> None:
    source = clone(root, tmp_path / "recipec")
    environment = {
        "pip": tmp_path / "env",
        "pipx": tmp_path / "pipx" / "venvs" / "recipec",
        "uv": tmp_path / "tools" / "recipec",
    }[name]
    words = [word.replace("PYTHON", str(interpreter(version))) for word in INSTALLERS[name]]
    line = " ".join(words).replace("ENV", str(environment))
    run("bash", "-ec", line, cwd=source, **places(tmp_path))
    shutil.rmtree(source)
    recipe = environment / "bin" / "recipe"
    walk(root, tmp_path / "walk", recipe, artifact)

    shutil.copytree(root / "recipes", tmp_path / "recipes")
    run(recipe, "build", "recipes/quickstart.yaml", cwd=tmp_path, **places(tmp_path))
    run(recipe, "pack", "quickstart", cwd=tmp_path, **places(tmp_path))
    with tarfile.open(tmp_path / "quickstart.tar.gz") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert (tmp_path / "unpacked" / "quickstart" / "train.py").is_file()

    # What lacks a package says what to type, for this kind of installation.
    lacking = subprocess.run(
        [recipe, "report", "quickstart"],
        cwd=tmp_path,
        env={**os.environ, **{key: str(place) for key, place in places(tmp_path).items()}},
        capture_output=True,
        text=True,
    )
    assert lacking.returncode == 1, lacking.stdout
    command = lacking.stderr.partition("= help: ")[2].splitlines()[0]
    tools = Path(sys.executable).parent
    run("bash", "-ec", command, cwd=tmp_path, PATH=f"{tools}:/usr/bin:/bin", **places(tmp_path))
    run(environment / "bin" / "python", "-c", "import plotly, plotext", cwd=tmp_path)


@pytest.mark.e2e
def test_commands_of_the_readme_install_an_artifact_of_a_clone_and_it_trains(
    root: Path, tmp_path: Path
) -> None:
    """Run the README's commands, which write the wheel and install what an artifact pins."""
    source = clone(root, tmp_path / "recipec")
    assert not [*(source / "generated").glob("*.whl")]
    run(interpreter("3.12"), "-m", "venv", "env", cwd=tmp_path)
    run("env/bin/python", "-m", "pip", "install", "--quiet", source, cwd=tmp_path)
    tools = f"{tmp_path / 'env' / 'bin'}:{interpreter('3.11').parent}:/usr/bin:/bin"
    text = (root / "README.md").read_text(encoding="utf-8")
    (block,) = (code for code in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "-m venv venv" in code)
    run("bash", "-ec", block, cwd=source, PATH=tools)
    (wheel,) = (source / "generated").glob("*.whl")
    assert run("git", "check-ignore", wheel, cwd=source) == f"{wheel}\n"
    recipe = tmp_path / "env" / "bin" / "recipe"
    run(recipe, "pack", "quickstart", "-o", tmp_path / "quickstart.tar.gz", cwd=source)
    with tarfile.open(tmp_path / "quickstart.tar.gz") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    config = complete(catalog.entries()["recipec/tiny-gemma4"]["config"])
    write_checkpoint(tmp_path / "model", config, dtype="float32")
    script = (
        source / "venv/bin/python",
        "quickstart/train.py",
        "--model",
        tmp_path / "model",
        "--steps",
        "1",
    )
    printed = run(*script, cwd=tmp_path / "unpacked", HOME=tmp_path / "home")
    assert "done: steps=1" in printed, printed
