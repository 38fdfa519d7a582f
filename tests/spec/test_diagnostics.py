"""Tests of how diagnostics are shown."""

from __future__ import annotations

import pytest

from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic, Span, accepted, render_json, render_text
from recipec.spec.language.section import E0101, E0105
from recipec.spec.load import E0001

NOTE = Code("N0044", "a place from the base", "A cause.", "A cure.")
LINE = "  axes: {fsdp: 4, tp: 8}"
ERROR = Diagnostic(
    E0105,
    "tp must be at most 4",
    "mesh.axes.tp",
    "axes: {fsdp: 4, tp: 1}",
    Span("recipes/x.yaml", 12, 23, LINE),
)


def test_a_diagnostic_shows_its_line_and_a_caret_under_the_value() -> None:
    assert render_text([ERROR]) == (
        "error[E0105]: tp must be at most 4\n"
        "  --> recipes/x.yaml:12:23\n"
        "   |\n"
        "12 |   axes: {fsdp: 4, tp: 8}\n"
        "   |                       ^\n"
        "   = help: axes: {fsdp: 4, tp: 1}\n"
        "\n"
        "1 error\n"
    )


def test_diagnostic_without_a_position_shows_only_message_and_help() -> None:
    assert render_text([Diagnostic(E0001, "no file", help="a\nb")]) == (
        "error[E0001]: no file\n = help: a\n         b\n\n1 error\n"
    )


def test_notes_are_counted_unless_they_are_asked_for() -> None:
    several = [Diagnostic(NOTE, "a place"), ERROR, Diagnostic(NOTE, "another place")]
    counted = render_text(several, notes=False)
    assert counted.startswith("error[E0105]") and "note[" not in counted
    assert counted.endswith("\n\n1 error, 2 notes (--notes shows them)\n")
    assert render_text(several[:1], notes=False) == "1 note (--notes shows it)\n"
    assert render_text(several).count("note[N0044]") == 2 and "--notes" not in render_text(several)


@pytest.mark.parametrize(
    ("code", "line", "taken"),
    [
        (NOTE, "a: b  # N0044: on purpose", True),
        (NOTE, "a: b\t# the base's place (N0044), and W0401", True),
        (NOTE, "a: b  # N00441", False),
        (NOTE, "a: b#N0044", False),
        (NOTE, "a: N0044", False),
        (E0105, "a: b  # E0105", False),
    ],
)
def test_comment_with_its_code_accepts_a_note_and_no_error(code: Code, line: str, taken: bool) -> None:
    assert accepted(Diagnostic(code, "x", span=Span("x", 1, 1, line))) is taken
    assert not accepted(Diagnostic(code, "x"))


def test_diagnostics_in_json_have_every_field() -> None:
    assert render_json([ERROR, Diagnostic(E0001, "no file")]) == [
        {
            "code": "E0105",
            "severity": "error",
            "message": "tp must be at most 4",
            "file": "recipes/x.yaml",
            "line": 12,
            "column": 23,
            "path": "mesh.axes.tp",
            "help": "axes: {fsdp: 4, tp: 1}",
        },
        {
            "code": "E0001",
            "severity": "error",
            "message": "no file",
            "file": None,
            "line": None,
            "column": None,
            "path": "",
            "help": None,
        },
    ]


def test_diagnostics_are_colored_only_when_asked() -> None:
    assert "\x1b[" not in render_text([ERROR])
    assert "\x1b[1;31merror[E0105]\x1b[0m" in render_text([ERROR], color=True)


def test_wide_characters_take_two_columns() -> None:
    text = 'name: "説明", portt: 1'
    shown = render_text([Diagnostic(E0101, "unknown", span=Span("x", 1, 13, text, 5))]).splitlines()
    assert shown[4] == "  | " + " " * 14 + "^^^^^"


def test_tabs_are_kept_before_the_caret() -> None:
    shown = render_text([Diagnostic(E0101, "unknown", span=Span("x", 1, 4, "a:\tbad", 3))]).splitlines()
    assert shown[4] == "  |   \t^^^"


def test_long_lines_are_cut_around_the_caret() -> None:
    text = "x" * 5000 + "HERE" + "y" * 5000
    shown = render_text([Diagnostic(E0101, "unknown", span=Span("x", 1, 5001, text, 4))]).splitlines()
    assert len(shown[3]) < 160
    start = shown[4].index("^")
    assert shown[3][start : start + 4] == "HERE" and shown[4].count("^") == 4


def test_control_characters_do_not_reach_the_terminal() -> None:
    span = Span("a\x1b[31m.yaml", 1, 1, "a: \x1b]0;title\x07 \u202e")
    shown = render_text([Diagnostic(E0101, "bad \x1b[2J \ud800", help="\x9b1m", span=span)])
    assert not any(c in shown for c in "\x1b\x07\x9b\u202e\ud800")
    shown.encode()
