"""Hooks that mkdocs calls during a build of the site (see mkdocs.yml): they add the pages of the diagnostics,
and put those of the language's sections into the navigation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for spec and compiler; mkdocs can run anywhere

from mkdocs.structure.files import File, Files

from scripts.docs import diagnostics, language

CHANGES = Path(__file__).resolve().parents[2] / "CHANGELOG.md"

GENERATED = {"The language": (language, "All sections"), "Diagnostics": (diagnostics, "All codes")}
"""Navigation entries with pages below them: the module that makes these, and the first title."""


def on_config(config: Any) -> Any:
    """Put the generated pages into the navigation, below the page that links to them."""
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
    return {title: [{first: page}, *({page_made.title: page_made.path} for page_made in maker.pages())]}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and the change log."""
    changes = CHANGES.read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=changes))
    for page in diagnostics.pages():
        files.append(File.generated(config, page.path, content=page.text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put links to the pages of the codes into the page of all."""
    return diagnostics.completed(page.file.src_uri, markdown)
