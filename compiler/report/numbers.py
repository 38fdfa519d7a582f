"""How the report writes numbers, beside what it shares with the plan's page."""

from __future__ import annotations

import math

from recipec.compiler.plan.page.numbers import NOT_KNOWN, SPACE

__all__ = ["NOT_KNOWN", "SPACE", "compact", "ratio", "seconds", "significant"]


def significant(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits, and all of those before the point: "3.413", "12,345"."""
    if value is None:
        return NOT_KNOWN
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size < -4:
        return f"{value:.{digits - 1}g}"
    return f"{value:,.{max(0, digits - 1 - size)}f}"


def compact(value: float | None) -> str:
    """A large count: "947", "12.3 k", "4.56 M"."""
    if value is None:
        return NOT_KNOWN
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / min(size, 1e3 if unit == 'k' else size):,.3g}{SPACE}{unit}"
    return f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """Seconds, or ms where they are few: "12.3 s", "48.4 ms"."""
    if value is None:
        return NOT_KNOWN
    return f"{significant(value, 3)}{SPACE}s" if value >= 1 else f"{significant(value * 1e3, 3)}{SPACE}ms"


def ratio(value: float | None) -> str:
    """How many times: "1.07 x"."""
    return "" if value is None else f"{significant(value, 3)}{SPACE}x"
