"""The report in a real browser: headless Chromium, a phone's window and a desk's, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli import main as cli
from tests.e2e.chromium import Tab, cases, tab
from tests.report import writing
from tests.waiting import until

SIDEWAYS = """
[...document.querySelectorAll("body *")]
  .filter((one) => !one.closest(".scroll, pre, .canvas, script, details:not([open])")
    && one.getBoundingClientRect().right > innerWidth + 0.5)
  .map((one) => one.outerHTML.slice(0, 80))
"""
"""What reaches beyond the window's right edge and is not in a part that scrolls by itself."""

BEYOND = """
[...document.querySelectorAll(".canvas")].filter((canvas) => {
  const box = canvas.getBoundingClientRect(), svg = canvas.querySelector(".main-svg").getBoundingClientRect();
  return svg.right > box.right + 1 || box.height < 200 || canvas.querySelectorAll(".trace").length === 0;
}).map((canvas) => canvas.dataset.chart)
"""
"""Plots that are wider than their place, flat, or without a curve."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab(tmp_path_factory.mktemp("profile")) as one:
        yield one


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


def drawn(browser: Tab) -> None:
    """Waits for the plots."""
    until(lambda: browser.evaluate("document.body.dataset.drawn"))


def ranges(browser: Tab) -> dict[str, list[float]]:
    """What each plot shows of its horizontal axis."""
    found: dict[str, list[float]] = browser.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.canvas')]"
        ".map((one) => [one.dataset.chart, one._fullLayout.xaxis.range]))"
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
def test_it_reads_well(browser: Tab, pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    browser.show(pages[name], width, scheme)
    drawn(browser)
    assert browser.complaints() == []
    assert browser.requests() == [pages[name].as_uri()]
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(SIDEWAYS) == []
    assert browser.evaluate(BEYOND) == []
    ink = browser.evaluate("getComputedStyle(document.querySelector('.xtick text')).fill")
    assert ink == ("rgb(27, 29, 33)" if scheme == "light" else "rgb(233, 232, 229)")


@pytest.mark.nightly
def test_a_stretch_that_is_dragged_is_shown_in_all_plots(browser: Tab, pages: dict[str, Path]) -> None:
    browser.show(pages["compared"], 1440, "light")
    drawn(browser)
    before = ranges(browser)
    left, top, width, height = browser.evaluate(
        """(() => {
          const canvas = document.querySelector('.canvas[data-chart="loss"]');
          canvas.scrollIntoView({ block: "center" });
          const box = canvas.querySelector(".nsewdrag").getBoundingClientRect();
          return [box.x, box.y, box.width, box.height];
        })()"""
    )
    drag(browser, left + 0.25 * width, left + 0.5 * width, top + height / 2)
    low, high = before["loss"]
    dragged = pytest.approx([low + 0.25 * (high - low), low + 0.5 * (high - low)], rel=0.05)
    until(lambda: ranges(browser)["loss"] == dragged)
    shown = pytest.approx(ranges(browser)["loss"])
    until(lambda: ranges(browser)["memory"] == shown)
    assert ranges(browser)["lengths"] == before["lengths"]
    field = "document.getElementById('from').value"
    until(lambda: float(browser.evaluate(field)) == pytest.approx(ranges(browser)["loss"][0], rel=0.01))
    browser.evaluate("document.getElementById('all').click()")
    until(lambda: ranges(browser)["speed"] == pytest.approx(before["speed"]))


def drag(browser: Tab, start: float, end: float, y: float) -> None:
    browser.hover(start, y)
    at = {"button": "left", "clickCount": 1}
    browser.send("Input.dispatchMouseEvent", type="mousePressed", x=start, y=y, **at)
    for share in (0.3, 0.6, 1.0):
        x = start + share * (end - start)
        browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, buttons=1, **at)
    browser.send("Input.dispatchMouseEvent", type="mouseReleased", x=end, y=y, **at)


@pytest.mark.nightly
def test_the_controls_change_axes_scale_and_range_and_offer_no_cloud(
    browser: Tab, pages: dict[str, Path]
) -> None:
    browser.show(pages["compared"], 1440, "light")
    drawn(browser)

    def of_loss(path: str) -> object:
        canvas = "document.querySelector('.canvas[data-chart=\"loss\"]')"
        return browser.evaluate(f"{canvas}._fullLayout.{path}")

    def click(selector: str) -> None:
        browser.evaluate(f"document.querySelector('{selector}').click()")

    click('input[value="tokens"]')
    until(lambda: of_loss("xaxis.title.text") == "tokens trained on")
    until(lambda: ranges(browser)["loss"][1] == pytest.approx(180_000, rel=0.1))
    click('input[name="logarithmic"]')
    until(lambda: of_loss("yaxis.type") == "log")
    click('input[value="step"]')
    until(lambda: of_loss("xaxis.title.text") != "tokens trained on")
    browser.evaluate(
        """for (const [name, value] of [["from", 20], ["to", 60]]) {
          const field = document.getElementById(name);
          field.value = value;
          field.dispatchEvent(new Event("change", { bubbles: true }));
        }"""
    )
    until(lambda: ranges(browser)["grad-norm"] == [20, 60])
    assert browser.evaluate("document.querySelectorAll('.modebar-btn[data-attr=cloud]').length") == 0
    titles = browser.evaluate(
        "[...document.querySelectorAll('.modebar-btn')].map((one) => one.dataset.title)"
    )
    assert not any("cloud" in title.lower() or "share" in title.lower() for title in titles), set(titles)


@pytest.mark.nightly
def test_it_follows_the_systems_colours(browser: Tab, pages: dict[str, Path]) -> None:
    browser.show(pages["broken"], 1440, "light")
    drawn(browser)
    light = browser.evaluate("getComputedStyle(document.querySelector('.js-line')).stroke")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.send("Emulation.setEmulatedMedia", features=features)
    line = "getComputedStyle(document.querySelector('.js-line')).stroke"
    until(lambda: browser.evaluate(line) != light)
    ink = "getComputedStyle(document.querySelector('.xtick text')).fill"
    until(lambda: browser.evaluate(ink) == "rgb(233, 232, 229)")


@pytest.mark.nightly
def test_paper_is_white(browser: Tab, pages: dict[str, Path]) -> None:
    browser.show(pages["sweep"], 1440, "dark")
    drawn(browser)
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000
    browser.send("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.send("Emulation.setEmulatedMedia", media="", features=[])


@pytest.mark.nightly
def test_without_scripts_the_numbers_are_there(pages: dict[str, Path], tmp_path: Path) -> None:
    with tab(tmp_path) as plain:
        plain.send("Emulation.setScriptExecutionDisabled", value=True)
        plain.show(pages["compared"], 390, "light")
        words = plain.evaluate("document.body.innerText")
        assert "Plots need JavaScript, which is off." in words
        assert "Lowest evaluation loss" in words and "180,000" not in words
        assert plain.evaluate("document.querySelectorAll('.plot table tbody tr').length") > 100
        assert not plain.evaluate("document.getElementById('controls').checkVisibility()")
        assert plain.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.nightly
def test_its_policy_lets_no_other_script_run(browser: Tab, pages: dict[str, Path], tmp_path: Path) -> None:
    text = pages["broken"].read_text("utf-8")
    changed = tmp_path / "changed.html"
    changed.write_text(text.replace("</body>", "<script>document.title = 'run'</script></body>"), "utf-8")
    browser.show(changed, 1440, "light")
    assert browser.evaluate("document.title") == "Report on example"
    assert "Content Security Policy" in str(browser.complaints())
