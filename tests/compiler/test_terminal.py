"""Tests of the command's output: --quiet and --verbose, colors, completion, progress, and Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from recipec.compiler import terminal
from recipec.compiler.artifacts import whole
from recipec.compiler.cli import guard
from recipec.compiler.cli.main import app
from recipec.runtime import progress
from recipec.runtime.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = "recipes/quickstart.yaml"
NOTED = "tests/golden/notes-counted/recipe.yaml"
"""A recipe with a warning and two notes."""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use the repository's root, and an environment that requests no color."""
    monkeypatch.chdir(ROOT)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    yield
    terminal._begin()


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("words", [["-q", "check", NOTED], ["check", NOTED, "--quiet"]])
def test_quiet_prints_no_notes_and_no_success(words: list[str]) -> None:
    assert run(*words) == (0, "", "")
    status, printed, said = run("check", NOTED)
    assert (status, printed) == (0, f"{NOTED}: ok\n") and "warning[W0401]" in said and "note[" not in said
    assert said.endswith("\n1 warning, 2 notes (--notes shows them)\n")
    assert run("check", NOTED, "--notes")[2].count("note[") == 2


def test_several_recipes_have_one_count_of_notes_and_json_has_all_notes(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    text = Path(NOTED).read_text(encoding="utf-8")
    other.write_text(text.replace("name: example", "name: other").replace("/run", "/other"), encoding="utf-8")
    _, _, said = run("check", NOTED, str(other))
    assert said.endswith("\n2 warnings, 4 notes (--notes shows them)\n") and said.count("--notes") == 1
    found = json.loads(run("check", NOTED, str(other), "--format", "json")[1])
    assert [item["severity"] for item in found].count("note") == 4


def test_shipped_recipes_have_no_warnings_and_no_notes() -> None:
    recipes = [str(path) for path in sorted(Path("recipes").glob("*.yaml"))]
    status, printed, _ = run("check", *recipes, "--format", "json")
    assert len(recipes) > 30 and (status, printed) == (0, "[]\n")


def test_commands_that_read_recipes_take_notes() -> None:
    shown = {name: run(name, "--help")[1] for name in ("check", "build", "plan", "rehearse", "port")}
    assert [name for name, text in shown.items() if "--notes" not in text] == []
    assert "--notes" not in run("schema", "--help")[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rehearse", QUICKSTART, "--steps", "1"], "'--steps': it must be at least 4"),
        (["rehearse", QUICKSTART, "--steps", "x"], "'--steps': it must be a whole number"),
        (["cost", QUICKSTART, "--hours", "x"], "'--serve-hours' / '--hours': it must be a number"),
        (["cost", QUICKSTART, "--train-hours", "1", "--run", "x"], "--train-hours also gives the hours"),
        (["check", QUICKSTART, "--format", "yaml"], "'--format': 'yaml' is not one of 'text', 'json'"),
        (["check", QUICKSTART, "-q", "--notes"], "--quiet and --notes: one of the two"),
        (["check", QUICKSTART, "-v", "-q"], "--quiet and --verbose: one of the two"),
        (["parity", "--compare", "a.npz"], "name at least two traces: A.npz B.npz"),
    ],
)
def test_wrong_usage_exits_with_2_and_a_plain_message(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tests own this process, so that its signals and streams stay unchanged.
    monkeypatch.setattr(guard, "_open_streams", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as left:
        guard.guarded(lambda: app(words, standalone_mode=False))
    assert left.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_quiet_still_prints_explain_and_json_output() -> None:
    status, printed, said = run("explain", QUICKSTART, "mesh", "-q")
    assert status == 0 and "cpu-8" in printed and said == ""
    status, printed, _ = run("check", QUICKSTART, "-q", "--format", "json")
    assert status == 0 and json.loads(printed) == []


def test_verbose_prints_files_and_times() -> None:
    for words in (["-v", "check", QUICKSTART], ["check", QUICKSTART, "--verbose"]):
        status, _, said = run(*words)
        assert status == 0
        assert re.search(rf"recipe: reading {QUICKSTART}: \d+\.\d\d s", said)
        assert re.search(r"recipe: \d+\.\d\d s in all", said)
    assert "in all" not in run("check", QUICKSTART)[2]  # a later command is not verbose


def test_quiet_and_verbose_exclude_each_other() -> None:
    status, _, said = run("-q", "check", QUICKSTART, "-v")
    assert status == 2 and "--quiet and --verbose" in said


def test_every_command_accepts_quiet_and_verbose() -> None:
    def commands(group: Any, before: str = "") -> Iterator[tuple[str, set[str]]]:
        context = typer.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            yield f"{before}{name}", {flag for param in command.params for flag in param.opts}
            if hasattr(command, "commands"):
                yield from commands(command, f"{name} ")

    found = dict(commands(typer.main.get_command(app)))
    assert {"new", "build", "serve", "serve bench"} <= set(found)
    assert [name for name, flags in found.items() if not {"-q", "--quiet", "-v", "--verbose"} <= flags] == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "stream", "colored"),
    [
        ({"TERM": "xterm"}, Terminal(), True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, Terminal(), False),
        ({"TERM": "dumb"}, Terminal(), False),
        ({"TERM": "xterm"}, io.StringIO(), False),
        ({"TERM": "xterm", "FORCE_COLOR": "1"}, io.StringIO(), True),
    ],
)
def test_colors_follow_the_terminal_and_environment_variables(
    environment: dict[str, str], stream: io.StringIO, colored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check diagnostics and rich's consoles."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert terminal.color(stream) is colored
    stream.seek(0)
    stream.truncate()
    terminal.console(stream).print("text", style="red")
    assert ("\x1b[" in stream.getvalue()) is colored
    assert stream.getvalue().strip("\x1b[0123456789;m\n") == "text"


def test_check_of_several_recipes_shows_progress_unless_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    _, _, said = run("check", QUICKSTART, "recipes/gemma3-270m-cpu.yaml")
    assert "checking:  50%" in said
    assert "checking" not in run("-q", "check", QUICKSTART, "recipes/gemma3-270m-cpu.yaml")[2]


def test_progress_stays_on_one_line_of_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress("planning " + "a-long-name" * 5, 2, stream) as line:
        line.advance(1)
        line.label, line.next = "short", 0.0
        line.advance(0)
    first, second = stream.getvalue().strip("\r\n").split("\r")
    assert len(first) == 39 and second.startswith("short:  50%") and len(second) == 39
    monkeypatch.setenv("TERM", "dumb")
    assert not Progress("x", 1, Terminal()).terminal


@pytest.mark.parametrize("shell", ["bash"])
def test_show_completion_prints_a_script_for_each_shell(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer._completion_shared._get_shell_name", lambda: shell)
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: shell, raising=False)
    result = CliRunner().invoke(app, ["--show-completion"], prog_name="recipe")
    assert result.exit_code == 0 and "_RECIPE_COMPLETE" in result.stdout


def test_ctrl_c_during_build_says_whether_the_artifact_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Send SIGINT before anything is moved, and during a move."""
    target = tmp_path / "generated"

    def interrupting(step: Callable[..., object]) -> Callable[..., object]:
        def interrupted(*given: object) -> object:
            os.kill(os.getpid(), signal.SIGINT)
            return step(*given)

        return interrupted

    with monkeypatch.context() as before:
        before.setattr(whole.Change, "write", interrupting(whole.Change.write))
        status, _, said = run("build", QUICKSTART, "-o", str(target))
    assert status == 130 and f"interrupted: {target} is unchanged" in said
    assert not target.exists()
    with monkeypatch.context() as within:
        within.setattr(whole, "_make", interrupting(whole._make))
        status, _, said = run("build", QUICKSTART, "-o", str(target))
    assert status == 130 and f"interrupted: {target} is complete and up to date" in said
    assert run("build", QUICKSTART, "-o", str(target), "--check")[0] == 0


def test_ctrl_c_during_plan_says_how_many_results_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipec.compiler import store
    from recipec.compiler.cli import plan as cli_plan
    from recipec.compiler.plan import plan_session

    def interrupted(*given: object) -> None:
        monkeypatch.setattr(store, "put_now", ["one", "two"])
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(plan_session, "run", interrupted)
    monkeypatch.setattr(cli_plan, "_refuse_early", lambda *given: None)
    monkeypatch.setattr(cli_plan, "refuse_backend", lambda *given: None)
    status, _, said = run("plan", QUICKSTART)
    assert status == 130
    kept = "2 results of this command are kept, and the same command continues from there"
    assert f"interrupted: {kept}" in said


def test_end_of_input_at_a_prompt_writes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipec.compiler.new.ask.possible", lambda: True)
    monkeypatch.chdir(tmp_path)
    status, shown, said = run("new", "demo")
    assert status == 130 and "Model: " in shown and "interrupted: nothing was written" in said
    assert not list(tmp_path.iterdir())
