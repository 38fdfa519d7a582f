"""What mkdocs calls while it builds the site (see mkdocs.yml): pages that are made from the code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # spec and compiler; mkdocs runs anywhere

from mkdocs.structure.files import File, Files

from scripts.docs import commands, diagnostics, language

CHANGES = Path(__file__).resolve().parents[2] / "CHANGELOG.md"

GENERATED = {"The language": (language, "All sections"), "Diagnostics": (diagnostics, "All codes")}
"""Entries of the navigation that have pages below them: what makes these, and what the first is called."""


def on_config(config: Any) -> Any:
    """Puts the generated pages into the navigation, below the page that leads to them."""
    for part in config.nav:
        for items in part.values():
            if isinstance(items, list):
                items[:] = [_with_pages(item) for item in items]
    return config


def _with_pages(item: dict[str, str]) -> dict[str, Any]:
    ((title, page),) = item.items()
    if title not in GENERATED:
        return item
    maker, first = GENERATED[title]
    return {title: [{first: page}, *({made.title: made.path} for made in maker.pages())]}


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages, and the list of changes."""
    changes = CHANGES.read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=changes))
    for maker in (commands, language, diagnostics):
        for made in maker.pages():
            files.append(File.generated(config, made.path, content=made.text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Puts what is made of the code into the pages that are written by hand."""
    for maker in (language, diagnostics):
        markdown = maker.completed(page.file.src_uri, markdown)
    return markdown
