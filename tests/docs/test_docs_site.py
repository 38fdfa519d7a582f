"""Tests of the docs' site: it builds without a warning, loads nothing from elsewhere, and is complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from recipec.compiler.cli.main import app
from recipec.spec.schema import json_schema
from scripts.docs import __main__ as made
from scripts.docs import diagnostics, language

LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}
"""Elements that load something, and the attribute with its address."""


class Loaded(HTMLParser):
    """The addresses that a page loads by itself, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.anchors.add(given.get("id", ""))
        if tag in LOADING:
            self.addresses.append(given.get(LOADING[tag], ""))
        elif tag == "link" and given.get("rel") not in ("next", "prev", "canonical"):
            self.addresses.append(given.get("href", ""))


def read(page: Path) -> Loaded:
    parser = Loaded()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does, into a new folder."""
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    # From another folder, because mkdocs may run anywhere.
    done = subprocess.run(
        [*command, "--config-file", str(root / "mkdocs.yml")],
        cwd=folder.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return folder


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        elsewhere = [at for at in read(page).addresses if re.match(r"(?:https?:)?//", at)]
        assert not elsewhere, page
    for sheet in site.rglob("*.css"):
        assert not re.search(
            r"(?:url\(|@import\s+)['\"]?(?:https?:)?//", sheet.read_text(encoding="utf-8")
        ), sheet


def test_every_code_has_an_anchor_and_golden_cases_give_examples(site: Path) -> None:
    codes = diagnostics.declared()
    pages = {page: read(page).anchors for page in (site / "diagnostics").glob("*.html")}
    anchors = set().union(*pages.values())
    assert set(codes) <= anchors
    index = read(site / "diagnostics.html").anchors
    assert set(codes) <= index
    assert {code.anchor for code in codes.values()} <= index  # `recipe lsp` links to them
    shown = diagnostics.examples()
    assert set(shown) <= set(codes) and len(shown) > 150
    mesh = (site / "diagnostics" / "mesh.html").read_text(encoding="utf-8")
    assert "error[E0203]: tp=" in mesh


def test_every_recipe_key_has_an_anchor(site: Path) -> None:
    schema = json_schema()
    for name, field in schema["properties"].items():
        target = language._target(field)
        if not target:
            assert name in read(site / "language.html").anchors
            continue
        anchors = read(site / "language" / f"{name}.html").anchors
        assert set(schema["$defs"][target]["properties"]) <= anchors, name
    train = (site / "language" / "train.html").read_text(encoding="utf-8")
    assert "train.optimizer.learning_rate" in train and "optimizer steps" in train


def test_pages_made_from_the_code_are_up_to_date(root: Path) -> None:
    """They are in the repository, where people read them; `python -m scripts.docs` writes them."""
    pages = made.texts()
    assert {path.name for path in pages} >= {"commands.md", "language.md", "lora.md"}
    stale = [f"{path.relative_to(root)}" for path, text in pages.items() if path.read_text("utf-8") != text]
    assert stale == []
    assert {*(root / "docs" / "language").iterdir()} <= {*pages}


def test_commands_page_lists_every_command_and_option(site: Path) -> None:
    page = site / "commands.html"
    text, anchors = page.read_text(encoding="utf-8"), read(page).anchors
    root: Any = get_command(app)
    context = typer.Context(root)
    commands = {name: root.get_command(context, name) for name in root.list_commands(context)}
    below = {f"serve-{name}": command for name, command in commands["serve"].commands.items()}
    assert {"build", "port", "serve-up"} <= {*commands, *below}
    for name, command in {**commands, **below}.items():
        assert name in anchors
        options = [param.opts[0] for param in command.params if not getattr(param, "hidden", False)]
        assert [option for option in options if option not in text and option.upper() not in text] == []
