"""Tests of the docs' site in headless Chromium: narrow and wide, light and dark, served and from disk."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path

import pytest

from tests.e2e.chromium import Tab, cases

PAGES = ("architecture", "index", "start", "comparison", "commands", "language/train", "diagnostics/mesh")
WINDOWS = ((360, "light"), (1440, "dark"))
SIDEWAYS = """
[...document.querySelectorAll(".md-content *")]
  .filter((one) => !one.closest(".md-typeset__scrollwrap, pre, table, .md-typeset__table")
    && one.getBoundingClientRect().right > innerWidth + 0.5)
  .map((one) => one.outerHTML.slice(0, 80))
"""
"""Elements beyond the window's right edge that are not in a scrolling part."""

PICTURE = """
(() => { const box = document.querySelector("img[src$='architecture.svg']").getBoundingClientRect();
  return [box.width, box.height, innerWidth]; })()
"""


class Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@dataclass(frozen=True)
class Address:
    """An address that a Tab opens in place of a file."""

    uri: str

    def as_uri(self) -> str:
        return self.uri


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=root, env=environment, check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site and return its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "width", "scheme"), cases((name, *window) for name, window in product(PAGES, WINDOWS))
)
def test_docs_page_has_no_console_errors_and_no_overflow(
    browser: Tab, address: str, name: str, width: int, scheme: str
) -> None:
    browser.show(Address(f"{address}/{name}.html"), width, scheme)  # type: ignore[arg-type]
    assert browser.complaints() == []
    assert all(request.startswith((address, "data:")) for request in browser.requests())
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(SIDEWAYS) == []
    dark = browser.evaluate("getComputedStyle(document.body).getPropertyValue('--md-hue') !== ''")
    shown = browser.evaluate("document.body.getAttribute('data-md-color-scheme')")
    assert dark and shown == {"light": "default", "dark": "slate"}[scheme]
    if name == "architecture":
        wide, high, window = browser.evaluate(PICTURE)
        assert wide >= min(320, 0.85 * window) and high > wide  # its text is 13 of 400 units wide
