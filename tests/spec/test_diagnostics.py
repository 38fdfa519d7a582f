"""Tests of how diagnostics are shown."""

from __future__ import annotations

from recipec.spec.diagnostics import Diagnostic, Span, render_json, render_text
from recipec.spec.language.base import E0101, E0105
from recipec.spec.load import E0001

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
