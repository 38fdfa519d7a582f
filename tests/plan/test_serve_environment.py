"""Tests of the environment that compiles the serving step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from recipec.compiler.errors import ArtifactError
from recipec.compiler.plan.serve import environment


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(environment.VARIABLE, str(tmp_path / "serve"))
    return tmp_path / "serve"


def installing(monkeypatch: pytest.MonkeyPatch, outcome: BaseException | None = None) -> None:
    """Replace the two steps of an installation."""

    def run(command: list[str], building: Path) -> None:
        if "venv" in command:
            (building / "bin").mkdir()
            (building / "bin" / "python").touch()
            (building / "pyvenv.cfg").touch()
        elif outcome:
            raise outcome

    monkeypatch.setattr(environment, "interpreter", lambda: Path(sys.executable))
    monkeypatch.setattr(environment, "_run", run)


def test_serving_environment_is_installed_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installing(monkeypatch)
    said: list[str] = []
    assert environment.find() is None
    assert environment.make(said.append) == place / "bin" / "python"
    assert "vllm-tpu==0.32.0" in said[0] and "7 GB" in said[0]
    said.clear()
    assert environment.make(said.append) == place / "bin" / "python" and not said


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), ArtifactError("pip failed")])
def test_interrupted_or_failed_installation_leaves_no_files(
    place: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    installing(monkeypatch, fault)
    with pytest.raises(type(fault)):
        environment.make()
    assert not place.exists() and not list(place.parent.glob(".serve.*"))


def test_leftovers_of_a_killed_installation_are_removed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = place.parent / ".serve.abc"
    left.mkdir()
    installing(monkeypatch)
    environment.make()
    assert not left.exists() and environment.find()


def test_an_environment_of_another_version_is_replaced(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.mkdir()
    (place / "pyvenv.cfg").touch()
    (place / environment.STAMP).write_text("vllm-tpu==0.1.0")
    installing(monkeypatch)
    environment.make()
    assert environment.find()


def test_make_refuses_to_replace_an_unrelated_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.mkdir()
    (place / "notes.txt").touch()
    installing(monkeypatch)
    with pytest.raises(ArtifactError, match="in the way"):
        environment.make()
    assert (place / "notes.txt").exists()


def test_installation_is_refused_with_too_little_disk_space(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installing(monkeypatch)
    monkeypatch.setattr(environment, "DISK_BYTES", 1e18)
    with pytest.raises(ArtifactError, match="GB left"):
        environment.make()


def test_missing_python_error_says_how_to_install_python_3_12(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(ArtifactError, match=r"needs Python 3\.12") as caught:
        environment.make()
    assert caught.value.help and "uv python install 3.12" in caught.value.help


def test_failed_installation_step_error_quotes_its_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('ERROR: no matching distribution'); raise SystemExit(1)"]
    with pytest.raises(ArtifactError, match="no matching distribution"):
        environment._run(command, tmp_path)
