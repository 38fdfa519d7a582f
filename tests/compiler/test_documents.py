"""Tests of a document's writers: every fact of it is in the text, in Markdown and in HTML, as written."""

from __future__ import annotations

import pytest

from recipec.compiler.pages import html, markdown, text
from recipec.compiler.pages.document import (
    Document,
    Excerpt,
    Facts,
    Figure,
    Items,
    Plot,
    Section,
    Table,
    Text,
    sheet,
)

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


def test_a_wide_cell_shifts_only_its_own_row_where_nothing_is_wrapped() -> None:
    long = "x" * 200
    rows = [("a", "1", "default"), ("b", long, "recipe.yaml:3"), ("c", "22", "default")]
    assert text.write(sheet("", [Table((), rows, words=(1, 2))])) == (
        f"a  1   default\nb  {long}  recipe.yaml:3\nc  22  default\n"
    )


LONG = Document(
    "Plan",
    [
        Section("mesh", "Mesh", (), [Text("Every device.")], detail=True),
        Section(
            "time",
            "Time",
            (),
            [
                Text("Waits", "heading"),
                Table(
                    ("kind", "bytes", "takes"),
                    [("copy", "9", "3 ms"), ("gather", "8", "2 ms"), ("reduce", "7", "1 ms")],
                    excerpt=Excerpt(2, (0, 2), "1 ms together"),
                ),
                Text("Transfers of all layers.", detail=True),
                Facts([("jax", "0.10.2"), ("libtpu", "0.0.43")], "Versions", line=True),
            ],
        ),
    ],
    command=("recipe plan", ""),
)


def test_a_terminal_shows_excerpts_and_no_details() -> None:
    assert (
        text.write(LONG)
        == """\
Plan

Time
  Waits
    kind    takes
    copy     3 ms
    gather   2 ms
    and 1 more, 1 ms together
    Versions: jax 0.10.2, libtpu 0.0.43
"""
    )


def test_pages_show_all_rows_and_details(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipec.compiler.pages.html.plotly", lambda: "/* Plotly */")
    for page in (markdown.write(LONG), html.write(LONG, "plan")):
        for fact in ("Every device.", "reduce", "bytes", "Transfers of all layers.", "0.0.43"):
            assert fact in page
        assert "1 ms together" not in page


def test_only_rows_with_a_problem_are_red_and_only_with_colors() -> None:
    document = sheet("", [Table((), [("train", "ok"), ("merge", "failed")], words=(1,), bad=(1,))])
    for width in (None, 40):
        first, second = text.write(document, width, colors=True).splitlines()
        assert "\x1b" not in first and "\x1b[31m" in second
        assert "\x1b" not in text.write(document, width)


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
