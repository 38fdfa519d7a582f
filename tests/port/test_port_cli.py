"""Test `recipe port` on the command line: what it writes where, exit statuses, and that nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli.main import app
from recipec.compiler.plan.results import Point, Search
from recipec.compiler.plan.search import SearchOptions
from recipec.port.engine import Says
from recipec.port.meaning.run import Run
from recipec.port.plan import best
from recipec.spec.commented_recipe import HEAD
from tests.port import fake
from tests.port.conftest import CONFIG

ROOT = Path(__file__).parents[2]
EXAMPLES = Path(__file__).parent / "examples"
LOSSY = CONFIG + "noise: 0.1\n"
BROKEN = CONFIG.replace("fake_rank: 16", "fake_rank: 0")


@pytest.fixture(autouse=True)
def folder(faketune: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(text: str, *arguments: str) -> tuple[int, str, str]:
    """Port config.yaml, and return the exit status, stdout and stderr."""
    Path("config.yaml").write_text(text)
    result = CliRunner().invoke(app, ["port", "config.yaml", *arguments], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_the_recipe_goes_to_stdout_and_the_report_to_stderr(folder: Path) -> None:
    for output in ([], ["-o", "-"]):
        status, printed, errors = run(LOSSY, *output)
        assert status == 0 and printed.startswith(f"{HEAD}\n# Ported by")
        assert "fsdp 4 x 2 micro-batches" in errors and "fsdp 4 x 2" not in printed
        assert "config.yaml: 4 keys exact" in errors and "fake_rank" in errors
    assert [path.name for path in folder.iterdir()] == ["config.yaml"]


def test_the_recipe_goes_to_a_file_and_passes_recipe_check(folder: Path) -> None:
    status, printed, errors = run(LOSSY, "-o", "out.yaml")
    assert status == 0 and "noise" in printed and errors.endswith("out.yaml: ported from Faketune\n")
    assert CliRunner().invoke(app, ["check", "out.yaml"]).exit_code == 0
    assert (folder / "out.yaml").stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_recipe_is_named_after_its_own_file_unless_that_says_nothing(folder: Path) -> None:
    for name, expected in (("my-run.yaml", "my-run"), ("recipe.yaml", folder.name)):
        assert run(CONFIG, "-o", name)[0] == 0
        assert f"name: {expected.replace(chr(95), chr(45))}\n" in Path(name).read_text()


def test_existing_output_file_is_kept_without_force(folder: Path) -> None:
    (folder / "out.yaml").write_text("mine")
    status, printed, errors = run(CONFIG, "-o", "out.yaml")
    assert status == 1 and "error[E1112]" in errors and "--force" in errors and printed == ""
    assert (folder / "out.yaml").read_text() == "mine"
    assert run(CONFIG, "-o", "out.yaml", "--force")[0] == 0 and (folder / "out.yaml").read_text() != "mine"
    for output in ("config.yaml", ".", "nowhere/out.yaml"):
        status, _, errors = run(CONFIG, "-o", output, "--force")
        assert status == 1 and errors.count("error[E1112]") == 1, output
    assert (folder / "config.yaml").read_text() == CONFIG


def test_strict_refuses_lossy_port_and_writes_nothing(folder: Path) -> None:
    status, printed, errors = run(LOSSY, "--strict", "-o", "out.yaml", "--partial")
    assert status == 1 and "error[E1113]" in errors and "`noise`" in errors and "noise" in printed
    assert not (folder / "out.yaml").exists()
    assert run(CONFIG, "--strict", "-o", "out.yaml")[0] == 0


def test_recipe_with_errors_is_written_only_with_partial(folder: Path) -> None:
    status, printed, errors = run(BROKEN, "-o", "out.yaml")
    assert (
        status == 1
        and "error[E0105]" in errors
        and not (folder / "out.yaml").exists()
        and "fake_rank" in printed
    )
    status, _, errors = run(BROKEN, "-o", "out.yaml", "--partial")
    text = (folder / "out.yaml").read_text()
    assert status == 0 and "a partial recipe" in errors
    assert text.startswith(
        f"{HEAD}\n# PARTIAL: this recipe is not the run of its source. What is missing:\n# - `lora.rank`"
    )
    assert "(config.yaml:2)" in text


def test_reports_are_written_in_json_and_markdown(folder: Path) -> None:
    status, printed, errors = run(LOSSY, "-o", "out.yaml", "--format", "json", "--report", "report.md")
    told = json.loads(printed)
    assert (
        status == 0 and told["dialect"] == "Faketune" and told["recipe"] == (folder / "out.yaml").read_text()
    )
    assert told["counts"] == {"exact": 4, "approximated": 0, "defaulted": 1, "unsupported": 1, "unused": 0}
    assert (folder / "report.md").read_text().startswith("# Port from Faketune\n")
    status, printed, errors = run(LOSSY, "--format", "json", "--report", "report.json")
    assert (
        json.loads(errors)["keys"] == told["keys"] == json.loads((folder / "report.json").read_text())["keys"]
    )
    assert printed.startswith(f"{HEAD}\n# Ported by")
    assert run(LOSSY, "--report", "report.json")[0] == 1, "it is there"
    assert run(LOSSY, "--report", "report.txt")[0] == 2
    status, printed, _ = run("a: 1\n", "--format", "json")
    assert status == 1 and [d["code"] for d in json.loads(printed)["diagnostics"]] == ["E1101"]
    status, printed, _ = run(LOSSY, "--format", "json", "--accelerator", "h100")
    assert status == 1 and [d["code"] for d in json.loads(printed)["diagnostics"]] == ["E0201"]


def test_wrong_use_exits_with_2() -> None:
    assert run(CONFIG, "--from", "nothing")[0] == 2
    assert run(CONFIG, "--devices", "0")[0] == 2
    assert CliRunner().invoke(app, ["port"]).exit_code == 2


def test_convert_file_is_written_only_with_the_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def transform(run: Run) -> Says:
        yield run.keys.sets("data.transform", "convert.py:row")
        yield run.keys.file("convert.py", "def row(row):\n    return row\n")

    monkeypatch.setattr(fake, "RULES", (*fake.RULES, transform))
    status, printed, errors = run(CONFIG)
    assert status == 0 and "warning[W1119]" in errors and "transform" in printed
    assert not (folder / "convert.py").exists()
    (folder / "convert.py").write_text("mine")
    status, _, errors = run(CONFIG, "-o", "out.yaml")
    assert status == 1 and "error[E1112]" in errors and (folder / "convert.py").read_text() == "mine"
    assert run(CONFIG.replace("fake_rank: 16", "fake_rank: 0"), "-o", "out.yaml", "--force")[0] == 1
    assert (folder / "convert.py").read_text() == "mine", "nothing is left of a port that failed"
    assert run(CONFIG, "-o", "out.yaml", "--force")[0] == 0
    assert CliRunner().invoke(app, ["check", "out.yaml"]).exit_code == 0
    assert (folder / "convert.py").read_text().startswith("def row")


def test_plan_keeps_source_values_and_takes_fastest_configuration(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def point(seconds: float | None, *sets: str) -> Point:
        return Point(sets, "compiled" if seconds else "too large", "", 1.0, 0.0, seconds)

    points = (
        point(4.0),
        point(2.0, "mesh.axes={fsdp: 2, tp: 2}", "train.micro_batch_size=2", "remat.policy=none"),
        point(None, "remat.policy=block"),
    )
    read: list[str] = []

    def search(program: object, options: SearchOptions, _: object) -> Search:
        assert options.fixed == ("model.attention", "train.global_batch_size"), "these are the source's"
        read.append(program.source.read_text())  # type: ignore[attr-defined]
        return Search(points, (2, 1), 0)

    monkeypatch.setattr("recipec.port.cli.search", search)
    status, printed, _ = run(CONFIG, "--plan")
    assert status == 0 and "  axes: {fsdp: 2, tp: 2}" in printed and "remat: {policy: none}" in printed
    assert (
        "micro_batch_size: 2" in printed
        and "the fastest of 2 compiled configurations, by estimate" in printed
    )
    assert read[0].count("axes: {fsdp: 4, tp: 1}") == 1 and [path.name for path in folder.iterdir()] == [
        "config.yaml"
    ]
    monkeypatch.setattr("recipec.port.cli.search", lambda *_, **__: Search(points[2:], (), None))
    status, printed, errors = run(CONFIG, "--plan")
    assert status == 0 and "axes: {fsdp: 4, tp: 1}" in printed and "warning[W1118]" in errors
    assert best(points[2:]) is None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_port_terminated_during_plan_leaves_no_files(tmp_path: Path) -> None:
    """Search, which reads a temporary recipe next to the final one."""
    shutil.copytree(EXAMPLES / "trl-llama32-fsdp", tmp_path / "run")
    program = (
        "import sys, time\n"
        "import recipec.compiler.plan.search as planning\n"
        "from recipec.compiler.cli import main as cli\n"
        "def search(*arguments, **options):\n"
        "    print('planning', flush=True)\n"
        "    time.sleep(60)\n"
        "planning.search = search\n"
        "cli.main()\n"
    )
    sources = (tmp_path / "run" / "command.txt").read_text().split()
    before = {path.name for path in (tmp_path / "run").iterdir()}
    running = subprocess.Popen(
        [sys.executable, "-c", program, "port", *sources, "--plan", "-o", "recipe.yaml"],
        cwd=tmp_path / "run",
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "planning\n"
    assert len(list((tmp_path / "run").iterdir())) > len(before), "the search's own recipe"
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=60) == 128 + signal.SIGTERM
    running.stdout.close()
    assert {path.name for path in (tmp_path / "run").iterdir()} == before
