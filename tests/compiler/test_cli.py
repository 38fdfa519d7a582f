"""Tests of the command line: exit statuses, output streams, and no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipec.compiler.cli import main as cli
from tests.compiler.commands import recipe


def test_build_check_fails_after_an_edit_or_a_changed_recipe(recipe_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "generated"
    status, printed, _ = recipe("build", recipe_file, "-o", out)
    assert status == 0 and "example: " in printed
    assert {"train.py", "merge.py", "recipe.lock.json"} <= {p.name for p in (out / "example").iterdir()}
    assert len([*out.glob("recipec_runtime-*.whl")]) == 1 and not (out / "runtime").exists()
    assert recipe("build", recipe_file, "-o", out, "--check")[0] == 0

    train = out / "example" / "train.py"
    train.write_text(train.read_text().replace("rank=64", "rank=65"))
    status, printed, errors = recipe("build", recipe_file, "-o", out, "--check")
    assert status == 1 and "-" in printed and "rank=65" in printed
    assert f"recipe build {recipe_file} -o {out}" in errors

    assert recipe("build", recipe_file, "-o", out)[0] == 0
    assert recipe("build", recipe_file, "-o", out, "--check", "--set", "train.seed=1")[0] == 1


def test_build_check_without_an_artifact_fails_and_writes_nothing(recipe_file: Path, tmp_path: Path) -> None:
    assert recipe("build", recipe_file, "-o", tmp_path / "out", "--check")[0] == 1
    assert not (tmp_path / "out").exists()


def test_diagnostics_go_to_stderr_and_json_to_stdout(recipe_file: Path) -> None:
    status, printed, errors = recipe("check", recipe_file, "--set", "mesh.axes={fsdp: 3}")
    assert status == 1 and printed == "" and "error[E0202]" in errors
    status, printed, errors = recipe("check", recipe_file, "--set", "mesh.axes={fsdp: 3}", "--format", "json")
    found = json.loads(printed)
    assert status == 1 and errors == ""
    assert set(found[0]) == {"code", "severity", "message", "file", "line", "column", "path", "help"}
    assert "E0202" in {d["code"] for d in found}


def test_check_with_warnings_exits_with_0(recipe_file: Path) -> None:
    status, printed, errors = recipe("check", recipe_file, "--set", "data.loss_on=all")
    assert status == 0 and "warning[W0408]" in errors and printed.endswith(": ok\n")


def test_error_in_one_of_several_recipes_stops_the_build(recipe_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(recipe_file.read_text().replace("rank: 64", "rank: 0"))
    status, _, errors = recipe("build", recipe_file, other, "-o", tmp_path / "out")
    assert status == 1 and "other.yaml:5" in errors and not (tmp_path / "out").exists()


def test_two_recipes_with_the_same_name_are_refused(recipe_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(recipe_file.read_text())
    status, _, errors = recipe("build", recipe_file, other, "-o", tmp_path / "out")
    assert status == 1 and "error[E0041]" in errors and "other.yaml:2:7" in errors
    assert recipe("check", recipe_file, recipe_file)[0] == 1


def test_two_recipes_that_write_the_same_place_are_refused(recipe_file: Path, tmp_path: Path) -> None:
    base = recipe_file.read_text() + "checkpoint: {directory: gs://b/run}\nmerge: {output: gs://b/merged}\n"
    recipe_file.write_text(base)
    files = [tmp_path / f"{name}.yaml" for name in ("one", "two")]
    for file in files:
        file.write_text(f"extends: {recipe_file.name}\nname: {file.stem}\n")
    for command in (["check"], ["build", "-o", tmp_path / "out"]):
        status, _, errors = recipe(*command, *files, "--notes")
        assert status == 1 and errors.count("error[E0043]") == 2 and errors.count("note[N0044]") == 2
        assert "two.yaml: checkpoint: {directory: gs://b/run-two}" in errors
        assert "two.yaml: merge: {output: gs://b/merged-two}" in errors
    assert not (tmp_path / "out").exists()
    status, _, errors = recipe("check", recipe_file, files[0])
    assert status == 1 and "error[E0043]" in errors
    for file in files:
        places = f"gs://b/run-{file.stem}}}\nmerge: {{output: gs://b/merged-{file.stem}}}\n"
        file.write_text(f"{file.read_text()}checkpoint: {{directory: {places}")
    status, _, errors = recipe("check", recipe_file, *files)
    assert status == 0 and "E0043" not in errors and "N0044" not in errors


@pytest.mark.parametrize(
    "arguments", [[], ["bogus"], ["build"], ["check", "--format", "xml", "a.yaml"], ["diff", "a"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert recipe(*arguments)[0] == 2


@pytest.mark.parametrize(
    ("verb", "name"), [("build", "absent.yaml"), ("check", "."), ("rehearse", "absent.yaml")]
)
def test_missing_file_or_folder_as_recipe_gives_a_diagnostic(verb: str, name: str, tmp_path: Path) -> None:
    status, _, errors = recipe(verb, tmp_path / name)
    assert status == 1 and errors.startswith("error[E000")


def test_internal_error_prints_a_traceback_only_on_request(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("recipec.compiler.lower.gather", fail)
    monkeypatch.setattr(sys, "argv", ["recipe", "check", str(recipe_file)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    errors = capsys.readouterr().err
    assert left.value.code == 1
    assert errors.startswith("error[E0000]: internal error of the compiler: ZeroDivisionError: boom\n")
    assert "Traceback" not in errors and "RECIPEC_TRACEBACK=1" in errors
    monkeypatch.setenv("RECIPEC_TRACEBACK", "1")
    with pytest.raises(SystemExit):
        cli.main()
    assert "Traceback" in capsys.readouterr().err


def test_importing_the_compiler_imports_neither_jax_nor_rich() -> None:
    code = (
        "import sys, compiler.cli.main, compiler.lower, compiler.explain.explain, spec.load;"
        "print([m for m in ('jax', 'numpy', 'tunix', 'torch', 'rich', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_closed_stdout_pipe_prints_no_traceback(recipe_file: Path) -> None:
    explain = f"{sys.executable} -m recipec.compiler.cli.main explain {recipe_file} sharding"
    line = f"{explain} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
