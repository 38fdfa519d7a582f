"""Tests of a document's writers: every fact of it is in the text, in Markdown and in HTML, as written."""

from __future__ import annotations

import pytest

from recipec.compiler.pages import html, markdown, text
from recipec.compiler.pages.document import Document, Facts, Figure, Items, Plot, Section, Table, Text, sheet

STRANGE = "a|b [red]c[/red] :smile: <d>"
"""A name that rich, Markdown and HTML would each read as markup."""
NUMBERS = Table(("part", "GiB", "why"), [(STRANGE, "9.5", "as read"), ("code", "12.25", "")], words=(2,))
DOCUMENT = Document(
    "Plan",
    [
        Section("memory", "Memory", ("Of one device.",), [Plot("drawn", "", [], after=(NUMBERS,))]),
        Section("basis", "Basis", (), [Items(["one", "two"]), Facts([("jax", "0.10.2")], "Versions")]),
        Section("code", "Code", (), [Text("  lora: {rank: 8}", "code")]),
    ],
    figures=[Figure("Step", "1,294 ms", ("within 1,000 to 2,000 ms",))],
    alarms=[("It does not fit.", "1 GiB too much.")],
    command=("recipe plan", "estimate"),
)


def test_text_aligns_numbers_and_indents_sections() -> None:
    assert (
        text.write(DOCUMENT)
        == f"""\
Plan
  Step: 1,294 ms; within 1,000 to 2,000 ms
It does not fit. 1 GiB too much.

Memory
Of one device.
  part                            GiB  why
  {STRANGE}    9.5  as read
  code                          12.25

Basis
  - one
  - two
  Versions
    jax: 0.10.2

Code
    lora: {{rank: 8}}
"""
    )


@pytest.mark.parametrize("width", [40, 60])
def test_text_of_a_terminal_wraps_cells_but_not_numbers(width: int) -> None:
    words = "a sentence that is longer than what a terminal shows in one line of a table"
    written = text.write(
        sheet("", [Table(("what", "US$", "why"), [(words, "1,294.25", words)], words=(2,))]), width
    )
    assert max(map(len, written.splitlines())) <= width and "1,294.25" in written
    assert sorted(written.split()[3:]) == sorted(f"{words} 1,294.25 {words}".split())


def test_text_without_a_width_keeps_each_row_on_one_line() -> None:
    long = "/a/path/" * 40
    assert f"name  {long}\n" in text.write(sheet("", [Table((), [("name", long)], words=(1,))]))


def test_control_characters_reach_no_terminal() -> None:
    assert "\x1b" not in text.write(sheet("\x1b[31m", [Table((), [("\x1b[2J",)]), Text("\x1b[0m")]))


def test_markdown_escapes_bars_and_aligns_numbers() -> None:
    assert (
        markdown.write(DOCUMENT)
        == """\
# Plan

- Step: 1,294 ms; within 1,000 to 2,000 ms

**It does not fit.** 1 GiB too much.

## Memory

Of one device.

| part | GiB | why |
|---|---:|---|
| a\\|b [red]c[/red] :smile: <d> | 9.5 | as read |
| code | 12.25 |  |

## Basis

- one
- two

### Versions

- jax: 0.10.2

## Code

```text
  lora: {rank: 8}
```
"""
    )


def test_html_holds_the_same_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipec.compiler.pages.html.plotly", lambda: "/* Plotly */")
    page = html.write(DOCUMENT, "plan")
    for fact in ("9.5", "12.25", "1,294 ms", "It does not fit.", "Of one device.", "0.10.2", "a|b [red]"):
        assert fact in page
    assert "<d>" not in page and "&lt;d&gt;" in page
