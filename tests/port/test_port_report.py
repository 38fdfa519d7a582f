"""Test the report of a port, which shows first what changes the run, and the page with both sides."""

from __future__ import annotations

from dataclasses import replace

from recipec.compiler.port.report import CHANGES, MOST_LINES, OTHER_DEFAULTS, headline, markdown, terminal
from tests.port.conftest import CONFIG, Port

OPTIM = "optim: {rate: 0.1}\nnoise: 0.1\nnoises: 0.2\nimages: 3\n"


def test_report_lists_changes_first_ordered_by_severity(ported: Port) -> None:
    made = ported(CONFIG.replace("fake_rank: 16\n", "") + OPTIM, partial=True)
    told = headline(made.rows)
    assert [*told] == [CHANGES, OTHER_DEFAULTS]
    changes = [(together[0].verdict.value, [row.key for row in together]) for together, _ in told[CHANGES]]
    assert changes == [
        ("unsupported", ["images"]),
        ("unsupported", ["noise"]),
        ("unsupported", ["noises"]),
        ("approximated", ["optim.rate"]),
    ]
    assert [row.key for together, _ in told[OTHER_DEFAULTS] for row in together] == ["fake_rank"], (
        "not fake_micro"
    )
    lines = terminal(made.title, made.files, made.rows, 100, color=False).splitlines()
    assert lines[0].startswith("Faketune: 3 keys exact") and lines[2] == CHANGES
    assert lines.index("config.yaml") > lines.index(OTHER_DEFAULTS)
    page = markdown(made.title, made.files, made.rows)
    assert page.index(f"## {CHANGES}") < page.index("## config.yaml")
    assert "- unsupported: `images` of `config.yaml:8`: images are not learned here\n" in page


def test_report_summary_fits_on_one_screen(ported: Port) -> None:
    made = ported(CONFIG + "".join(f"unknown_{n}: {n}\n" for n in range(60)))
    made.rows = [replace(row, note=f"{row.key}: {row.note}") for row in made.rows]
    lines = terminal(made.title, made.files, made.rows, 100, color=False).splitlines()
    assert lines.index("config.yaml") <= 40 and lines[MOST_LINES + 2] == "... and more, in the table"
