"""Tests of how artifacts are written: what is replaced, what is kept, and what remains after a failure."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import Result
from emitting import RECIPE, files_of, program_of
from typer.testing import CliRunner

from recipec.compiler import __version__
from recipec.compiler.artifacts import artifact
from recipec.compiler.artifacts.artifact import IGNORE, LOCK, SCHEMA, Stale, check, write
from recipec.compiler.artifacts.runtime import PAGE, wheel_file
from recipec.compiler.cli.main import app
from recipec.compiler.emitters.emit import emit
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.backend import Backend
from recipec.runtime.backends.run_output import ADAPTER, MODEL
from recipec.runtime.backends.torchax.torchax_run import SUFFIX as TORCHAX
from recipec.runtime.hosts.log import FOLDER as LOGS
from recipec.spec.schema import text as schema_text


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(tmp_path_factory.mktemp("made"))


@pytest.fixture
def files(made: dict[str, bytes]) -> dict[str, bytes]:
    return {**made}


@pytest.fixture
def built(tmp_path: Path, files: dict[str, bytes]) -> Path:
    out = tmp_path / "generated"
    assert write(out, {"sample": files}) == []
    return out


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_fresh_build_passes_check_and_lock_records_its_contents(built: Path, files: dict[str, bytes]) -> None:
    assert check(built, {"sample": files}) == []
    assert {path.name for path in built.iterdir()} == {PAGE, wheel_file(), SCHEMA, IGNORE, "sample"}
    lock = json.loads(files[LOCK])
    assert set(lock["files"]) == {*files} - {LOCK}
    assert lock["files"]["train.py"] == artifact.digest((built / "sample/train.py").read_bytes())
    assert lock["compiler"] == f"recipec {__version__}"
    assert lock["model"]["family"] == "gemma4" and lock["model"]["architecture"]["hidden_size"] == 5376
    assert lock["recipe"]["train"]["optimizer"]["b2"] == 0.999
    assert lock["packages"]["train"]["jax[tpu]"] == "0.10.2"
    write(built, {"sample": files}, source=True)
    sums = artifact.digest((built / "runtime/SHA256SUMS").read_bytes())
    assert lock["runtime"] == {"package": f"recipec-runtime=={__version__}+{sums[:12]}", "sha256": sums}


def test_gitignore_hides_run_outputs_but_no_artifact_files(tmp_path: Path) -> None:
    (tmp_path / "out/deep").mkdir(parents=True)
    (tmp_path / "out/deep/ask.jsonl").write_text('{"prompt": "hello", "expected": "hi"}\n')
    sets = ["checkpoint.directory=./runs/[a]*", "cache.directory=out", "evaluate.prompts=out/deep/ask.jsonl"]
    program = program_of(tmp_path, sets)
    files = emit(program, [Backend.TRL, Backend.TORCHAX])
    out = tmp_path / "generated"
    write(out, {"sample": files})
    folders = [f"runs/[a]*{suffix}" for suffix in ("", TORCHAX, "-trl")]
    folders += ["out", "merged", "merged-adapter", ADAPTER, f".{MODEL}.partial", MODEL, LOGS, "results/bench"]
    left = [f"sample/{folder}/1/metrics.jsonl" for folder in folders]
    left += ["sample/__pycache__/a.pyc", "venv/bin/python", wheel_file()]
    for path in left:
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).touch()
    (out / "sample/notes.md").write_text("mine")

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=out, check=True, capture_output=True, text=True)
        return done.stdout.split("\0")[:-1]

    git("init", "--quiet")
    seen = {*git("ls-files", "--others", "--exclude-standard", "-z")}
    assert seen == {f"sample/{path}" for path in files} | {IGNORE, PAGE, SCHEMA, "sample/notes.md"}


def test_forced_build_preserves_user_gitignore_files(tmp_path: Path, files: dict[str, bytes]) -> None:
    out = tmp_path / "generated"
    write(out, {"sample": {path: content for path, content in files.items() if path == "train.py"}})
    for name in (out, out / "sample"):
        (name / IGNORE).write_text("mine\n")
    with pytest.raises(ArtifactError, match="no build wrote it"):
        write(out, {"sample": files})
    write(out, {"sample": files}, force=True)
    assert (out / IGNORE).read_text() == (out / f"sample/{IGNORE}.kept").read_text() == "mine\n"
    assert check(out, {"sample": files}) == []
    assert not any(line.startswith("warning") for line in write(out, {"sample": files}))


def map_of(stale: list[Stale]) -> dict[str, str]:
    return {found.path: found.state for found in stale}


@pytest.mark.parametrize("path", [f"sample/{LOCK}", "runtime/launch/host.sh", PAGE])
def test_check_reports_an_edited_file(path: str, built: Path, files: dict[str, bytes]) -> None:
    write(built, {"sample": files}, source=True)
    text = (built / path).read_text()
    (built / path).write_text(f"{text}# edited\n")
    (stale,) = check(built, {"sample": files})
    difference = str(stale)
    assert f"--- {(built / path).as_posix()}\n" in difference
    assert "-# edited\n" in difference


@pytest.mark.parametrize("path", ["sample/serve/Dockerfile", "runtime/__init__.py", PAGE])
def test_check_reports_a_missing_file(path: str, built: Path, files: dict[str, bytes]) -> None:
    write(built, {"sample": files}, source=True)
    (built / path).unlink()
    assert map_of(check(built, {"sample": files})) == {(built / path).as_posix(): "is missing"}


def test_check_reports_an_extra_file(built: Path, files: dict[str, bytes]) -> None:
    fewer = {path: content for path, content in files.items() if path != "serve/serve.sh"}
    assert (
        map_of(check(built, {"sample": fewer}))[f"{built.as_posix()}/sample/serve/serve.sh"] == "is left over"
    )
    write(built, {"sample": files}, source=True)
    (built / "runtime/stray.py").write_text("x = 1\n")
    stray = {f"{built.as_posix()}/runtime/stray.py": "is left over"}
    assert map_of(check(built, {"sample": files})) == stray


def test_check_reports_a_stale_artifact(built: Path, tmp_path: Path) -> None:
    changed = files_of(tmp_path / "recipes", ["train.micro_batch_size=2"])
    difference = "".join(map(str, check(built, {"sample": changed})))
    assert "-    micro_batch_size=1,\n+    micro_batch_size=2,\n" in difference


def test_check_ignores_user_files_and_pycache(built: Path, files: dict[str, bytes]) -> None:
    write(built, {"sample": files}, source=True)
    (built / "sample/notes.txt").write_text("mine")
    (built / "runtime/__pycache__").mkdir()
    (built / "runtime/__pycache__/settings.cpython-311.pyc").write_bytes(b"\0")
    assert check(built, {"sample": files}) == []


def test_rebuild_keeps_checkpoints_and_user_files(built: Path, tmp_path: Path) -> None:
    (built / "sample/checkpoints").mkdir()
    (built / "sample/checkpoints/weights").write_text("precious")
    (built / "sample/serve/mine.yaml").write_text("mine")
    changed = files_of(tmp_path / "recipes", ["serve=null"])
    notes = write(built, {"sample": changed})
    assert any("checkpoints/" in note for note in notes)
    assert (built / "sample/checkpoints/weights").read_text() == "precious"
    assert (built / "sample/serve/mine.yaml").read_text() == "mine"
    assert not (built / "sample/serve/serve.sh").exists()
    assert check(built, {"sample": changed}) == []


def test_lock_cannot_delete_files_outside_the_artifact(
    built: Path, files: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "precious").write_text("x")
    lock = json.loads(files[LOCK])
    lock["files"] |= {"../../precious": "0", str(tmp_path / "precious"): "0"}
    (built / "sample" / LOCK).write_text(json.dumps(lock))
    write(built, {"sample": files})
    assert (tmp_path / "precious").exists()


def test_schema_next_to_artifacts_is_rebuilt_when_missing_or_stale(
    built: Path, files: dict[str, bytes]
) -> None:
    """Check the schema's path in the first line of an artifact's recipe.yaml."""
    schema = built / SCHEMA
    first = (built / "sample/recipe.yaml").read_text(encoding="utf-8").split("\n")[0]
    assert (built / "sample" / first.partition("$schema=")[2]).resolve() == schema.resolve()
    assert schema.read_bytes() == schema_text().encode()
    for content in (None, b'{"title": "recipec recipe"}\n'):
        schema.unlink() if content is None else schema.write_bytes(content)
        assert schema.as_posix() in map_of(check(built, {"sample": files}))
        write(built, {"sample": files})
        assert check(built, {"sample": files}) == []


@pytest.mark.parametrize("content", [b'{"title": "of something else"}', b"not JSON", b"[]", None])
def test_build_refuses_user_file_with_the_schema_name(
    content: bytes | None, built: Path, files: dict[str, bytes]
) -> None:
    (built / SCHEMA).unlink()
    (built / SCHEMA).mkdir() if content is None else (built / SCHEMA).write_bytes(content)
    before = tree(built)
    with pytest.raises(ArtifactError, match="is in the way: it is not the schema of recipes"):
        write(built, {"sample": files})
    assert tree(built) == before


def test_build_notes_artifact_built_with_another_runtime(built: Path, files: dict[str, bytes]) -> None:
    lock = json.loads(files[LOCK])
    (built / "other").mkdir()
    (built / "other" / LOCK).write_text(json.dumps(lock | {"name": "other", "runtime": {"train.py": "0"}}))
    assert any("other was built with another runtime" in note for note in write(built, {"sample": files}))


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_failed_build_leaves_the_folder_unchanged(
    share: float, built: Path, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(built, {"sample": files}, source=True)
    (built / "runtime/settings.py").write_text("another version's\n")  # is written before the others
    before = tree(built)
    changed = files_of(tmp_path / "recipes", ["train.micro_batch_size=2"])
    failing_call = 1 + round(share * sum(files.get(path) != changed[path] for path in changed))
    calls = 0
    original = Path.write_bytes

    def failing(self: Path, data: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls == failing_call:
            original(self, data[: len(data) // 2])
            raise OSError(28, "No space left on device", str(self))
        return original(self, data)

    monkeypatch.setattr(Path, "write_bytes", failing)
    with pytest.raises(OSError, match="No space"):
        write(built, {"sample": changed})
    assert tree(built) == before
    calls = 0
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "fresh", {"sample": changed})
    assert not (tmp_path / "fresh").exists()


def test_build_refuses_files_and_folders_that_block_its_paths(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    (out / "sample/train.py").mkdir(parents=True)
    with pytest.raises(ArtifactError, match="in the way"):
        write(out, {"sample": files})
    (out / "sample/train.py").rmdir()
    for path in (out / "sample/serve", out / "sample"):
        path.rmdir() if path.is_dir() else None
        path.write_text("a file")
        with pytest.raises(ArtifactError, match="in the way"):
            write(out, {"sample": files})
        path.unlink()
    (out / "runtime").mkdir()
    (out / "runtime/__init__.py").write_text("x = 1\n")
    with pytest.raises(ArtifactError, match="other modules or scripts"):
        write(out, {"sample": files})
    assert (out / "runtime/__init__.py").exists()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    for name in ("old", "other"):
        text = RECIPE.replace("name: sample", f"name: {name}").replace("serve:", "# serve:")
        (tmp_path / f"recipes/{name}.yaml").write_text(text)
    return tmp_path


def recipe(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_check_of_a_missing_artifact_says_so_in_a_line(project: Path) -> None:
    done = recipe("-q", "build", "recipes/old.yaml", "--check")
    assert done.exit_code == 1 and done.stdout == ""
    assert "generated/old is missing" in done.stderr and len(done.stderr.splitlines()) == 2
    done = recipe("build", "recipes/old.yaml", "--check")
    assert done.exit_code == 1 and "generated/old is missing\n" in done.stdout
    assert len(done.stdout.splitlines()) == 2  # with the page and the schema
    assert recipe("-q", "build", "recipes/old.yaml").exit_code == 0
    (project / "generated/old/train.py").write_text("edited\n")
    done = recipe("-q", "build", "recipes/old.yaml", "--check")
    assert done.stdout == "" and "generated/old/train.py differs" in done.stderr
    assert "-edited\n" in recipe("build", "recipes/old.yaml", "--check").stdout


def test_the_artifact_of_a_renamed_recipe_is_reported_and_pruned(project: Path) -> None:
    assert recipe("-q", "build", "recipes/old.yaml", "recipes/other.yaml").exit_code == 0
    mine = project / "generated/old/checkpoints/weights"
    mine.parent.mkdir()
    mine.write_text("precious")
    renamed = project / "recipes/new.yaml"
    renamed.write_text((project / "recipes/old.yaml").read_text().replace("name: old", "name: new"))
    (project / "recipes/old.yaml").unlink()
    # The other recipe is not named on the command line, and its artifact is not left over.
    done = recipe("build", "recipes/new.yaml")
    assert done.exit_code == 0 and "note: generated/old is left over" in done.stderr
    assert "generated/other" not in done.stderr
    done = recipe("build", "recipes/new.yaml", "--check")
    assert done.exit_code == 0 and "warning: generated/old is left over" in done.stderr
    assert "recipe build recipes/new.yaml --prune" in done.stderr
    done = recipe("build", "recipes/new.yaml", "--check", "--prune")
    assert done.exit_code == 1 and "error: generated/old is left over" in done.stderr
    (project / "generated/old/merge.py").write_text("edited\n")
    done = recipe("build", "recipes/new.yaml", "--prune")
    assert done.exit_code == 0 and "note: what a build wrote in generated/old is removed" in done.stderr
    assert "warning: generated/old/merge.py was edited after it was built, and stays" in done.stderr
    left = sorted(path.name for path in (project / "generated/old").rglob("*") if path.is_file())
    assert left == ["merge.py", "weights"] and mine.read_text() == "precious"
    assert recipe("build", "recipes/new.yaml", "recipes/other.yaml", "--check", "--prune").exit_code == 0
