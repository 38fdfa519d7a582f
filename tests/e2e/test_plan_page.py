"""Tests of a plan's page in headless Chromium: narrow and wide, light and dark."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from recipec.compiler.pages.document import Table, sheet
from recipec.compiler.plan.results import Plan, Search
from tests.e2e.chromium import BEYOND, OVER_LEGENDS, SIDEWAYS, Tab, cases
from tests.plan import plans
from tests.plan.pages import page

PAGES: dict[str, tuple[Callable[[], Plan], Callable[[], Search] | None]] = {
    "search": (plans.flagship, plans.search),
    "flagship": (plans.flagship, None),
    "too-large": (plans.too_large, None),
    "refused": (plans.refused, None),
    "two-slices": (plans.sliced, None),
    "one-axis": (plans.one_axis, None),
}
WINDOWS = ((360, "light"), (1440, "dark"))
SERVING = [("KV cache", sheet("", [Table(("layers" * 10, "bytes a token"), [("50 local", "25,600")])]))]


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
def test_plan_page_content_security_policy_blocks_injected_scripts(
    browser: Tab, files: dict[str, Path], tmp_path: Path
) -> None:
    text = files["search"].read_text("utf-8")
    changed = tmp_path / "changed.html"
    changed.write_text(text.replace("</body>", "<script>document.title = 'run'</script></body>"), "utf-8")
    browser.show(changed, 1440, "light")
    assert browser.evaluate("document.title") == "Plan of gemma4-31b-v5p8"
    assert "Content Security Policy" in str(browser.complaints())
