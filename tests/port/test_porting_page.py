"""Check that docs/porting.md has all options, and docs/porting-examples.md this folder's examples."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from recipec.compiler.cli.main import app
from recipec.compiler.port import dialects

PART = re.compile(r"<!-- (tests/port/examples/\S+) -->\n(.*?)<!-- end -->", re.S)


def shown(path: Path) -> str:
    """Return a file as the page shows it: in a block of its own, or with its headings below the page's."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return re.sub(r"^#", "###", text.partition("\n\n")[2], flags=re.M)
    return f"```{'json' if path.suffix == '.json' else 'yaml'}\n{text}```\n"


def test_porting_examples_page_shows_the_example_files(root: Path, update: bool) -> None:
    page = root / "docs" / "porting-examples.md"
    text = page.read_text(encoding="utf-8")
    made = PART.sub(lambda part: f"<!-- {part[1]} -->\n{shown(root / part[1])}<!-- end -->", text)
    if update:
        page.write_text(made, encoding="utf-8")
        text = made
    assert text == made, "run: pytest tests/port --update"
    assert len(PART.findall(text)) == 8


def test_porting_pages_name_all_dialects_and_exactly_the_options(root: Path) -> None:
    text = (root / "docs" / "porting.md").read_text(encoding="utf-8")
    help = CliRunner().invoke(app, ["port", "--help"], env={"COLUMNS": "200"}).stdout
    options = set(re.findall(r"--[a-z]+", help)) - {"--help"}
    assert len(options) == 15 and all(f"`{name}" in text or f", `{name}" in text for name in options)
    assert all(f"`{name}`" in text for name in dialects.KNOWN)
    pages = [path.read_text(encoding="utf-8") for path in sorted((root / "docs").glob("porting*.md"))]
    used = {
        word
        for command in re.findall(r"^recipe port .*|`recipe port [^`]+`", "\n".join(pages), re.M)
        for word in re.findall(r" (--[a-z]+)", command)
    }
    assert len(pages) == 4 and used <= options
    text = (root / "docs" / "porting-examples.md").read_text(encoding="utf-8")
    for example in ("axolotl-gemma4-qlora", "llamafactory-qwen3-lora"):
        files = (root / "tests/port/examples" / example / "command.txt").read_text().split()
        assert f"`recipe port {' '.join(files)} -o recipe.yaml`" in text
