"""What a search found: its front as a picture, the best as lines of the recipe, and the rest in tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from markupsafe import Markup

from recipec.compiler.plan.page.numbers import NOT_KNOWN, ms, ms_per_token, percent, usd
from recipec.compiler.plan.page.svg import NARROW, Scale, both, line, picture, tag, text, text_width
from recipec.compiler.plan.results import Point, Search
from recipec.compiler.plan.search_text import yaml_lines

NONE = "–"
"""For a figure that only a compiled configuration has."""
STATUSES = ("compiled", "too large", "pruned", "refused", "failed")
"""In the order in which the points that are not on the front are listed."""


@dataclass(frozen=True)
class Row:
    """A configuration. `mark` is its number on the front, "" behind it; `id` is what the picture links to."""

    id: str
    mark: str
    sets: tuple[str, ...]
    status: str
    reason: str
    per_token: str
    step: str
    links: str
    memory: str
    usd: str
    mfu: str
    bound: str
    stands: bool


def front(search: Search) -> list[Row]:
    """The front's rows, fastest first."""
    return [_row(search, index, str(place)) for place, index in enumerate(search.front, start=1)]


def behind(search: Search) -> list[Row]:
    """All other rows, by what became of them and then by time, or the bound on it."""
    others = [index for index in range(len(search.points)) if index not in search.front]

    def order(index: int) -> tuple[int, float]:
        point = search.points[index]
        place = STATUSES.index(point.status) if point.status in STATUSES else len(STATUSES)
        return place, point.seconds_per_token or point.bound_seconds_per_token

    return [_row(search, index, "") for index in sorted(others, key=order)]


def counts(search: Search) -> str:
    """How many configurations came to what: "14 configurations: 10 compiled, 1 too large"."""
    found = Counter(point.status for point in search.points)
    words = ", ".join(f"{found[status]} {status}" for status in STATUSES if found[status])
    return f"{len(search.points):,} configurations: {words}"


def gain(search: Search) -> str:
    """A sentence on the fastest against the recipe as it stands."""
    if not search.front:
        return "No configuration fits."
    if search.baseline is None:
        return "The recipe as it stands has no estimate."
    if search.front[0] == search.baseline:
        return "The recipe as it stands is the fastest."
    fastest, stands = (search.points[i].seconds_per_token for i in (search.front[0], search.baseline))
    if not fastest or not stands:
        return ""
    return f"The fastest has {stands / fastest:.2f} times the tokens a second of the recipe as it stands."


def best(search: Search) -> str:
    """The fastest one's lines, "" when the recipe has them already."""
    return "\n".join(yaml_lines(search.points[search.front[0]].sets)) if search.front else ""


def scatter(search: Search) -> Markup | None:
    """None when there is no configuration with both figures."""
    drawable = [i for i, point in enumerate(search.points) if point.memory and point.seconds_per_token]
    return both(lambda width: _scatter(search, drawable, width)) if drawable else None


def _scatter(search: Search, drawable: list[int], width: int) -> Markup:
    height = 400 if width > NARROW else 300
    left, right, top, bottom = 52, width - 12, 28, height - 44
    where = {i: _coordinates(search.points[i]) for i in drawable}
    x = Scale(0, max(1.0, *(share for share, _ in where.values())) * 104, left, right)
    y = Scale(0, max(per_token for _, per_token in where.values()) * 1.1, bottom, top)
    drawn = []
    for tick in x.ticks(5):
        drawn.append(line(x(tick), top, x(tick), bottom, "grid"))
        drawn.append(text(x(tick), bottom + 18, f"{tick:g} %", "middle", "tick"))
    ticks = y.ticks()
    decimals = max(len(f"{tick:g}".partition(".")[2]) for tick in ticks)
    for tick in ticks:
        drawn.append(line(left, y(tick), right, y(tick), "grid"))
        drawn.append(text(left - 8, y(tick) + 4, f"{tick:.{decimals}f}", "end", "tick"))
    drawn.append(line(x(100), top, x(100), bottom, "limit"))
    drawn.append(text(x(100) - 6, top + 12, "all of the HBM", "end", "label"))
    joined = sorted(where[i] for i in search.front if i in where)
    if len(joined) > 1:
        path = "M" + "L".join(f"{x(share * 100):.1f} {y(value):.1f}" for share, value in joined)
        drawn.append(tag("path", d=path, class_="front"))
    if search.baseline in where:
        spots = {i: (x(share * 100), y(value)) for i, (share, value) in where.items()}
        drawn += _as_it_stands(spots.pop(search.baseline), list(spots.values()), right)
    behind_first = [i for i in drawable if i not in search.front] + [
        i for i in reversed(search.front) if i in where
    ]
    radius = 8.5 if width > NARROW else 7
    drawn += [_dot(search, i, x(where[i][0] * 100), y(where[i][1]), radius) for i in behind_first]
    drawn.append(text(right, height - 6, "HBM of a device", "end", "axis-title"))
    drawn.append(text(4, 12, "ms a real token", "start", "axis-title"))
    return picture(
        width,
        height,
        "The search's front",
        f"Time a token against HBM: {counts(search)}; {len(search.front)} on the front, in the table below.",
        *drawn,
        role="group",
    )


def _dot(search: Search, index: int, x: float, y: float, radius: float) -> Markup:
    point = search.points[index]
    row = _row(search, index, "")
    tip = (
        f"{settings(point.sets)}: {row.per_token} ms a token, {row.memory} of the HBM, "
        f"{row.usd} a million tokens"
    )
    if index not in search.front:
        dot = tag("circle", cx=x, cy=y, r=4, class_="behind")
        return tag("g", dot, tag("title", tip), class_="tip")
    mark = str(search.front.index(index) + 1)
    dot = tag("circle", cx=x, cy=y, r=radius, class_="dot front-dot")
    words = text(x, y + 4, mark, "middle", "on-dot")
    return tag("a", dot, words, tag("title", tip), href=f"#{row.id}", class_="tip")


def _as_it_stands(at: tuple[float, float], others: list[tuple[float, float]], right: float) -> list[Markup]:
    """A ring around the recipe's own dot, with words where no other dot is."""
    words = "as it stands"
    wide = text_width(words)
    a, b = at
    # The front falls to the right: above it on the right, and below it on the left, there is no line.
    places = [(a + 12, b - 18), (a - 12 - wide, b + 26), (a - wide / 2, b - 20), (a - wide / 2, b + 28)]
    places += [(a + 16, b + 4), (a - 16 - wide, b + 4), (a + 12, b + 26), (a - 12 - wide, b - 18)]

    def free(x: float, y: float) -> bool:
        if x < 0 or x + wide > right:
            return False
        return not any(x - 10 < c < x + wide + 10 and y - 20 < d < y + 12 for c, d in others)

    x, y = next((place for place in places if free(*place)), places[0])
    return [tag("circle", cx=a, cy=b, r=12, class_="stands"), text(x, y, words, class_="label")]


def settings(sets: tuple[str, ...]) -> str:
    """What a configuration changes, in a line."""
    return ", ".join(sets) or "the recipe as it stands"


def _coordinates(point: Point) -> tuple[float, float]:
    """Share of the HBM, and ms a token."""
    assert point.memory is not None and point.seconds_per_token is not None
    return point.memory.share, point.seconds_per_token * 1e3


def _row(search: Search, index: int, mark: str) -> Row:
    point = search.points[index]
    figures = {
        "per_token": ms_per_token(point.seconds_per_token),
        "step": ms(point.step_seconds),
        "links": ms(point.link_seconds),
        "memory": percent(point.memory.share if point.memory else None),
        "usd": usd(point.usd_per_million_tokens),
        "mfu": percent(point.mfu),
        "bound": ms_per_token(point.bound_seconds_per_token or None),
    }
    return Row(
        id=f"configuration-{index}",
        mark=mark,
        sets=point.sets,
        status=point.status,
        reason=point.reason,
        stands=index == search.baseline,
        **{name: NONE if value == NOT_KNOWN else value for name, value in figures.items()},
    )
