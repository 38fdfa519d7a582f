"""HBM of one device by part, against what the device has."""

from __future__ import annotations

from markupsafe import Markup

from recipec.compiler.plan.page.numbers import GIB, capacity, gib, percent
from recipec.compiler.plan.page.parts import Part, rows
from recipec.compiler.plan.page.svg import (
    NARROW,
    Scale,
    both,
    line,
    picture,
    rectangle,
    tag,
    text,
    text_width,
)
from recipec.compiler.plan.results import Memory

PARTS = {
    "weights": ("base weights", "the model as it is loaded"),
    "adapters": ("adapters", "what LoRA trains"),
    "optimizer": ("optimizer", "its state for what is trained"),
    "batch": ("batch", "tokens, positions and masks of a micro-batch"),
    "padding": ("padding", "what the arguments' layout in memory adds"),
    "temporaries": ("temporaries", "activations and everything else that lives within a step"),
    "code": ("code", "the program itself"),
}
"""Name and meaning by field of `Memory`, in the order in which they are drawn."""


def parts(memory: Memory) -> list[Part]:
    sizes = ((field, *words, getattr(memory, field)) for field, words in PARTS.items())
    return rows(sizes, memory.available, gib)


def bar(memory: Memory) -> Markup:
    return both(lambda width: _bar(memory, width))


def left(memory: Memory) -> str:
    """The headroom in words: "22.5 GiB free", "33.7 GiB too much"."""
    if memory.headroom < 0:
        return f"{gib(-memory.headroom)} too much"
    return f"{gib(memory.headroom)} free"


def _bar(memory: Memory, width: int) -> Markup:
    # Both labels of what does not fit need a line of their own where it is narrow.
    top, height = (46 if memory.headroom < 0 and width == NARROW else 30), 56
    scale = Scale(0, max(memory.used, memory.available) / GIB, 1, width - 1)
    limit = scale(memory.available / GIB)
    drawn: list[Markup] = [rectangle(1, top, limit - 1, height, "free")]
    start = 0.0
    for field, (name, _) in PARTS.items():
        size = getattr(memory, field) / GIB
        x, across = scale(start), scale(start + size) - scale(start)
        tip = f"{name}: {gib(size * GIB)}, {percent(size * GIB / memory.available)} of the device"
        drawn.append(
            tag("g", rectangle(x, top, across, height, f"part {field}"), tag("title", tip), class_="tip")
        )
        if across > text_width(name) + 16:
            drawn.append(text(x + 8, top + 24, name, class_="on"))
            drawn.append(text(x + 8, top + 42, gib(size * GIB), class_="on strong"))
        start += size
    drawn += (
        _beyond(memory, scale, top, height, width)
        if memory.headroom < 0
        else _free(memory, scale, top, width)
    )
    drawn.append(line(limit, top - 8, limit, top + height + 8, "limit"))
    for tick in scale.ticks(4 if width == NARROW else 8):
        anchor = "start" if tick == 0 else "end" if scale(tick) > width - 20 else "middle"
        drawn.append(line(scale(tick), top + height, scale(tick), top + height + 5, "axis"))
        drawn.append(text(scale(tick), top + height + 20, f"{tick:g}" if tick else "0 GiB", anchor, "tick"))
    listed = ", ".join(f"{part.name} {part.amount}" for part in parts(memory))
    return picture(
        width,
        top + height + 26,
        "HBM of one device by part",
        f"{gib(memory.used)} of {capacity(memory.available)}, {left(memory)}: {listed}.",
        *drawn,
    )


def _free(memory: Memory, scale: Scale, top: float, width: int) -> list[Markup]:
    """The device's size above the bar's end, and in the free part what is left."""
    start, end = scale(memory.used / GIB), scale(memory.available / GIB)
    drawn = [text(end, top - 12, f"the device has {capacity(memory.available)}", "end", "label")]
    if end - start > text_width(gib(memory.headroom)) + 16:
        drawn.append(text(start + 8, top + 24, "free", class_="muted"))
        drawn.append(text(start + 8, top + 42, gib(memory.headroom), class_="muted strong"))
    return drawn


def _beyond(memory: Memory, scale: Scale, top: float, height: float, width: int) -> list[Markup]:
    """What does not fit: hatched, as colour alone would not tell everyone."""
    limit, end = scale(memory.available / GIB), scale(memory.used / GIB)
    hatch = f"hatch-{width}"
    stripe = tag("path", d="M0 8L8 0M-2 2L2 -2M6 10L10 6", class_="stripe")
    pattern = tag("pattern", stripe, id=hatch, width=8, height=8, patternUnits="userSpaceOnUse")
    over = tag("rect", x=limit, y=top, width=end - limit, height=height, fill=f"url(#{hatch})", class_="over")
    return [
        tag("defs", pattern),
        over,
        text(limit - 6, top - 12, f"the device has {capacity(memory.available)}", "end", "label"),
        text(width - 1, 18 if width > NARROW else 14, left(memory), "end", "label bad"),
    ]
