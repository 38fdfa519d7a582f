"""Tests that the pages name existing codes, variables and files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.docs.diagnostics import declared
from tests.docs.blocks import PAGES, TOP, inline
from tests.docs.shell import OWN_FOLDERS, ROOT

SOURCES = ("spec", "compiler", "port", "runtime", "templates")


def test_codes_in_the_documentation_are_registered() -> None:
    named = {code for page in PAGES for code in re.findall(r"\b[EWN]\d{4}\b", page.read_text("utf-8"))}
    assert len(named) > 15 and named <= set(declared())


def test_environment_variables_in_the_docs_exist_in_the_sources() -> None:
    sources = [path for name in SOURCES for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".j2")]
    known = {name for path in sources for name in re.findall(r"RECIPEC_[A-Z_]+", path.read_text("utf-8"))}
    named = {name for page in PAGES for name in re.findall(r"RECIPEC_[A-Z_]+", page.read_text("utf-8"))}
    assert len(named) > 4 and named <= known


def test_files_and_tests_named_in_the_docs_exist() -> None:
    """Check the repository's paths in backticks. A word in capitals stands for several paths.

    The changelog names files of earlier versions.
    """
    found = 0
    for page in PAGES:
        if page.name == "CHANGELOG.md":
            continue
        for line, text in inline(page):
            for word in text.split():
                path, _, test = word.rstrip(",;:").partition("::")
                if (
                    path.partition("/")[0] in OWN_FOLDERS
                    and re.fullmatch(r"[a-z0-9_./-]+", path)
                    and "/" in path
                ):
                    found += 1
                    assert (ROOT / path).exists(), f"{page.name}:{line}: {path}"
                    assert not test or f"\ndef {test}(" in (ROOT / path).read_text("utf-8"), test
    assert found > 100


@pytest.mark.parametrize("name", TOP)
def test_links_of_pages_outside_the_site_have_existing_targets(name: str) -> None:
    """Check the other pages' links; mkdocs checks those of docs/."""
    page = ROOT / name
    links = re.findall(r"\]\((?!https?:)([^)#]+)(#[\w-]+)?\)", page.read_text("utf-8"))
    assert links
    for target, anchor in links:
        path = Path(page.parent, target)
        assert path.exists(), target
        assert not anchor or anchor[1:] in _anchors(path), f"{target}{anchor}"


def _anchors(page: Path) -> set[str]:
    """Return GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
