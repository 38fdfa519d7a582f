"""The roofline: how fast the step and its kernels are, against what one device can do."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from markupsafe import Markup

from recipec.compiler.plan.page.numbers import flops, moved, ms, number, percent
from recipec.compiler.plan.page.svg import NARROW, Scale, both, line, picture, tag, text
from recipec.compiler.plan.results import Estimate


@dataclass(frozen=True)
class Point:
    """The step, or one kind of kernel.

    Attributes:
        mark: letter in the picture and the table.
        kind: its class in the style sheet.
        flops, bytes, seconds: all of it within a step.
    """

    mark: str
    kind: str
    name: str
    count: int
    flops: float
    bytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes

    @property
    def speed(self) -> float:
        return self.flops / self.seconds


@dataclass(frozen=True)
class Row:
    """A point's figures as they are written."""

    mark: str
    name: str
    count: str
    flops: str
    bytes: str
    intensity: str
    seconds: str
    speed: str
    share: str


def points(estimate: Estimate) -> list[Point]:
    """The step with its kernels, as estimated and calibrated, and each kind of kernel.

    What has no FLOPs, bytes or time is left out.
    """
    done = estimate.flops + sum(kernel.flops for kernel in estimate.kernels)
    count = estimate.bytes + sum(kernel.bytes for kernel in estimate.kernels)
    found = [
        ("step", "the whole step", 1, done, count, estimate.seconds),
        ("slower", "the whole step, calibrated", 1, done, count, estimate.calibrated_seconds),
    ]
    found += [("kernel", one.name, one.count, one.flops, one.bytes, one.seconds) for one in estimate.kernels]
    known = [one for one in found if min(one[3:]) > 0]
    return [Point(_letter(i), *one) for i, one in enumerate(known)]


def rows(estimate: Estimate) -> list[Row]:
    return [
        Row(
            point.mark,
            point.name,
            number(point.count),
            flops(point.flops, "FLOP"),
            moved(point.bytes),
            number(point.intensity),
            ms(point.seconds),
            flops(point.speed, "FLOP/s"),
            percent(point.speed / estimate.peak_flops),
        )
        for point in points(estimate)
    ]


def roofline(estimate: Estimate) -> Markup:
    return both(lambda width: _roofline(estimate, width))


def ridge(estimate: Estimate) -> float:
    """FLOPs a byte from which on a device's peak is the limit, and not its memory."""
    return estimate.peak_flops / estimate.bandwidth


def _roofline(estimate: Estimate, width: int) -> Markup:
    height = 380 if width > NARROW else 300
    left, right, top, bottom = 52, width - 10, 26, height - 44
    shown = points(estimate)
    turn, peak = ridge(estimate), estimate.peak_flops
    lows = [turn, *(point.intensity for point in shown)]
    speeds = [peak, *(point.speed for point in shown)]
    x = Scale(_decade(min(lows) / 8, down=True), _decade(max(lows) * 2), left, right, logarithmic=True)
    y = Scale(min(min(speeds) / 3, x.low * estimate.bandwidth), peak * 2, bottom, top, logarithmic=True)
    drawn = _grid(x, y, left, right, top, bottom)
    slope_start = max(x.low, y.low / estimate.bandwidth)
    start = (x(slope_start), y(slope_start * estimate.bandwidth))
    corner, end = (x(turn), y(peak)), (x(x.high), y(peak))
    path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in (start, corner, end))
    drawn.append(tag("path", d=path, class_="roof"))
    drawn.append(line(corner[0], corner[1], corner[0], bottom, "ridge"))
    drawn.append(text(right - 2, corner[1] - 8, f"peak {flops(peak, 'FLOP/s')}", "end", "label"))
    drawn.append(text(corner[0] - 6, bottom - 8, f"ridge {turn:,.0f}", "end", "label"))
    memory = f"HBM {number(estimate.bandwidth / 1e9)} GB/s"
    spots = [(x(point.intensity), y(point.speed)) for point in shown]
    drawn.append(_along(start, corner, spots, memory))
    drawn += _marks(shown, x, y, estimate)
    drawn.append(text(right, height - 6, "FLOP a byte of HBM traffic", "end", "axis-title"))
    drawn.append(text(4, 12, "TFLOP/s", "start", "axis-title"))
    words = "; ".join(
        f"{point.mark}, {point.name}: {point.intensity:,.0f} FLOP a byte, {flops(point.speed, 'FLOP/s')}"
        for point in shown
    )
    return picture(
        width,
        height,
        "Roofline of one device",
        f"Peak {flops(peak, 'FLOP/s')}, {memory}, ridge at {turn:,.0f} FLOP a byte. {words}.",
        *drawn,
    )


def _grid(x: Scale, y: Scale, left: float, right: float, top: float, bottom: float) -> list[Markup]:
    drawn = []
    for tick in x.ticks(8 if right > NARROW else 5):
        drawn.append(line(x(tick), top, x(tick), bottom, "grid"))
        drawn.append(text(x(tick), bottom + 18, f"{tick:,g}", "middle", "tick"))
    for tick in y.ticks():
        drawn.append(line(left, y(tick), right, y(tick), "grid"))
        drawn.append(text(left - 8, y(tick) + 4, f"{tick / 1e12:,g}", "end", "tick"))
    return drawn


def _along(
    start: tuple[float, float], end: tuple[float, float], spots: list[tuple[float, float]], words: str
) -> Markup:
    """Words along a line, at a third or two thirds of it: where they are further from the dots."""
    angle = math.degrees(math.atan2(end[1] - start[1], end[0] - start[0]))
    places = [tuple(a + part * (b - a) for a, b in zip(start, end, strict=True)) for part in (0.35, 0.65)]
    x, y = max(places, key=lambda place: min((math.dist(place, spot) for spot in spots), default=0))
    place = f"translate({x:.1f} {y - 8:.1f}) rotate({angle:.1f})"
    return tag("text", words, transform=place, text_anchor="middle", class_="label")


def _marks(shown: list[Point], x: Scale, y: Scale, estimate: Estimate) -> list[Markup]:
    """Dots with their letters: the step's on the side that the roof is not, a kernel's below, lower where two
    would meet."""
    drawn: list[Markup] = []
    step = [(x(point.intensity), y(point.speed)) for point in shown if point.kind != "kernel"]
    drawn += [line(*start, *end, "reach") for start, end in itertools.pairwise(step)]
    taken: list[tuple[float, float]] = []
    for point in sorted(shown, key=lambda one: one.intensity):
        a, b = x(point.intensity), y(point.speed)
        aside = 14 if point.intensity < ridge(estimate) else -14
        place = (a, b + 21) if point.kind == "kernel" else (a + aside, b + 4)
        while any(abs(place[0] - c) < 12 and abs(place[1] - d) < 14 for c, d in taken):
            place = (place[0], place[1] + 14)
        taken.append(place)
        tip = (
            f"{point.name}: {flops(point.flops, 'FLOP')} and {moved(point.bytes)} in {ms(point.seconds)}, "
            f"{percent(point.speed / estimate.peak_flops)} of the peak"
        )
        dot = tag("circle", cx=a, cy=b, r=6, class_=f"dot {point.kind}")
        letter = text(*place, point.mark, "middle", "mark")
        drawn.append(tag("g", dot, letter, tag("title", tip), class_="tip"))
    return drawn


def _decade(value: float, down: bool = False) -> float:
    """The power of ten above a value, or below it."""
    return 10.0 ** (math.floor(math.log10(value)) if down else math.ceil(math.log10(value)))


def _letter(index: int) -> str:
    """a, b, ... z, a1, b1, ..."""
    return chr(ord("a") + index % 26) + (str(index // 26) if index >= 26 else "")
