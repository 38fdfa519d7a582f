"""Tests of a plan's page in headless Chromium: narrow and wide, light and dark."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from recipec.compiler.plan.page import page
from recipec.compiler.plan.results import Plan, Search
from tests.e2e.chromium import BEYOND, OVER_LEGENDS, SIDEWAYS, Tab, cases
from tests.plan import plans
from tests.waiting import until

PAGES: dict[str, tuple[Callable[[], Plan], Callable[[], Search] | None]] = {
    "search": (plans.flagship, plans.search),
    "flagship": (plans.flagship, None),
    "too-large": (plans.too_large, None),
    "refused": (plans.refused, None),
    "two-slices": (plans.sliced, None),
    "one-axis": (plans.one_axis, None),
}
WINDOWS = ((360, "light"), (1440, "dark"))
SERVING = [("KV cache", f"{'layers':<60}bytes a token\n{'50 local':<60}25,600")]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    out = {}
    for name, (plan, search) in PAGES.items():
        out[name] = folder / f"{name}.html"
        out[name].write_text(page(plan(), search() if search else None, SERVING), encoding="utf-8")
    return out


@pytest.mark.parametrize(
    ("name", "width", "scheme"), cases((name, *window) for name, window in product(PAGES, WINDOWS))
)
def test_plan_page_has_no_console_errors_and_no_overflow(
    browser: Tab, files: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    browser.show(files[name], width, scheme)
    assert browser.complaints() == []
    assert browser.requests() == [files[name].as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(SIDEWAYS) == []
    assert browser.evaluate(BEYOND) == []
    assert browser.evaluate(OVER_LEGENDS) == []
    ink = browser.evaluate("getComputedStyle(document.querySelector('.xtick text')).fill")
    assert ink == ("rgb(27, 29, 33)" if scheme == "light" else "rgb(233, 232, 229)")


@pytest.mark.nightly
def test_browser_checks_detect_a_bad_page(browser: Tab, tmp_path: Path) -> None:
    """Run the checks above on a page that violates them."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><meta name=viewport content='width=device-width'><img src=missing.png>"
        "<p style='width: 900px'>wide</p><script>console.error('no')</script>"
        "<div class=js-plotly-plot style='width: 50px'><svg class=main-svg width=90><g class=legend>"
        "<text y=9>legend</text></g><text class=xtitle y=9>title</text></svg></div>"
    )
    browser.show(bad, 400, "light")
    assert len(browser.requests()) == 2
    assert any(one.get("type") == "error" for one in browser.complaints())
    assert browser.evaluate("document.documentElement.scrollWidth") > 400
    assert len(browser.evaluate(SIDEWAYS)) == 1
    assert len(browser.evaluate(BEYOND)) == len(browser.evaluate(OVER_LEGENDS)) == 1


@pytest.mark.nightly
def test_plan_page_content_security_policy_blocks_injected_scripts(
    browser: Tab, files: dict[str, Path], tmp_path: Path
) -> None:
    text = files["search"].read_text("utf-8")
    changed = tmp_path / "changed.html"
    changed.write_text(text.replace("</body>", "<script>document.title = 'run'</script></body>"), "utf-8")
    browser.show(changed, 1440, "light")
    assert browser.evaluate("document.title") == "Plan of gemma4-31b-v5p8"
    assert "Content Security Policy" in str(browser.complaints())


@pytest.mark.nightly
def test_hover_over_a_search_mark_shows_its_settings(browser: Tab, files: dict[str, Path]) -> None:
    browser.show(files["search"], 1440, "dark")
    at = browser.evaluate(
        """(() => {
          const marks = [...document.querySelectorAll("#plot-front .textpoint")];
          const mark = marks.find((one) => one.textContent.trim() === "1");
          mark.scrollIntoView({ block: "center" });
          const box = mark.getBoundingClientRect();
          return [box.x + box.width / 2, box.y + box.height / 2];
        })()"""
    )
    browser.hover(*at)
    words = "document.querySelector('#plot-front .hoverlayer').textContent"
    until(lambda: "remat.policy=block, train.micro_batch_size=3: 0.1012 ms" in browser.evaluate(words))


@pytest.mark.nightly
def test_printed_plan_page_is_white_and_shows_folded_details(browser: Tab, files: dict[str, Path]) -> None:
    browser.show(files["search"], 1200, "dark")
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000
    folded = (
        "document.querySelector('details:not([open]) td').checkVisibility({ contentVisibilityAuto: true })"
    )
    assert not browser.evaluate(folded)
    browser.send("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.evaluate(folded)
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.send("Emulation.setEmulatedMedia", media="", features=[])
