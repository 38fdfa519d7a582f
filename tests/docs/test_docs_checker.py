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
        ("# Page\n\nWords:\n\n    indented\n", "without a language"),
        (fence("cobol", "STOP RUN."), "no language that the pages use"),
        (fence("yaml", "train: {stepz: 3}"), "unknown key `stepz`"),
        (fence("yaml", GOOD.replace("fsdp: 8", "tp: 8")), "E0203"),
        (fence("yaml", GOOD, "<!-- wrong -->"), "compiles"),
        (fence("yaml", GOOD.replace("model: {id: google/gemma-3-270m-it}\n", "")), "lacks the key `model`"),
        (fence("yaml", "on: push"), "without a title"),
        (fence("yaml", "a: [1"), "not YAML"),
        (fence("sh", "recipe frobnicate x.yaml"), "No such command 'frobnicate'"),
        (fence("sh", "recipe build recipes/quickstart.yaml --chek"), "No such option: --chek"),
        (fence("sh", "recipe build recipes/no-such.yaml"), "there is no file recipes/no-such.yaml"),
        (fence("sh", "recipe rehearse R --steps many"), "--steps many"),
        (fence("sh", "make love"), "no such target"),
        (fence("sh", "cd x && python train.py --learning-rate 1"), "no option --learning-rate"),
        (fence("sh", "python -m recipec.compiler.nothing"), "no module recipec.compiler.nothing"),
        (fence("sh", "pip install 'recipec[gpu]'"), "no extra `gpu`"),
        (fence("sh", "frob --hard"), "no program"),
        (fence("sh", "recipe check nowhere.yaml"), "exits with 1"),
        (fence("sh", f"recipe new a {NEW}\nrecipe new a {NEW}"), "exits with 1"),
        (fence("sh", "cat nowhere.txt"), "exits with 1"),
        (fence("sh", "git frob"), "does not say what to do with `git`"),
        (fence("console", "$ recipe schema --no"), "No such option"),
        (fence("console", "$ recipe --version\nrecipec 99"), "prints:\nrecipec "),
        (fence("python", "def x(:"), "not Python"),
        (fence("python", "from recipec.compiler.emitters.emit import omit"), "has no `omit`"),
        (fence("python", "from recipec.compiler.nowhere import x"), "no module recipec.compiler.nowhere"),
        (fence("json", "{a: 1}"), "not json"),
        (fence("jsonl", "{}\n{"), "line 2 is not jsonl"),
        (fence('jsonl title="text.jsonl"', '{"txt": "a"}'), "is not text: no 'text'"),
        (fence("toml", "a ="), "not toml"),
        (fence("jinja", "{% if %}"), "not jinja"),
        (
            fence("python", "x = 1", "<!-- compiler/emitters/emit.py -->"),
            "not what compiler/emitters/emit.py has",
        ),
        (
            fence("python", "x = 1", "<!-- from compiler/emitters/emit.py -->"),
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
        fence("text", "anything: [at all"),
        fence("yaml", GOOD),
        fence("yaml", "# yaml-language-server: $schema=recipe.schema.json"),
        fence("yaml", "# the first lines\nrecipe: 1"),
        fence(
            "yaml",
            "train: {steps: 3}\nserve: {accelerator: v6e-8}".replace("steps: 3", "global_batch_size: 16"),
        ),
        fence('yaml title=".github/workflows/recipes.yml"', "on: push"),
        fence("yaml", GOOD.replace("fsdp: 8", "tp: 8"), "<!-- wrong -->"),
        fence('yaml title="a.yaml"', GOOD) + "\n```console\n$ recipe check a.yaml\n...\na.yaml: ok\n```\n",
        fence("sh", "# a comment\nrecipe plan RECIPE --json | head -1  # another's comment"),
        fence("sh", f"recipe new mine {NEW}\nrecipe check recipes/mine.yaml\nls recipes/mine.yaml"),
        fence("sh", f"recipe new a {NEW}\nrecipe new a {NEW}", "<!-- each -->"),
        fence("sh", "cd nowhere", "<!-- parsed: nobody goes there -->"),
        fence("sh", "recipe \\\n  schema > schema.json\nhead -1 schema.json"),
        fence("console", "$ make quickstart\n...", "<!-- slow -->"),
        fence("jsonc", '// why\n{"a": 1,}'),
        fence("python", "from recipec.compiler.emitters.emit import emit"),
        fence('jsonl title="chat.jsonl"', '{"messages": [{"role": "assistant", "content": "a"}]}'),
        fence('python title="own.py"', "x = 1") + "\n```sh\ncat own.py\n```\n",
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


def test_update_replaces_the_stale_output_of_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(fence("console", "$ recipe check none.yaml\nstale"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (block,) = blocks(page)
    made = checks.updated(block, tmp_path)
    assert made.startswith("$ recipe check none.yaml\nerror[E0001]") and "stale" not in made


def test_unknown_commands_and_options_in_running_text_are_reported(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Run `recipe plan R [--sarch]`, `recipe plan R [--json]`.\n\n| `recipe serv up` |\n|---|\n"
    )
    said = [problem for _, text in inline(page) for problem in shell.mentioned(text)]
    assert len(said) == 2 and "--sarch" in said[0] and "`serv`" in said[1]
