"""Write docs/commands.md, docs/diagnostics.md and the pages of the language: `python -m scripts.docs`."""

from __future__ import annotations

from pathlib import Path

from scripts.docs import commands, diagnostics, language

DOCS = Path(__file__).resolve().parents[2] / "docs"


def texts() -> dict[Path, str]:
    """Return the text of each page that is made from the code, by its file."""
    pages = {DOCS / page.path: page.text for page in (*commands.pages(), *language.pages())}
    overview = DOCS / "language.md"
    return {
        **pages,
        overview: language.completed(overview.read_text(encoding="utf-8")),
        DOCS / "diagnostics.md": diagnostics.markdown(),
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
