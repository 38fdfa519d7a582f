"""Tests of `recipe` in processes with broken streams, folders, limits and terminals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from inside import CONTROL, Run

UNREAD = 141


def test_broken_pipe_is_not_an_error(run: Run) -> None:
    done = run("explain", "recipe.yaml", stdout="unread")
    assert (done.status, done.err) == (UNREAD, "")
    assert run("check", "absent.yaml", stderr="unread").status in (1, UNREAD)


def test_full_disk_behind_stdout_gives_one_error(run: Run) -> None:
    for command in (["explain", "recipe.yaml"], ["schema"], ["check", "recipe.yaml"], ["--version"]):
        done = run(*command, stdout="full")
        assert done.status == 1 and done.faults() == []
        assert done.err.count("No space left on device") == 1
    assert run("check", "--wrong", stderr="full").status == 2
    assert run("check", "absent.yaml", stdout="full", stderr="full").status == 1


def test_commands_work_with_closed_streams(run: Run, tmp_path: Path) -> None:
    done = run("build", "recipe.yaml", "-o", "out", stdin="closed", stdout="closed", stderr="closed")
    assert (done.status, done.out, done.err) == (0, "", "")
    assert run("build", "recipe.yaml", "-o", "out", "--check").status == 0, (
        "something was printed into a file"
    )
    assert run("check", "absent.yaml", stderr="closed").status == 1
    assert run("explain", "recipe.yaml", stdin="closed").status == 0


def test_file_size_limit_leaves_no_partial_output(run: Run, tmp_path: Path) -> None:
    done = run("build", "recipe.yaml", "-o", "out", largest_file=2000)
    assert done.status == 1 and done.faults() == []
    assert "error: out cannot be written: File too large\n  = help: " in done.err
    assert not (tmp_path / "out").exists()
    assert run("build", "recipe.yaml", "-o", "out").status == 0
    (tmp_path / "train.jsonl").write_text("{}\n")
    done = run("pack", "example", "--from", "out", "--recipe", "recipe.yaml", largest_file=2000)
    assert done.status == 1 and "example.tar.gz cannot be written: File too large" in done.err
    assert {path.name for path in tmp_path.iterdir()} == {"out", "recipe.yaml", "train.jsonl"}


def test_read_only_folder_gives_an_error(run: Run, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    for command in (
        ["build", "recipe.yaml", "-o", "locked"],
        ["build", "recipe.yaml", "-o", "locked/more"],
        ["new", "x", "--model", "google/gemma-3-270m-it", "--accelerator", "v5e-8", "-o", "locked/x.yaml"],
    ):
        done = run(*command, unprivileged=True)
        assert done.status == 1 and done.faults() == [] and "Permission denied" in done.err, done
    assert list(locked.iterdir()) == []


def test_deleted_working_folder_gives_an_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    done = run("check", tmp_path / "recipe.yaml", cwd=str(tmp_path / "gone"), deleted=True)
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("error: the current folder no longer exists\n")


def test_characters_outside_the_stream_encoding_are_escaped(run: Run, tmp_path: Path) -> None:
    text = (tmp_path / "recipe.yaml").read_text("utf-8")
    (tmp_path / "grün 🙂.yaml").write_text(text.replace("rank: 8}", "rank: -8}  # größer 🙂"), "utf-8")
    done = run("check", "grün 🙂.yaml", encoding="ascii")
    assert done.status == 1 and done.faults() == [] and "gr\\u00fcn \\ud83d\\ude42.yaml:5:14" in done.err
    done = run("check", "grün 🙂.yaml", "--format", "json", encoding="ascii")
    assert json.loads(done.out)[0]["file"] == "grün 🙂.yaml"
    done = run("schema", encoding="ascii")
    assert done.status == 0 and json.loads(done.out)["title"] and done.out.isascii()
    assert run("explain", "recipe.yaml", encoding="latin-1").status == 0


def test_commands_work_in_a_narrow_terminal(run: Run, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("recipe: 1\nname: x\nlora: {rnk: 1}\n")
    for command in (["--help"], ["build", "--help"], ["explain", "recipe.yaml"], ["check", "wrong.yaml"]):
        done = run(*command, terminal=40, environment={"COLUMNS": None, "TERM": "xterm", "NO_COLOR": "1"})
        assert done.status == (1 if command[0] == "check" else 0) and "Traceback" not in done.out
        assert not CONTROL.search(done.out.replace("\r\n", "\n"))
    shown = run("build", "--help", terminal=40, environment={"COLUMNS": None}).out
    assert max(map(len, shown.replace("\r", "").split("\n"))) <= 80


@pytest.mark.parametrize("environment", [{"HOME": None}, {"TMPDIR": "/nowhere"}, {"TERM": None, "LANG": "C"}])
def test_build_works_with_a_minimal_environment(run: Run, environment: dict[str, str | None]) -> None:
    assert run("build", "recipe.yaml", "-o", "out", environment=environment).status == 0
    done = run("build", "recipe.yaml", "-o", "out", "--check", environment=environment)
    assert done.status == 0 and done.faults() == []


def test_control_characters_in_recipe_do_not_reach_the_terminal(run: Run, tmp_path: Path) -> None:
    text = (tmp_path / "recipe.yaml").read_text("utf-8")
    evil = '"a\\e[2J\\a\\u009b31m\\u202eb"'
    (tmp_path / "evil.yaml").write_text(f"{text}merge: {{output: {evil}}}\nevaluate: {{prompts: {evil}}}\n")
    (tmp_path / "value.yaml").write_text(text.replace("name: example", f"name: {evil}"))
    for command in (
        ["check", "evil.yaml"],
        ["check", "value.yaml", "--format", "json"],
        ["explain", "evil.yaml"],
        ["diff", "recipe.yaml", "evil.yaml"],
        ["build", "evil.yaml", "-o", "out\x1b[2J"],
        ["build", "evil.yaml", "-o", "out\x1b[2J", "--check"],
        ["pack", "\x1b[2J"],
        ["nosuch\x1b[2J"],
    ):
        done = run(*command)
        assert not CONTROL.search(done.out + done.err), (command, re.findall(".*\x1b.*", done.out + done.err))
