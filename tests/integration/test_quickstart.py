"""Tests of `make quickstart` from end to end (in `make e2e`), and of the checkpoint that it trains."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from recipec.compiler.rehearse import quickstart as command
from recipec.compiler.trained.chat import Talk
from recipec.compiler.trained.chat_engines import Options
from recipec.runtime.clients import evaluate, smoke
from tests.docs.blocks import blocks
from tests.docs.checks import steps
from tests.preloaded import preloaded_scripts

STEPS = ("model", "build", "train", "learn", "kill", "resume", "compare", "merge", "verify", "total")


@pytest.fixture(scope="module")
def quickstart(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run the quickstart, and return its folder and its output."""
    output = tmp_path_factory.mktemp("quickstart") / "out"
    screen = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, preloaded_scripts(output), redirect_stdout(screen):
        patch.chdir(root)
        status = command.main(["--output", str(output)])
    assert status == 0, screen.getvalue()
    return output, screen.getvalue()


def test_quickstart_module_shows_help(root: Path) -> None:
    command = [sys.executable, "-m", "recipec.compiler.rehearse.quickstart", "--help"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--output" in done.stdout


@pytest.fixture(scope="module")
def shown(root: Path) -> str:
    """Return the output that docs/start.md shows."""
    texts = [block.text for block in blocks(root / "docs" / "start.md")]
    (shown,) = (text for text in texts if "$ make quickstart" in text)
    return shown


def test_the_documentation_shows_every_step(shown: str) -> None:
    assert tuple(steps(shown)) == STEPS
    assert "bit-identical" in shown


@pytest.mark.e2e
def test_every_step_passes_and_prints_what_the_documentation_shows(
    quickstart: tuple[Path, str], shown: str
) -> None:
    _, printed = quickstart
    table = printed[printed.index("\nstep ") :]
    assert tuple(re.findall(r"^(\w+) +ok ", table, re.MULTILINE)) == STEPS
    assert "bit-identical" in printed
    assert steps(printed) == steps(shown)


@pytest.mark.e2e
def test_printed_merge_command_can_be_repeated(quickstart: tuple[Path, str], root: Path) -> None:
    _, printed = quickstart
    commands = [line.removeprefix("$ ") for line in printed.splitlines() if line.startswith("$ ")]
    assert len(commands) == 7
    assert commands[0].startswith("recipe build recipes/quickstart.yaml -o ")
    assert commands[-1] == f"{commands[-2]} --verify"
    done = subprocess.run(commands[-2], shell=True, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "already holds this merge" in done.stdout


@pytest.mark.e2e
def test_merged_model_loads_with_all_base_tensors(quickstart: tuple[Path, str]) -> None:
    import transformers
    from safetensors import safe_open

    output, _ = quickstart
    merged = output / "resumed" / "merged"
    loaded, info = transformers.Gemma4ForConditionalGeneration.from_pretrained(
        merged, output_loading_info=True
    )
    assert {kind: list(found) for kind, found in info.items() if found} == {}
    base = json.loads((output / "model" / "model.safetensors.index.json").read_text())
    with safe_open(merged / "model.safetensors", "numpy") as file:
        assert set(file.keys()) == set(base["weight_map"])
    assert loaded.config.text_config.num_hidden_layers == 6


@pytest.mark.e2e
def test_merged_model_is_checked_and_evaluated_without_a_server(
    quickstart: tuple[Path, str], tmp_path: Path
) -> None:
    """Compare the evaluation's answers with transformers', in a chat of one turn each."""
    output, _ = quickstart
    merged, base = output / "resumed" / "merged", output / "model"
    folders = ["--url", str(merged), "--base-url", str(base)]
    assert smoke.main([*folders, "--model", "quickstart", "--json", str(tmp_path / "smoke.json")]) == 0
    states = {
        check["name"]: check["state"] for check in json.loads((tmp_path / "smoke.json").read_text())["checks"]
    }
    assert states.pop("version") == "-" and {*states.values()} == {"ok"} and "differs from base" in states
    rows = [{"prompt": text, "expected": "."} for text in ("Where is my parcel?", "Hello", "Thank you.")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--name", "quickstart", "--prompts", str(tmp_path / "prompts.jsonl"), "--max-tokens", "16"]
    words += ["--url", str(merged), "--results", str(tmp_path / "eval"), "--concurrency", "1"]
    assert evaluate.main(words) == 0
    talk = Talk(merged, Options(temperature=0, max_tokens=16, engine="transformers"), lambda text: None)
    answers = (tmp_path / "eval" / "tuned" / "answers.jsonl").read_text().splitlines()
    assert len(answers) == 3
    for answer in map(json.loads, answers):
        talk.reset()
        text = talk.answer(rows[answer["line"] - 1]["prompt"])
        assert answer["text"] == text.rstrip("\N{REPLACEMENT CHARACTER}")
