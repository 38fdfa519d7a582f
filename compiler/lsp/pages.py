"""Where the codes of diagnostics are described: a site's page, or a file on this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import compiler
from compiler.plan import store
from spec.codes import CODES, page


@dataclass(frozen=True)
class Pages:
    """The page of all codes.

    Attributes:
        address: of the page.
        lines: of a file: the line of each code's heading, from 1; empty for a site.
    """

    address: str
    lines: Mapping[str, int]

    def of(self, code: str) -> str:
        """The address of a code's description."""
        if self.lines:
            return f"{self.address}#L{self.lines[code]}"
        return f"{self.address}#{anchor(code)}"


def anchor(code: str) -> str:
    """The name of a code's heading, as Markdown's readers make it."""
    title = re.sub(r"[^\w\s-]", "", f"{code}: {CODES[code].title}".lower())
    return re.sub(r"[-\s]+", "-", title).strip("-")


def pages(address: object) -> Pages | None:
    """The pages to link to.

    Args:
        address: of docs/diagnostics.md on a site, as the editor is set up; anything else takes a file.

    Returns:
        None where no file can be had.
    """
    if isinstance(address, str) and address.startswith(("http://", "https://")):
        return Pages(address.split("#")[0], {})
    file = _file()
    if file is None:
        return None
    lines = file.read_text(encoding="utf-8").splitlines()
    headings = {line[4:9]: number for number, line in enumerate(lines, 1) if line.startswith("### ")}
    return Pages(file.as_uri(), headings) if headings.keys() >= CODES.keys() else None


def _file() -> Path | None:
    """docs/diagnostics.md of a checkout where it is current, else a copy in the cache of the commands."""
    content = page()
    checkout = Path(compiler.__file__).parents[1] / "docs" / "diagnostics.md"
    name = f"diagnostics-{store.key(content)[:12]}.md"
    kept = store.folder().parent / name
    try:
        for file in (checkout, kept):
            if file.is_file() and file.read_text(encoding="utf-8") == content:
                return file.resolve()
        kept.parent.mkdir(parents=True, exist_ok=True)
        beside = kept.with_suffix(".tmp")
        beside.write_text(content, encoding="utf-8")
        beside.replace(kept)
        return kept.resolve()
    except (OSError, UnicodeDecodeError):
        return None
