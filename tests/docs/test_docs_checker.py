"""Tests that the checker of the pages' code blocks finds errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import checks, shell
from tests.docs.blocks import blocks, inline

GOOD = """\
recipe: 1
name: good
model: {id: google/gemma-3-270m-it}
mesh: {accelerator: cpu-8, axes: {fsdp: 8}}
lora: {rank: 16}
data: {train: [gs://bucket/train.jsonl]}
train: {global_batch_size: 8}
"""


def found(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the problems of a page's blocks."""
    (tmp_path / "recipes").mkdir()
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return [problem for block in blocks(page) for problem in checks.problems(block, tmp_path)]


def fence(language: str, text: str, above: str = "") -> str:
    return f"# Page\n\n{above}\n```{language}\n{text}\n```\n"


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (fence("", "recipe check"), "without a language"),
        (fence("yaml", "train: {stepz: 3}"), "unknown key `stepz`"),
        (fence("yaml", GOOD, "<!-- wrong -->"), "compiles"),
        (fence("sh", "recipe frobnicate x.yaml"), "No such command 'frobnicate'"),
        (fence("sh", "recipe build recipes/no-such.yaml"), "there is no file recipes/no-such.yaml"),
        (fence("sh", "cd x && python train.py --learning-rate 1"), "no option --learning-rate"),
        (fence("sh", "recipe check nowhere.yaml"), "exits with 1"),
        (fence("console", "$ recipe --version\nrecipec 99"), "prints:\nrecipec "),
        (fence("python", "def x(:"), "not Python"),
        (fence("python", "from recipec.compiler.emitters.emit import omit"), "has no `omit`"),
        (fence('jsonl title="text.jsonl"', '{"txt": "a"}'), "is not text: no 'text'"),
        (
            fence("python", "x = 1", "<!-- compiler/emitters/emit.py -->"),
            "not what compiler/emitters/emit.py has",
        ),
    ],
)
def test_incorrect_code_blocks_are_reported(
    page: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = found(page, tmp_path, monkeypatch)
    assert len(problems) == 1 and said in problems[0], problems


def test_unknown_commands_and_options_in_running_text_are_reported(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Run `recipe plan R [--sarch]`, `recipe plan R [--json]`.\n\n| `recipe serv up` |\n|---|\n"
    )
    said = [problem for _, text in inline(page) for problem in shell.mentioned(text)]
    assert len(said) == 2 and "--sarch" in said[0] and "`serv`" in said[1]
