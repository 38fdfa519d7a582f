"""The section on a search: its front as a plot and a table, the fastest configuration, and the others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from recipec.compiler.pages.document import Block, Document, Excerpt, Items, Plot, Section, Table, Text
from recipec.compiler.pages.html import COLORS, GRAY, axis, rule, scatter
from recipec.compiler.pages.numbers import (
    NOT_KNOWN,
    duration,
    gib_number,
    ms_per_token,
    percent,
    usd,
)
from recipec.compiler.plan.fit import yaml_lines
from recipec.compiler.plan.results import Point, Search
from recipec.compiler.wording import plural

NONE = "–"
STATUSES = ("compiled", "too large", "pruned", "refused", "failed")
REASONS = 6
"""How many reasons of refused and of failed configurations are shown."""
RECIPE = "the recipe as it stands"
BATCH = "train.global_batch_size"
ESTIMATES = "Estimates: libtpu compiled the training step without a TPU, and nothing was measured on one."
GENERATES = (
    " rollout: its mesh, and completions at once. generation: seconds of an optimizer step in which "
    "completions are generated, an estimate from shapes; ms/token counts them."
)
LEGEND = (
    "mesh: {axes}. ms/token: milliseconds a real token, over all devices. step: seconds of a "
    "micro-batch. GiB, HBM: of each device, and the share of its memory. {price} waits: seconds of a step "
    "that the device waits for collectives and copies, a part of `step`."
)


def document(search: Search, settings: Mapping[str, str], axes: Iterable[str], devices: int) -> Document:
    """Return the result of a search alone. The arguments are those of `search_section`."""
    return Document("", [search_section(search, settings, axes, devices)], sentence=ESTIMATES)


def search_section(search: Search, settings: Mapping[str, str], axes: Iterable[str], devices: int) -> Section:
    """Return the result of a search.

    Args:
        settings: the unchanged recipe's values, by path: "remat.policy" -> "none".
        axes: names of the mesh axes.
        devices: number of the machine's devices.
    """
    blocks: list[Block] = [*_front_plot(search)]
    if search.front:
        changed = {path for index in search.front for path in _values(search.points[index].sets)}
        tables = _Configurations(search, settings, devices, raised=BATCH in changed)
        price = (
            "US$/M: of a million real tokens."
            if tables.price == "US$/M"
            else f"{tables.price}: seconds of all devices together for a million real tokens; there is no "
            "price."
        )
        legend = LEGEND.format(axes=" x ".join(axes), price=price)
        blocks += [
            Text("Configurations that no other beats in time, memory and cost", "heading"),
            tables.table(search.front, "The search's front", legend),
        ]
        if search.baseline is not None and search.baseline not in search.front:
            blocks += [Text(RECIPE.capitalize(), "heading"), tables.table([search.baseline], "The recipe")]
        blocks += _fastest(search, settings)
    if behind := _behind(search):
        head = ("settings", "ms a token", "at least", "HBM", "result")
        title = f"{len(behind)} not on the front"
        blocks.append(Table(head, behind, words=(4,), folded=title, detail=True))
    blocks += [*map(Text, search.notes), Items([*_reasons(search)])]
    return Section("search", "Search", (f"{counts(search)}.", standing(search)), blocks)


class _Configurations:
    """Tables of configurations that were compiled.

    Args:
        raised: whether a configuration of the front has more rows in an optimizer step than the recipe.
    """

    def __init__(self, search: Search, settings: Mapping[str, str], devices: int, raised: bool) -> None:
        self.search, self.settings, self.devices, self.raised = search, settings, devices, raised
        priced = search.points[search.front[0]].usd_per_million_tokens is not None
        self.price = "US$/M" if priced else "dev-s/M"
        self.generates = search.points[search.front[0]].generation_seconds is not None

    def table(self, indices: Sequence[int], label: str, note: str = "") -> Table:
        head = ["", "mesh", "micro", *(["rows"] if self.raised else []), "remat", "attn.", "flags"]
        head += ["ms/token", "step", "GiB", "HBM", "MFU", self.price, "waits"]
        head += ["rollout", "generation"] if self.generates else []
        note += GENERATES if note and self.generates else ""
        first = 4 if self.raised else 3
        rows = [self._row(index) for index in indices]
        # The numbers of the front are those of the plot, which a terminal does not show.
        excerpt = Excerpt(len(rows), range(1, len(head)))
        return Table(head, rows, note, (1, first, first + 1, first + 2), label, excerpt=excerpt)

    def _row(self, index: int) -> list[str]:
        point = self.search.points[index]
        values = {**self.settings, **_values(point.sets)}
        memory = point.memory
        assert memory and point.seconds_per_token and point.step_seconds and point.mfu is not None
        device_seconds = 1e6 * point.seconds_per_token * self.devices
        used = max(memory.used, point.generation_memory or 0.0)
        million = point.usd_per_million_tokens
        return [
            str(self.search.front.index(index) + 1) if index in self.search.front else "",
            " x ".join(re.findall(r"\d+", values["mesh.axes"])),
            values["train.micro_batch_size"],
            *([values[BATCH]] if self.raised else []),
            values["remat.policy"],
            _kernel(values),
            values["xla.profile"],
            ms_per_token(point.seconds_per_token),
            f"{point.step_seconds:.3f}",
            gib_number(used, 1),
            f"{100 * used / memory.available:.0f} %",
            f"{100 * point.mfu:.0f} %",
            f"{device_seconds:.0f}" if million is None else f"{million:.3f}",
            "" if point.exposed_seconds is None else f"{point.exposed_seconds:.3f}",
            *([_rollout(values), f"{point.generation_seconds or 0.0:.1f}"] if self.generates else []),
        ]


def _kernel(values: Mapping[str, str]) -> str:
    """Return a configuration's attention, with the block size unless it is the accelerator's own."""
    block = values["model.attention_block"]
    return values["model.attention"] + ("" if block == "null" else f" {block}")


def _rollout(values: Mapping[str, str]) -> str:
    """Return the layout of a configuration's rollouts, and the completions that are generated at once."""
    axes = values["mesh.axes"] if values["rollout.axes"] == "null" else values["rollout.axes"]
    rows = "all" if values["rollout.rows"] == "null" else values["rollout.rows"]
    return f"{' x '.join(re.findall(r'[0-9]+', axes))}, {rows}"


def _values(sets: Sequence[str]) -> dict[str, str]:
    return {path: value for path, _, value in (argument.partition("=") for argument in sets)}


def _fastest(search: Search, settings: Mapping[str, str]) -> list[Block]:
    """Show the recipe lines of the fastest configuration."""
    if not (lines := best(search)):
        return []
    blocks: list[Block] = [Text("The fastest, as lines of the recipe", "heading"), Text(lines, "code")]
    changed = _values(search.points[search.front[0]].sets)
    if BATCH in changed:
        blocks.append(
            Text(
                f"It raises {BATCH} from {settings[BATCH]} to {changed[BATCH]}: another optimization, with "
                "fewer steps over the same data."
            )
        )
    return blocks


def best(search: Search) -> str:
    """Return the recipe lines of the fastest configuration, "" when the recipe has them already."""
    return "\n".join(yaml_lines(search.points[search.front[0]].sets)) if search.front else ""


def _behind(search: Search) -> list[tuple[str, ...]]:
    """Return rows of the configurations that are not on the front, with the reason of each."""

    def order(index: int) -> tuple[int, float]:
        point = search.points[index]
        place = STATUSES.index(point.status) if point.status in STATUSES else len(STATUSES)
        return place, point.seconds_per_token or point.bound_seconds_per_token

    def sets(index: int) -> str:
        point = search.points[index]
        unchanged = ("as it stands",) if index == search.baseline or not point.sets else ()
        return ", ".join([*point.sets, *unchanged])

    def known(value: str) -> str:
        return NONE if value == NOT_KNOWN else value

    behind = [index for index in range(len(search.points)) if index not in search.front]
    return [
        (
            sets(index),
            known(ms_per_token(point.seconds_per_token)),
            known(ms_per_token(point.bound_seconds_per_token or None)),
            known(percent(point.memory.share if point.memory else None)),
            f"{point.status}: {point.reason}" if point.reason else point.status,
        )
        for index in sorted(behind, key=order)
        for point in (search.points[index],)
    ]


def _reasons(search: Search) -> Iterator[str]:
    """Yield the reasons of refused and of failed configurations, with their counts."""
    for status in ("refused", "failed"):
        reasons = Counter(point.reason for point in search.points if point.status == status)
        for reason, count in reasons.most_common(REASONS):
            yield f"{status}, {count} x: {reason}"
        if len(reasons) > REASONS:
            yield f"{status}: and {len(reasons) - REASONS} reasons more"


def _front_plot(search: Search) -> list[Plot]:
    """Plot time per token against HBM, for the points that have both."""
    where = {
        index: (point.memory.share * 100, point.seconds_per_token * 1e3)
        for index, point in enumerate(search.points)
        if point.memory and point.seconds_per_token
    }
    front = sorted((index for index in search.front if index in where), key=lambda index: where[index])
    baseline = [index for index in (search.baseline,) if index in where]
    data = []
    for name, indices, mode, color, size, symbol in (
        ("behind the front", [i for i in where if i not in front], "markers", GRAY, 8, "circle"),
        ("on the front", front, "lines+markers+text", COLORS[0], 20, "circle"),
        (RECIPE, baseline, "markers", COLORS[3], 28, "circle-open"),
    ):
        x, y = ([where[index][place] for index in indices] for place in (0, 1))
        text = [str(search.front.index(index) + 1) if index in front else "" for index in indices]
        more = {"text": text, "textfont": {"color": "white"}, "size": size, "symbol": symbol}
        pointed = [described(search.points[index]) for index in indices]
        data += [scatter(name, x, y, color, mode, said=pointed, **more)] if indices else []
    shape, words = rule(100, "all of the HBM")
    layout = {
        "xaxis": axis("HBM of a device, %", range=[0, max([100, *(x for x, _ in where.values())]) * 1.04]),
        "yaxis": axis("ms a real token", rangemode="tozero"),
        "shapes": [shape],
        "annotations": [words],
        "margin": {"l": 60, "r": 12, "t": 30, "b": 120},
    }
    numbered = "Numbered: no other configuration is better in time, HBM and cost at once."
    note = Text(f"{numbered} Gray: compiled, and behind the front.", detail=True)
    return [Plot("front", "", data, layout, 470, after=(note,))] if data else []


def described(point: Point) -> str:
    """Describe in one line what a configuration changes, and its figures."""
    share = percent(point.memory.share if point.memory else None)
    return (
        f"{', '.join(point.sets) or RECIPE}: {ms_per_token(point.seconds_per_token)} ms "
        f"a token, {share} of the HBM, {usd(point.usd_per_million_tokens)} a million tokens"
    )


def counts(search: Search) -> str:
    """Count the configurations by status: "14 configurations in 412 s: 10 compiled, 1 too large"."""
    statuses = Counter(point.status for point in search.points)
    words = ", ".join(f"{statuses[status]} {status}" for status in STATUSES if statuses[status])
    total = plural(len(search.points), "configuration")
    return f"{total} in {duration(search.seconds)}: {words or 'none was looked at'}"


def standing(search: Search) -> str:
    """Say where the unchanged recipe is among the results."""
    unchanged = next((point for point in search.points if not point.sets), None)
    reason = f": {unchanged.reason}" if unchanged and unchanged.reason else ""
    if not search.front:
        return f"No configuration fits. The recipe as it stands has no estimate{reason}."
    if search.baseline is None:
        return f"The recipe as it stands has no estimate{reason}."
    if search.front[0] == search.baseline:
        return "The recipe as it stands is the fastest."
    fastest, baseline = (search.points[i].seconds_per_token for i in (search.front[0], search.baseline))
    assert fastest and baseline
    gain = f"The fastest has {baseline / fastest:.2f} times its tokens a second."
    if search.baseline in search.front:
        place = search.front.index(search.baseline) + 1
        return f"The recipe as it stands is number {place} on the front. {gain}"
    return f"The recipe as it stands is not on the front. {gain}"
