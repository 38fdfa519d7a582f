"""Headless Chromium, driven through the pipe of its DevTools protocol, without a driver or a package."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import debian

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

SIDEWAYS = """
[...document.querySelectorAll("body *")]
  .filter((one) => !one.closest(".scroll, pre, .js-plotly-plot, script, details:not([open])")
    && one.getBoundingClientRect().right > innerWidth + 0.5)
  .map((one) => one.outerHTML.slice(0, 80))
"""
"""Elements beyond the window's right edge that are not in a scrolling part."""

BEYOND = """
[...document.querySelectorAll(".js-plotly-plot")].filter((plot) => {
  const box = plot.getBoundingClientRect(), svg = plot.querySelector(".main-svg").getBoundingClientRect();
  return svg.right > box.right + 1 || plot.querySelectorAll(".trace, .hm, .bars .point").length === 0;
}).map((plot) => plot.id)
"""
"""Plots that are wider than their container, or empty."""

OVER_LEGENDS = """
[...document.querySelectorAll(".js-plotly-plot")].filter((plot) => {
  const boxes = (names) => [...plot.querySelectorAll(names)].map((one) => one.getBoundingClientRect());
  const words = boxes("text[class*=xtitle], .xtick text, .annotation-text");
  return boxes("[class^=legend]:not([class*=text])").some((a) => words.some((b) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4));
}).map((plot) => plot.id)
"""
"""Plots whose legend covers the words of an axis or a title."""


def cases(looks: Iterable[tuple[str, int, str]]) -> list[Any]:
    """Make pytest parameters of a window's width and colors.

    `make e2e` runs the first, and `make nightly` the others.
    """
    first, *others = looks
    return [
        pytest.param(*first, marks=pytest.mark.e2e),
        *(pytest.param(*look, marks=pytest.mark.nightly) for look in others),
    ]


@dataclass
class Tab:
    """A browser page, with its console messages and requests since it was opened.

    Attributes:
        events: the protocol's events in order, as {"method", "params"}.
    """

    commands: int
    answers: int
    session: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    sent: int = 0
    read: bytes = b""

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self.sent += 1
        number = self.sent
        message = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def show(self, path: Path, width: int, scheme: str) -> None:
        """Open a file in a light or dark window, `width` pixels wide and 900 high."""
        self.events.clear()
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.send("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """Evaluate a JavaScript expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def hover(self, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        """Save an image of the whole page, not only of the window."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def requests(self) -> list[str]:
        """Return the addresses that the page requested, including its own, without data: URLs."""
        wanted = (event for event in self.events if event.get("method") == "Network.requestWillBeSent")
        urls = [str(event["params"]["request"]["url"]) for event in wanted]
        return [url for url in urls if not url.startswith("data:")]

    def complaints(self) -> list[dict[str, Any]]:
        """Return errors, warnings and other console messages."""
        named = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event["params"] for event in self.events if event.get("method") in named]

    def _read(self) -> dict[str, Any]:
        """Read the next message, which ends with a zero byte."""
        while b"\0" not in self.read:
            more = os.read(self.answers, 1 << 20)
            assert more, "Chromium has ended"
            self.read += more
        text, _, self.read = self.read.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


@contextmanager
def tab(profile: Path) -> Iterator[Tab]:
    """Open a page in a new Chromium with the empty folder `profile` for its settings."""
    theirs_in, commands = os.pipe()
    answers, theirs_out = os.pipe()
    # Chromium reads commands from descriptor 3 and answers on descriptor 4.
    script = 'exec "$@" 3<&"$CHROMIUM_IN" 4>&"$CHROMIUM_OUT"'
    process = subprocess.Popen(
        [
            "bash",
            "-c",
            script,
            "bash",
            debian.program("chromium", "chromium"),
            *FLAGS,
            f"--user-data-dir={profile}",
        ],
        env=os.environ | {"CHROMIUM_IN": str(theirs_in), "CHROMIUM_OUT": str(theirs_out)},
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        page = Tab(commands, answers)
        target = page.send("Target.createTarget", url="about:blank")["targetId"]
        page.session = page.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        yield page
    finally:
        os.close(commands)
        os.close(answers)
        process.terminate()
        process.wait(timeout=120)
