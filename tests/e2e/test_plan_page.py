"""The page of a plan in a real browser: headless Chromium, narrow and wide, light and dark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from recipec.compiler.plan.page.document import page
from recipec.compiler.plan.results import Plan, Search
from tests.e2e.chromium import Tab, cases, tab
from tests.plan import plans

PAGES: dict[str, tuple[Callable[[], Plan], Callable[[], Search] | None]] = {
    "search": (plans.flagship, plans.search),
    "flagship": (plans.flagship, None),
    "too-large": (plans.too_large, None),
    "refused": (plans.refused, None),
    "two-slices": (plans.sliced, None),
    "one-axis": (plans.one_axis, None),
}
SERVING = [("KV cache", f"{'layers':<60}bytes a token\n{'50 local':<60}25,600")]

SIDEWAYS = """
[...document.querySelectorAll("body *")]
  .filter((one) => !one.closest(".scroll, pre, svg") && one.getBoundingClientRect().right > innerWidth + 0.5)
  .map((one) => one.outerHTML.slice(0, 80))
"""
"""What reaches beyond the window's right edge and is not in a part that scrolls by itself."""

SMALLEST_TEXT = """
Math.min(...[...document.querySelectorAll("svg text")]
  .filter((one) => one.getBoundingClientRect().width > 0)
  .map((one) => parseFloat(getComputedStyle(one).fontSize)
    * one.ownerSVGElement.getBoundingClientRect().width / one.ownerSVGElement.viewBox.baseVal.width))
"""
"""Pixels of the smallest text of a picture, as it is shown."""

OVERLAPS = """
[...document.querySelectorAll("svg")].flatMap((picture) => {
  const texts = [...picture.querySelectorAll("text:not(.on-dot)")]
    .map((one) => [one.textContent, one.getBoundingClientRect()])
    .filter(([, box]) => box.width > 0);
  return texts.flatMap(([words, a], i) => texts.slice(i + 1)
    .filter(([, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4)
    .map(([others]) => `${words} | ${others}`));
})
"""
"""Texts of a picture that lie on each other."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    out = {}
    for name, (plan, search) in PAGES.items():
        out[name] = folder / f"{name}.html"
        out[name].write_text(page(plan(), search() if search else None, SERVING), encoding="utf-8")
    return out


@pytest.mark.parametrize(
    ("name", "width", "scheme"), cases(product(PAGES, (400, 320, 740, 1600), ("dark", "light")))
)
def test_it_reads_well(browser: Tab, files: dict[str, Path], name: str, width: int, scheme: str) -> None:
    browser.show(files[name], width, scheme)
    assert browser.complaints() == []
    assert browser.requests() == [files[name].as_uri()]
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(SIDEWAYS) == []
    assert browser.evaluate(SMALLEST_TEXT) >= (10 if width >= 400 else 8)
    assert browser.evaluate(OVERLAPS) == []
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(252, 251, 249)" if scheme == "light" else "rgb(20, 22, 26)")


@pytest.mark.nightly
def test_a_page_that_asks_for_more_is_found_out(browser: Tab, tmp_path: Path) -> None:
    """The checks above, against a page that breaks each of them."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><meta name=viewport content='width=device-width'><img src=missing.png>"
        "<p style='width: 900px'>wide</p><script>console.error('no')</script>"
        "<svg viewBox='0 0 100 10' width=40 font-size=10><text y=9>small</text><text y=9>other</text></svg>"
    )
    browser.show(bad, 400, "light")
    assert len(browser.requests()) == 2
    assert any(one.get("type") == "error" for one in browser.complaints())
    assert browser.evaluate("document.documentElement.scrollWidth") > 400
    assert len(browser.evaluate(SIDEWAYS)) == 1
    assert browser.evaluate(SMALLEST_TEXT) == pytest.approx(4, abs=0.1)
    assert browser.evaluate(OVERLAPS) == ["small | other"]


@pytest.mark.nightly
def test_its_policy_lets_no_other_script_run(browser: Tab, files: dict[str, Path], tmp_path: Path) -> None:
    text = files["flagship"].read_text("utf-8")
    changed = tmp_path / "changed.html"
    changed.write_text(text.replace("</body>", "<script>document.title = 'run'</script></body>"), "utf-8")
    browser.show(changed, 1600, "light")
    assert browser.evaluate("document.title") == "Plan of gemma4-31b-v5p8"
    assert "Content Security Policy" in str(browser.complaints())


@pytest.mark.nightly
def test_a_mark_says_what_it_is(browser: Tab, files: dict[str, Path]) -> None:
    browser.show(files["search"], 1600, "dark")
    at = browser.evaluate(
        """(() => {
          const mark = document.querySelector('.wide a[href="#configuration-6"]');
          mark.scrollIntoView({ block: "center" });
          const box = mark.getBoundingClientRect();
          return [box.x + box.width / 2, box.y + box.height / 2];
        })()"""
    )
    # Scrolling hides a tooltip; its event comes with the next frame.
    browser.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    browser.hover(*at)
    shown = browser.evaluate("document.querySelector('.tooltip').checkVisibility()")
    words = browser.evaluate("document.querySelector('.tooltip').textContent")
    assert shown
    assert words.replace("\N{NO-BREAK SPACE}", " ") == (
        "remat.policy=block, train.micro_batch_size=3: 0.1012 ms a token, 79.3 % of the HBM, "
        "US$0.47 a million tokens"
    )
    browser.hover(5, 5)
    assert not browser.evaluate("document.querySelector('.tooltip').checkVisibility()")


@pytest.mark.nightly
def test_without_scripts_the_marks_keep_their_titles(files: dict[str, Path], tmp_path: Path) -> None:
    with tab(tmp_path) as plain:
        plain.send("Emulation.setScriptExecutionDisabled", value=True)
        plain.show(files["search"], 1600, "light")
        assert plain.evaluate("document.querySelectorAll('.tip > title').length") > 20
        assert plain.evaluate("document.querySelector('.tooltip')") is None
        assert plain.evaluate("document.querySelector('details').checkVisibility()")


@pytest.mark.nightly
def test_paper_is_white_and_shows_what_is_folded(browser: Tab, files: dict[str, Path]) -> None:
    browser.show(files["search"], 1200, "dark")
    assert browser.evaluate("document.querySelectorAll('details:not([open])').length") == 2
    browser.evaluate(
        """addEventListener("beforeprint", () => {
          window.folded = document.querySelectorAll("details:not([open])").length;
          window.paper = getComputedStyle(document.body).backgroundColor;
        })"""
    )
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000
    assert browser.evaluate("window.folded") == 0
    assert browser.evaluate("document.querySelectorAll('details:not([open])').length") == 2
    # An A4 page between its margins is narrower than the window in which charts become small ones.
    browser.show(files["search"], 700, "dark")
    browser.send("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.evaluate("document.querySelector('.chart.wide').checkVisibility()")
    assert not browser.evaluate("document.querySelector('.chart.narrow').checkVisibility()")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
