"""Tests of the report in headless Chromium: the window of a phone and of a desktop, light and dark."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli import main as cli
from tests.e2e.chromium import BEYOND, OVER_LEGENDS, SIDEWAYS, Tab, cases, tab
from tests.report import writing
from tests.waiting import until

INKS = """
[...new Set([...document.querySelectorAll(".main-svg :is([class*=tick], [class^=legend], .annotation) text")]
  .map((one) => getComputedStyle(one).fill))]
"""
"""The colors of the plots' words."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    writing.run(folder / "fast" / "checkpoints", resumed=(120,))
    writing.run(folder / "slow" / "checkpoints", rate=3e-3)
    entries = list(writing.lines(60, preference=True))
    for entry in entries:
        if entry["step"] == 50 and "loss" in entry:
            entry |= {"loss": "NaN", "grad_norm": "Infinity"}
    writing.write(folder / "broken", entries, writing.facts(200), None)
    writing.sweep(folder / "bench")
    writing.sweep(folder / "later", slower=1.3)
    return {
        "compared": make(folder, "compared", "fast/checkpoints", "--compare", "slow/checkpoints"),
        "broken": make(folder, "broken", "broken"),
        "sweep": make(folder, "sweep", "bench", "--compare", "later"),
    }


def make(folder: Path, name: str, *words: str) -> Path:
    page = folder / f"{name}.html"
    given = [word if word.startswith("--") else str(folder / word) for word in words]
    done = CliRunner().invoke(cli.app, ["report", *given, "-o", str(page)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return page


def ranges(browser: Tab) -> dict[str, list[float]]:
    """Return the shown range of each plot's horizontal axis."""
    found: dict[str, list[float]] = browser.evaluate(
        "Object.fromEntries(Object.entries(document.getElementById('plot-curves')._fullLayout)"
        ".filter(([name]) => /^xaxis[0-9]*$/.test(name)).map(([name, axis]) => [name, axis.range]))"
    )
    return found


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    cases(
        [
            ("compared", 360, "light"),
            *((name, 390, "dark") for name in ("compared", "broken", "sweep")),
            *((name, 1440, "light") for name in ("compared", "broken", "sweep")),
            ("compared", 1440, "dark"),
            ("sweep", 390, "light"),
        ]
    ),
)
def test_report_page_has_no_console_errors_and_no_overflow(
    browser: Tab, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    browser.show(pages[name], width, scheme)
    assert browser.complaints() == []
    assert browser.requests() == [pages[name].as_uri()]
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(SIDEWAYS) == []
    assert browser.evaluate(BEYOND) == []
    assert browser.evaluate(OVER_LEGENDS) == []
    words = browser.evaluate(INKS)
    assert words == ["rgb(27, 29, 33)" if scheme == "light" else "rgb(233, 232, 229)"]


@pytest.mark.nightly
def test_plot_buttons_change_axis_and_scale_and_modebar_is_absent(
    browser: Tab, pages: dict[str, Path]
) -> None:
    browser.show(pages["compared"], 1440, "light")

    def shown(path: str) -> object:
        return browser.evaluate(f"document.getElementById('plot-curves')._fullLayout.{path}")

    def press(label: str) -> None:
        x, y = browser.evaluate(
            f"""(() => {{
              const buttons = [...document.querySelectorAll("#plot-curves .updatemenu-button")];
              const button = buttons.find((one) => one.textContent === "{label}");
              button.scrollIntoView({{ block: "center" }});
              const box = button.getBoundingClientRect();
              return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        at = {"x": x, "y": y, "button": "left", "clickCount": 1}
        browser.send("Input.dispatchMouseEvent", type="mousePressed", **at)
        browser.send("Input.dispatchMouseEvent", type="mouseReleased", **at)

    press("tokens")
    until(lambda: ranges(browser)["xaxis"][1] == pytest.approx(180_000, rel=0.1))
    assert "tokens trained on" in browser.evaluate("document.getElementById('plot-curves').textContent")
    press("logarithmic")
    until(lambda: shown("yaxis.type") == "log")
    press("steps")
    until(lambda: ranges(browser)["xaxis"][1] == pytest.approx(200, rel=0.1))
    assert shown("yaxis.type") == "log"
    press("linear")
    until(lambda: shown("yaxis.type") == "linear")
    assert browser.evaluate("document.querySelectorAll('.modebar-btn').length") == 0


@pytest.mark.nightly
def test_report_without_javascript_shows_the_numbers_as_tables(
    pages: dict[str, Path], tmp_path: Path
) -> None:
    with tab(tmp_path) as plain:
        plain.send("Emulation.setScriptExecutionDisabled", value=True)
        plain.show(pages["compared"], 390, "light")
        words = plain.evaluate("document.body.innerText")
        assert "Plots need JavaScript, which is off." in words
        assert "Lowest evaluation loss" in words and "180,000" not in words
        assert plain.evaluate("document.querySelectorAll('.plot table tbody tr').length") > 100
        assert plain.evaluate("document.documentElement.scrollWidth") <= 390
