"""Read the diagnostic codes from their page, docs/diagnostics.md.

The letter of a code is its severity (E error, W warning, N note), and its first two digits are its group. The
meaning of a code never changes, and the code of a removed diagnostic is never used again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "diagnostics.md"

ENTRY = re.compile(r"^### ([EWN]\d{4}): (.+)\n\n(.+)\n\n\*\*Cure\.\*\* (.+)$", re.M)


@dataclass(frozen=True)
class Code:
    """The meaning of a code: a title, the cause, and the cure. Markdown."""

    title: str
    cause: str
    cure: str


_TEXT = PAGE.read_text(encoding="utf-8")

CODES = {code: Code(*texts) for code, *texts in ENTRY.findall(_TEXT)}

GROUPS = {group: title for title, group in re.findall(r"^## (.+)\n\n### [EWN](\d\d)", _TEXT, re.M)}
"""Titles of the groups of codes."""

RETIRED = (
    *("E0412", "E0805", "E0901", "E0904", "E0905", "E0906", "E0907", "E0908", "E0909", "E0910", "E0913"),
    *("E0911", "E0912", "N0916", "E0917", "N0918", "E0919"),
    *("N0614", "E0628", "E0932", "E1165", "E1166", "E1167", "E1169", "E1170"),
    *("E1235", "E1236", "N1237"),
)
"""Codes of earlier versions that are no longer given. None of them is used again."""

SEVERITIES = {"E": "error", "W": "warning", "N": "note"}


def anchor(code: str) -> str:
    """Return the anchor of a code's heading on its page, as Markdown readers derive it."""
    title = re.sub(r"[^\w\s-]", "", f"{code}: {CODES[code].title}".lower())
    return re.sub(r"[-\s]+", "-", title).strip("-")
