"""How commands write numbers: one unit and one precision for each kind of figure.

The functions at the end write figures for columns, with a precision that shows a change.
"""

from __future__ import annotations

import math

NOT_KNOWN = "not known"
SPACE = "\N{NO-BREAK SPACE}"
"""Separates a number from its unit."""

GIB = 2**30


def gib(count: float) -> str:
    """Write bytes in GiB with one decimal: "72.5 GiB"; in smaller units if that would be 0.0."""
    if abs(count) >= 0.05 * GIB:
        return f"{count / GIB:,.1f}{SPACE}GiB"
    if abs(count) >= 0.05 * 2**20:
        return f"{count / 2**20:,.1f}{SPACE}MiB"
    return f"{count / 2**10:,.1f}{SPACE}KiB" if count else "0"


def capacity(count: float) -> str:
    """Write a device's capacity, with a second decimal if needed: "95.0 GiB", "31.25 GiB"."""
    value = f"{count / GIB:.2f}"
    return f"{value.removesuffix('0')}{SPACE}GiB"


def in_words(count: float) -> str:
    """Write bytes in full, for readers who add them up: "77,846,282,240"."""
    return f"{count:,.0f}"


def moved(count: float) -> str:
    """Write transferred bytes in the decimal units of bandwidths: "118.4 GB"."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= size:
            return f"{count / size:,.1f}{SPACE}{unit}"
    return f"{count / 1e3:,.1f}{SPACE}kB" if count else "0"


def ms(seconds: float | None) -> str:
    """Write seconds in ms: "1,294 ms", "48.4 ms", "3.83 ms"."""
    if seconds is None:
        return NOT_KNOWN
    value = seconds * 1e3
    decimals = 0 if value >= 100 or value == 0 else 1 if value >= 10 else 2
    return f"{value:,.{decimals}f}{SPACE}ms"


def ms_per_token(seconds: float | None) -> str:
    """Write seconds per token in ms with four decimals, so that columns line up: "0.1086"."""
    return NOT_KNOWN if seconds is None else f"{seconds * 1e3:.4f}"


def hours(value: float | None) -> str:
    """Write hours, or minutes or seconds for short times: "3.34 h", "1.9 min", "12.0 s"."""
    if value is None:
        return NOT_KNOWN
    if value >= 0.1:
        return f"{value:,.2f}{SPACE}h"
    return f"{value * 60:.1f}{SPACE}min" if value >= 1 / 60 else f"{value * 3600:.1f}{SPACE}s"


def usd(value: float | None) -> str:
    """Write US$ with cents, and tenths of cents for small amounts: "US$4.67", "US$0.507"."""
    if value is None:
        return NOT_KNOWN
    return f"US${value:,.3f}" if 0 < value < 1 else f"US${value:,.2f}"


def percent(share: float | None) -> str:
    return NOT_KNOWN if share is None else f"{share:.1%}".replace("%", f"{SPACE}%")


def number(value: float | None) -> str:
    """Write a count: "9,210"."""
    return NOT_KNOWN if value is None else f"{value:,.0f}"


def flops(value: float, unit: str) -> str:
    """Write FLOPs, or FLOPs per second: "372.4 TFLOP", "291.7 GFLOP"."""
    size, prefix = (1e12, "T") if value >= 1e12 or not value else (1e9, "G")
    return f"{value / size:,.1f}{SPACE}{prefix}{unit}"


def significant(value: float | None, digits: int = 4) -> str:
    """Write a number with `digits` significant digits and all digits before the point: "3.413", "12,345"."""
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
    """Write a large count: "947", "12.3 k", "4.56 M"."""
    if value is None:
        return NOT_KNOWN
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / min(size, 1e3 if unit == 'k' else size):,.3g}{SPACE}{unit}"
    return f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """Write seconds, or ms for short times: "12.3 s", "48.4 ms"."""
    if value is None:
        return NOT_KNOWN
    return f"{significant(value, 3)}{SPACE}s" if value >= 1 else f"{significant(value * 1e3, 3)}{SPACE}ms"


def ratio(value: float | None) -> str:
    """Write a ratio: "1.07 x"."""
    return "" if value is None else f"{significant(value, 3)}{SPACE}x"


def plain(text: str) -> str:
    """Return text whose numbers and units are separated by usual spaces, which a reader can search for."""
    return text.replace(SPACE, " ")


PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def gib_number(count: float, decimals: int = 2) -> str:
    """Write bytes of memory in GiB without the unit: "14.62"."""
    return f"{count / GIB:,.{decimals}f}"


def memory_size(count: float) -> str:
    """Write the memory of a device in GiB, exactly and without the unit: "31.25", "95"."""
    return f"{count / GIB:g}"


def kib_number(count: float) -> str:
    """Write bytes in KiB without the unit: "800"."""
    return f"{count / 2**10:,.0f}"


def gb_number(count: float, decimals: int = 2) -> str:
    """Write bytes of files and of traffic in GB without the unit: "62.58"."""
    return f"{count / 1e9:,.{decimals}f}"


def mb_number(count: float) -> str:
    """Write bytes of files in MB without the unit: "1.5"."""
    return f"{count / 1e6:,.1f}"


def file_size(count: float) -> str:
    """Write bytes of files with three digits: "61.4 GB", "2.5 MB"."""
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def ms_number(seconds: float) -> str:
    """Write seconds in ms with one decimal, so that columns line up, without the unit: "48.4"."""
    return f"{seconds * 1e3:,.1f}"


def traffic(count: float) -> str:
    """Write bytes of traffic, in GB also where they are many: "1,610 GB", "2.1 MB"."""
    return _scaled(count, "B", "G")


def milliseconds(seconds: float) -> str:
    """Write seconds as milliseconds: "1,294.1 ms", or "0.214 ms" for short times."""
    number = 1e3 * seconds
    return f"{number:,.1f} ms" if number >= 10 else f"{number:.3g} ms"


def duration(seconds: float) -> str:
    """Write the seconds that a command took: "81 s", "0.7 s"."""
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _scaled(count: float, unit: str, largest: str) -> str:
    allowed = PREFIXES[[prefix for prefix, _ in PREFIXES].index(largest) :]
    prefix, size = next((item for item in allowed if abs(count) >= item[1]), ("", 1.0))
    number = count / size
    digits = 1 if prefix and abs(number) < 1000 else 0
    return f"{number:,.{digits}f} {prefix}{unit}"
