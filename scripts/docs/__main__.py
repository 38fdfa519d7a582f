"""Write what is made from the language, the codes and the command line: `python -m scripts.docs`.

These are docs/commands.md, docs/diagnostics.md, the pages of the language, and runtime/sections.py.
"""

from __future__ import annotations

from pathlib import Path

from scripts.docs import commands, diagnostics, language, sections

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def texts() -> dict[Path, str]:
    """Return the text of each page and module that is made from the code, by its file."""
    pages = {DOCS / page.path: page.text for page in (*commands.pages(), *language.pages())}
    overview = DOCS / "language.md"
    return {
        **pages,
        overview: language.completed(overview.read_text(encoding="utf-8")),
        DOCS / "diagnostics.md": diagnostics.markdown(),
        ROOT / sections.PATH: sections.text(),
    }


def main() -> None:
    """Write the pages, and remove those of sections that the language no longer has."""
    pages = texts()
    for path in (DOCS / "language").glob("*.md"):
        if path not in pages:
            path.unlink()
    for path, text in pages.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
