"""Where a step's time goes, and the collectives that are part of it."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from recipec.compiler.plan.page.numbers import flops, moved, ms, number
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
from recipec.compiler.plan.results import Estimate

PARTS = (
    (
        "compiler_seconds",
        "compiler",
        "the compiler's own estimate",
        "counts a loop's body once, a kernel as nothing",
    ),
    ("loop_seconds", "loops", "loops", "what the second and later iterations add, read from the program"),
    ("kernel_seconds", "kernels", "custom kernels", "from their shapes, at half of the peak"),
)
"""Field of `Estimate`, class in the style sheet, name and meaning."""


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind over the same axes; `bar` is its bytes against the largest, in percent."""

    kind: str
    axes: tuple[str, ...]
    network: str
    count: str
    bytes: str
    bar: int


def parts(estimate: Estimate) -> list[Part]:
    """Those that there are."""
    sizes = [(*words, getattr(estimate, field)) for field, *words in PARTS]
    return rows((one for one in sizes if one[-1]), estimate.seconds, ms)


def collectives(estimate: Estimate) -> list[CollectiveRow]:
    """Most bytes first."""
    ordered = sorted(estimate.collectives, key=lambda one: -one.bytes)
    most = ordered[0].bytes if ordered else 0
    return [
        CollectiveRow(
            one.kind,
            one.axes,
            "DCN" if one.over_dcn else "ICI",
            number(one.count),
            moved(one.bytes),
            round(100 * one.bytes / most) if most else 0,
        )
        for one in ordered
    ]


def at_peak(estimate: Estimate) -> float:
    """Seconds that the model's own FLOPs would take at the device's peak."""
    return estimate.model_flops / estimate.peak_flops


def breakdown(estimate: Estimate) -> Markup:
    return both(lambda width: _breakdown(estimate, width))


def _breakdown(estimate: Estimate, width: int) -> Markup:
    """Three bars on one scale: the estimate by part, the calibrated time, the model's FLOPs at the peak."""
    scale = Scale(0, max(estimate.calibrated_seconds, estimate.seconds) * 1e3, 1, width - 1)
    height, step = 26, 58
    drawn = [text(1, 14, f"estimate {ms(estimate.seconds)}", class_="label")]
    start = 0.0
    for field, kind, name, _ in PARTS:
        value = getattr(estimate, field) * 1e3
        if not value:
            continue
        x, across = scale(start), scale(start + value) - scale(start)
        tip = f"{name}: {ms(value / 1e3)}"
        drawn.append(
            tag("g", rectangle(x, 22, across, height, f"part {kind}"), tag("title", tip), class_="tip")
        )
        if across > text_width(name) + 16:
            drawn.append(text(x + 8, 22 + 17, name, class_="on"))
        start += value
    bars = (
        (f"calibrated {ms(estimate.calibrated_seconds)}", estimate.calibrated_seconds, "calibrated"),
        (f"the model's FLOPs at the peak {ms(at_peak(estimate))}", at_peak(estimate), "needed"),
    )
    for i, (words, seconds, kind) in enumerate(bars, start=1):
        drawn.append(text(1, 14 + i * step, words, class_="label"))
        drawn.append(rectangle(1, 22 + i * step, scale(seconds * 1e3) - 1, height, kind))
    bottom = 22 + 2 * step + height + 8
    drawn.append(line(1, bottom, width - 1, bottom, "axis"))
    for tick in scale.ticks(4 if width == NARROW else 8):
        anchor = "start" if tick == 0 else "end" if scale(tick) > width - 24 else "middle"
        drawn.append(line(scale(tick), bottom, scale(tick), bottom + 5, "axis"))
        drawn.append(text(scale(tick), bottom + 20, f"{tick:,g}" if tick else "0 ms", anchor, "tick"))
    listed = ", ".join(f"{part.name} {part.amount}" for part in parts(estimate))
    return picture(
        width,
        bottom + 26,
        "Time of a micro-batch in ms",
        f"Estimate {ms(estimate.seconds)}: {listed}. Calibrated {ms(estimate.calibrated_seconds)}. "
        f"The model's {flops(estimate.model_flops, 'FLOP')} at the peak: {ms(at_peak(estimate))}.",
        *drawn,
    )
