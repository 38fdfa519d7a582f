"""Small parts that the page's pictures are made of: elements, scales and axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDE, NARROW = 780, 360
"""Widths that every chart is drawn for: a picture shrunk to a phone's width has unreadable text."""


def tag(name: str, *content: str | Markup, **attributes: str | float | None) -> Markup:
    """An element. Text in it is escaped, markup is not; attributes with None are left out.

    Args:
        name: of the element.
        content: texts and elements.
        attributes: `_` stands for `-`; a `_` at the end is dropped, for Python's keywords.
    """
    written = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _value(value))
        for key, value in attributes.items()
        if value is not None
    )
    inside = Markup("").join(escape(one) for one in content)
    return Markup("<{}{}>{}</{}>").format(Markup(name), written, inside, Markup(name))


def picture(
    width: float,
    height: float,
    title: str,
    description: str,
    *content: Markup,
    class_: str | None = None,
    role: str = "img",
) -> Markup:
    """An SVG element with a name and a description for whoever cannot see it.

    Args:
        role: "img", or "group" where it has links, which an image cannot have.
    """
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        *content,
        class_=class_,
        viewBox=f"0 0 {_value(width)} {_value(height)}",
        width=width,
        height=height,
        role=role,
    )


def both(draw: Callable[[int], Markup]) -> Markup:
    """A chart at both widths; the style sheet shows the one that fits."""
    return Markup("").join(
        tag("div", draw(width), class_=f"chart {name}")
        for width, name in ((WIDE, "wide"), (NARROW, "narrow"))
    )


def text(x: float, y: float, words: str, anchor: str = "start", class_: str | None = None) -> Markup:
    return tag("text", words, x=x, y=y, text_anchor=anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def rectangle(x: float, y: float, width: float, height: float, class_: str, *content: Markup) -> Markup:
    return tag("rect", *content, x=x, y=y, width=max(width, 0), height=height, class_=class_)


def text_width(words: str, size: float = 12) -> float:
    """About how wide words are: an SVG made without a browser cannot measure them."""
    return len(words) * size * 0.56


@dataclass(frozen=True)
class Scale:
    """From a quantity to a coordinate.

    Attributes:
        low, high: of the quantity.
        start, end: of the coordinate.
        logarithmic: whether equal distances are equal ratios.
    """

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values within the scale; of a logarithmic one powers of ten, and 2 and 5 times them."""
        if self.logarithmic:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps in ((1, 2, 5), (1,)):
                found = [10.0**power * times for power in powers for times in steps]
                found = [value for value in found if self.low * 0.999 <= value <= self.high * 1.001]
                if len(found) <= most:
                    break
            return found
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / most))
        step *= next(
            times for times in (1, 2, 2.5, 5, 10, 20) if (self.high - self.low) / (step * times) <= most
        )
        return [step * i for i in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]


def _value(value: str | float) -> str:
    """Coordinates with two decimals at most: a page of a thousand of them stays small."""
    return value if isinstance(value, str) else f"{round(value, 2):g}"
