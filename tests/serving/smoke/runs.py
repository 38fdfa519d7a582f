"""Servers for smoke, and helpers to read its output."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.serving.fake_faults import Faults

Run = Callable[..., tuple[int, str]]
"""Runs smoke on a server with more arguments, and returns its exit status and output."""

BOTH = ["tuned", "tuned-base"]
SAME = {"tuned": "one", "tuned-base": "one"}


def paced(**faults: Any) -> Faults:
    """Return faults of a server whose tokens come one by one."""
    return Faults(**{"token_seconds": 0.001, **faults})


def line(output: str, name: str) -> str:
    """Return a check's lines, without its seconds."""
    found = re.search(rf"^\S+ +{name} .*\n(?: .*\n)*", output, re.MULTILINE)
    assert found, output
    return re.sub(r"  +", " ", found[0])
