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
NEW = "--model Qwen/Qwen3-8B --accelerator v6e-8 --data hf://owner/name --format chat"
"""Options with which `recipe new` asks no question."""


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
        (fence("cobol", "STOP RUN."), "no language that the pages use"),
        (fence("yaml", "train: {stepz: 3}"), "unknown key `stepz`"),
        (fence("yaml", GOOD, "<!-- wrong -->"), "compiles"),
        (fence("yaml", "on: push"), "without a title"),
        (fence("sh", "recipe frobnicate x.yaml"), "No such command 'frobnicate'"),
        (fence("sh", "recipe build recipes/no-such.yaml"), "there is no file recipes/no-such.yaml"),
        (fence("sh", "cd x && python train.py --learning-rate 1"), "no option --learning-rate"),
        (fence("sh", "pip install 'recipec[gpu]'"), "no extra `gpu`"),
        (fence("sh", "frob --hard"), "no program"),
        (fence("sh", "recipe check nowhere.yaml"), "exits with 1"),
        (fence("sh", "cat nowhere.txt"), "exits with 1"),
        (fence("console", "$ recipe --version\nrecipec 99"), "prints:\nrecipec "),
        (fence("python", "def x(:"), "not Python"),
        (fence("python", "from recipec.compiler.emitters.emit import omit"), "has no `omit`"),
        (fence("json", "{a: 1}"), "not json"),
        (fence('jsonl title="text.jsonl"', '{"txt": "a"}'), "is not text: no 'text'"),
        (
            fence("python", "x = 1", "<!-- compiler/emitters/emit.py -->"),
            "not what compiler/emitters/emit.py has",
        ),
        (fence("text", "x", "<!-- docs/nothing.md -->"), "no file docs/nothing.md"),
    ],
)
def test_incorrect_code_blocks_are_reported(
    page: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = found(page, tmp_path, monkeypatch)
    assert len(problems) == 1 and said in problems[0], problems


@pytest.mark.parametrize(
    "page",
    [
        fence("yaml", "# the first lines\nrecipe: 1"),
        fence("yaml", GOOD.replace("fsdp: 8", "tp: 8"), "<!-- wrong -->"),
        fence('yaml title="a.yaml"', GOOD) + "\n```console\n$ recipe check a.yaml\n...\na.yaml: ok\n```\n",
        fence("sh", f"recipe new mine {NEW}\nrecipe check recipes/mine.yaml\nls recipes/mine.yaml"),
    ],
)
def test_correct_code_blocks_are_accepted(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(page, tmp_path, monkeypatch) == []


def test_dots_in_an_output_match_omitted_lines() -> None:
    assert checks.matches("a\n...\nd\n", "a\nb\nc\nd\n")
    assert checks.matches("...\nd", "d")
    assert not checks.matches("a\n...\nd\n", "a\nb\nc\n")
    assert not checks.matches("a\n", "a\nb\n")
    assert not checks.matches("a.c", "abc")


def test_unknown_commands_and_options_in_running_text_are_reported(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Run `recipe plan R [--sarch]`, `recipe plan R [--json]`.\n\n| `recipe serv up` |\n|---|\n"
    )
    said = [problem for _, text in inline(page) for problem in shell.mentioned(text)]
    assert len(said) == 2 and "--sarch" in said[0] and "`serv`" in said[1]
