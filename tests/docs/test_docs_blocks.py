"""Tests of every code block of docs/ and the README, and of every command in running text.

`pytest --update` writes the current output of the commands into the pages.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.docs import running, shell
from tests.docs.blocks import PAGES, Block, blocks, inline
from tests.docs.checks import problems, updated

READ = ("tests", "scripts", "docs")
"""Folders of the repository that the pages' commands may read, and that nothing writes to."""


@pytest.fixture
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder like a clone's, for one page."""
    shutil.copytree(shell.ROOT / "recipes", tmp_path / "recipes")  # commands may write there
    for name in READ:
        (tmp_path / name).symlink_to(shell.ROOT / name)
    running.sign_in(tmp_path_factory.mktemp("bin"), monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECIPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("recipec.compiler.pages.html.plotly", lambda: "/* Plotly */")
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_code_block_is_correct(page: Path, folder: Path, update: bool) -> None:
    if page.name in running.THERE:
        running.THERE[page.name](folder)
    if update:
        _update(page, folder)
        return
    found = [
        f"{block.place}: {problem}" for block in blocks(page) for problem in problems(_here(block), folder)
    ]
    assert not found, "\n\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_in_running_text_exists(page: Path) -> None:
    found = [
        f"{page.name}:{line}: {problem}"
        for line, text in inline(page)
        if text.startswith("recipe ")
        for problem in shell.mentioned(text)
    ]
    assert not found, "\n".join(found)


def test_every_entry_of_not_run_is_a_command_on_a_page() -> None:
    found = [
        running.listed(words)
        for page in PAGES
        for block in blocks(page)
        if block.language == "sh"
        for words in shell.commands(block.text)
    ]
    assert set(found) - {None} == set(running.NOT_RUN)
    assert found.count(None) > 30


def _update(page: Path, folder: Path) -> None:
    made: dict[Block, str] = {}
    for block in blocks(page):
        if block.language == "console" and block.remark != "slow":
            made[block] = updated(block, folder)
        else:
            list(problems(_here(block), folder))  # writes the files that commands read
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    for block in reversed(made):
        lines[block.line : block.line + block.text.count("\n")] = [made[block]]
    page.write_text("".join(lines), encoding="utf-8")


def _here(block: Block) -> Block:
    """Return the block, unless it would overwrite a file of the repository."""
    assert not (block.title and block.language == "yaml" and block.title.startswith(READ)) or block.remark, (
        block.place
    )
    return block
