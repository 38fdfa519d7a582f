"""The page of a plan: what stands on it, what it may not do, and where its pictures put things."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from ruamel.yaml import YAML

from compiler.plan import calibration
from compiler.plan.page import memory, mesh, placements, roofline
from compiler.plan.page import search as searched
from compiler.plan.page.document import page
from compiler.plan.page.mesh import Grid
from compiler.plan.page.numbers import capacity, flops, gib, hours, moved, ms, usd
from compiler.plan.page.svg import Scale
from compiler.plan.results import Plan
from tests.plan import plans

EVIL = "<script>alert(1)</script>\"'&</style>"
VOID = {"meta", "br"}
PLANS: dict[str, Callable[[], Plan]] = {
    "flagship": plans.flagship,
    "too large": plans.too_large,
    "refused": plans.refused,
    "unpriced": plans.unpriced,
    "unknown length": plans.unknown_length,
    "two slices": plans.sliced,
    "one axis": plans.one_axis,
}


class Reader(HTMLParser):
    """A page's elements and text.

    Attributes:
        elements: names with their attributes, in order.
        words: everything that is shown, spaces made one.
        within: the text of scripts and styles by element.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.shown: list[str] = []
        self.within: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)
        self.close()
        assert self.open == []
        self.words = " ".join("".join(self.shown).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.within:
            self.within[self.open[-1]].append(data)
        else:
            self.shown.append(f" {data}")

    def attributes(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.elements if name in attributes]

    def named(self, name: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.elements if tag == name]


def read(plan: Plan, *others: Any) -> Reader:
    return Reader(page(plan, *others))


def svg(markup: str) -> ElementTree.Element:
    """The first of a picture's widths, which is the wide one."""
    return ElementTree.fromstring(f"<div>{markup}</div>").findall(".//svg")[0]


def marked(picture: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [one for one in picture.iter() if kind in one.get("class", "").split()]


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.get(name, "nan"))


def test_the_figures_of_a_plan() -> None:
    words = read(plans.flagship()).words
    for figure in (
        "gemma4-31b-v5p8 Model google/gemma-4-31B-it Accelerator v5p-8: 4 chips",
        "Topology v5p:2x2x1 Devices 4 devices on 1 host Mesh fsdp 4 x tp 1",
        "Step of a micro-batch 1,294 ms 2,269 ms calibrated",
        "Real tokens a second 9,210 5,252 calibrated",
        "Model FLOPs utilisation 64.2 % 36.6 % calibrated",
        "HBM of a device 76.3 % 72.5 GiB of 95.0 GiB 22.5 GiB free",
        "Run 0.28 h 0.49 h calibrated",
        "Cost of the run US$4.67 US$8.20 calibrated",
        "Optimizer steps 774",
        "A million real tokens US$0.51 US$0.89",
    ):
        assert figure in words, figure
    assert calibration.sentence() in words
    assert plans.RUN.note in words


def test_every_part_of_the_memory() -> None:
    words = read(plans.flagship()).words
    for field in fields(plans.MEMORY):
        count = getattr(plans.MEMORY, field.name)
        assert " ".join(gib(count).split()) in words
        if field.name != "available":
            assert f"{count:,.0f}" in words
    for one in plans.LARGEST:
        assert f"{one.name} {one.shape} {one.count} {' '.join(gib(one.bytes).split())}" in words


def test_what_the_step_does() -> None:
    words = read(plans.flagship()).words
    for seconds in ("1,071 ms 82.8 %", "78.0 ms 6.0 %", "145 ms 11.2 %"):
        assert seconds in words
    assert "all-gather fsdp ICI 854 118.4 GB" in words
    for kernel in plans.KERNELS:
        assert f"{kernel.name} {kernel.count} " in words
        assert " ".join(moved(kernel.bytes).split()) in words
    for placement in plans.PLACEMENTS:
        assert f"{placement.pattern} {placement.count} " in words
    assert "5,376 fsdp × 21,504" in words


def test_what_it_rests_on() -> None:
    plan = plans.flagship()
    words = read(plan).words
    for name, value in [*plan.settings.items(), *plan.versions.items()]:
        assert f"{name} {value}" in words
    assert plan.notes[0] in words
    assert "Nothing was measured on one." in words
    assert "nothing is extrapolated" not in words
    whole = replace(plan, estimate=replace(plan.estimate, compiled_layers=(60,)), cached=True)
    assert "All 60 layers were compiled; nothing is extrapolated." in read(whole).words
    assert "this plan came from the cache" in read(whole).words


def test_the_calibrations_sentence_stands_once() -> None:
    plan = replace(plans.flagship(), notes=(calibration.sentence(),))
    assert read(plan).words.count(calibration.sentence()) == 1


@pytest.mark.parametrize("name", PLANS)
def test_it_is_well_formed(name: str) -> None:
    text = page(PLANS[name](), plans.search(), [("KV cache", "50 local  25,600")])
    reader = Reader(text)
    assert reader.elements[0][0] == "html"
    assert max(Counter(reader.attributes("id")).values()) == 1
    assert not re.search(r"\b(nan|inf|None|Undefined)\b", reader.words)
    labels = reader.attributes("aria-labelledby")
    assert len(labels) == 9 and set(labels) <= set(reader.attributes("id"))


@pytest.mark.parametrize("name", PLANS)
def test_every_picture_is_described(name: str) -> None:
    text = page(PLANS[name](), plans.search())
    pictures = [ElementTree.fromstring(one) for one in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert len(pictures) > 8
    for picture in pictures:
        assert [one.tag for one in picture[:2]] == ["title", "desc"]
        assert picture[0].text and picture[1].text
        assert not re.search(r"\bnan\b|\binf\b", ElementTree.tostring(picture, encoding="unicode"))


@pytest.mark.parametrize("name", PLANS)
def test_nothing_comes_from_outside(name: str) -> None:
    reader = read(PLANS[name](), plans.search())
    links = reader.attributes("href") + reader.attributes("src")
    assert links and all(link.startswith("#") for link in links)
    assert {"link", "img", "iframe", "object"}.isdisjoint(tag for tag, _ in reader.elements)
    (style,), (script,) = reader.within["style"], reader.within["script"]
    for text in (style, script):
        assert not re.search(r"@import|url\(|https?:|fetch|XMLHttpRequest", text)
    policy = next(one for one in reader.named("meta") if "http-equiv" in one)["content"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; ") and f"script-src 'sha256-{digest}'" in policy


def test_names_cannot_become_markup() -> None:
    plan, search = _evil(plans.sliced()), _evil(plans.search())
    reader = read(plan, search, [(EVIL, EVIL)])
    usual = read(plans.sliced(), plans.search(), [("Title", "text")])
    assert Counter(tag for tag, _ in reader.elements) == Counter(tag for tag, _ in usual.elements)
    assert not any(name.startswith("on") for _, attributes in reader.elements for name in attributes)
    assert reader.words.count(EVIL) > 20
    assert EVIL not in page(plan, search, [(EVIL, EVIL)])


def _evil(value: Any) -> Any:
    """The same value with every text in it replaced, but for what is compared with known words."""
    if is_dataclass(value) and not isinstance(value, type):
        kept = {"status", "kind", "spec", "axes", "source"}
        changed = {field.name: getattr(value, field.name) for field in fields(value)}
        changed = {name: one if name in kept else _evil(one) for name, one in changed.items()}
        return replace(value, **changed)
    if isinstance(value, dict):
        return {f"{EVIL}{key}": _evil(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_evil, value))
    return EVIL if isinstance(value, str) and value else value


def test_a_step_that_does_not_fit() -> None:
    reader = read(plans.too_large())
    assert "It does not fit. A device would need 128.7 GiB of HBM and has 95.0 GiB: 33.7 GiB too much" in (
        reader.words
    )
    assert "missing 33.7 GiB 35.5 % 36,174,558,659" in reader.words
    assert any(one["class"] == "over" for one in reader.named("rect"))
    assert "It does not fit" not in read(plans.flagship()).words


def test_a_step_that_the_compiler_refused() -> None:
    words = read(plans.refused()).words
    assert "Step of a micro-batch not known the compiler refused it" in words
    assert "The compiler refused the step, and gives no time" in words
    assert calibration.sentence() not in words
    assert "128.7 GiB" in words


def test_a_machine_without_a_price() -> None:
    words = read(plans.unpriced()).words
    assert "Cost of the run no price" in words and "Price an hour no price" in words
    assert "US$" not in words and "0.28 h" in words


def test_a_run_of_unknown_length() -> None:
    words = read(plans.unknown_length()).words
    assert "Run not known" in words and "Optimizer steps not known" in words
    assert "Tokens a second, at most 9,210" in words
    assert "A million tokens, at least US$0.51 US$0.89" in words


def test_the_memory_is_drawn_to_scale() -> None:
    picture = svg(memory.bar(plans.MEMORY))
    drawn = {one.get("class", "").split()[1]: number(one, "width") for one in marked(picture, "part")}
    whole = number(marked(picture, "free")[0], "width")
    for name, across in drawn.items():
        assert across / whole == pytest.approx(getattr(plans.MEMORY, name) / plans.MEMORY.available, abs=2e-4)
    too_large = plans.too_large().estimate.memory
    picture = svg(memory.bar(too_large))
    over, limit = marked(picture, "over")[0], marked(picture, "limit")[0]
    assert number(over, "x") == number(limit, "x1")
    assert number(over, "width") / (number(limit, "x1") - 1) == pytest.approx(
        too_large.used / too_large.available - 1, abs=1e-3
    )


@pytest.mark.parametrize(
    "fsdp, tp", [(1, 1), (4, 1), (8, 1), (6, 1), (256, 1), (4, 2), (64, 4), (40, 4), (2, 16), (512, 4)]
)
def test_every_device_has_a_place_of_its_own(fsdp: int, tp: int) -> None:
    grid = Grid(fsdp, tp)
    places = [grid.place(index) for index in range(fsdp * tp)]
    assert len(set(places)) == fsdp * tp
    assert all(0 <= column < grid.columns and 0 <= row < grid.rows for column, row in places)
    for devices in {1, min(4, fsdp * tp), fsdp * tp}:
        first = (fsdp * tp // devices - 1) * devices
        covered = [
            (column + i, row + j)
            for column, row, across, down in grid.runs(first, devices)
            for i, j in itertools.product(range(across), range(down))
        ]
        assert sorted(covered) == sorted(places[first : first + devices])


def test_two_slices_of_128_devices() -> None:
    drawn = mesh.slices(plans.sliced())
    assert [one.caption for one in drawn] == [
        "slice 0: 128 devices, 32 hosts",
        "slice 1: 128 devices, 32 hosts",
    ]
    tips = []
    for one in drawn:
        picture = ElementTree.fromstring(one.svg)
        assert len(marked(picture, "device")) == 128 and len(marked(picture, "host")) == 32
        # At 400 pixels it is not shrunk: its numbers stay readable.
        assert number(picture, "width") <= 368
        tips += [title.text for title in picture.iterfind("g/title")]
    assert tips[0] == "device 0: dcn 0, fsdp 0, tp 0, host 0"
    assert tips[-1] == "device 255: dcn 1, fsdp 31, tp 3, host 63"
    assert len(set(tips)) == 256
    assert mesh.not_drawn(plans.sliced()) == ""
    assert "DCN" in read(plans.sliced()).words


def test_thousands_of_devices_stay_about_square() -> None:
    for fsdp, tp in ((2048, 1), (512, 4), (1024, 2)):
        grid = Grid(fsdp, tp)
        assert 1 / 3 <= grid.columns / grid.rows <= 3
    many = replace(plans.sliced(), slices=1, devices=2048, hosts=512, axes={"fsdp": 512, "tp": 4})
    same = marked(ElementTree.fromstring(mesh.holders(many, ("tp",))), "same")
    assert len(same) == 512 and all(number(one, "width") > 0.5 for one in same)


def test_slices_that_are_not_drawn_are_counted() -> None:
    many = replace(plans.sliced(), slices=8, devices=1024, hosts=256, axes={"dcn": 8, "fsdp": 32, "tp": 4})
    assert len(mesh.slices(many)) == 4
    assert mesh.not_drawn(many) == "4 more slices like this."
    assert mesh.not_drawn(many) in read(many).words


@pytest.mark.parametrize(
    "axes, same", [((), 128), (("tp",), 32), (("fsdp",), 4), (("fsdp", "tp"), 1)], ids=str
)
def test_which_devices_hold_the_same_piece(axes: tuple[str, ...], same: int) -> None:
    picture = ElementTree.fromstring(mesh.holders(plans.sliced(), axes))
    assert len(marked(picture, "same")) == same and len(marked(picture, "other")) == 128 - same
    assert f"the {same} device" in read(plans.sliced()).words or axes == ()


def test_arrays_are_grouped_by_the_axes_that_cut_them() -> None:
    groups = placements.groups(plans.sliced())
    assert [(one.title, one.pieces) for one in groups] == [
        ("Cut over fsdp and tp", "128 pieces, each on 2 devices"),
        ("Cut over tp", "4 pieces, each on 64 devices"),
        ("Cut over fsdp", "32 pieces, each on 8 devices"),
        ("Whole on every device", ""),
    ]
    # An axis of one device cuts nothing.
    groups = placements.groups(plans.flagship())
    assert [one.title for one in groups] == ["Cut over fsdp", "Whole on every device"]
    rows = [row for group in groups for row in (*group.shown, *group.folded)]
    assert len(rows) == len(plans.PLACEMENTS)
    assert {dimension.axis for row in rows for dimension in row.shape} == {"", "fsdp"}


def test_a_step_without_kernels() -> None:
    assert "custom kernels" in read(plans.flagship()).words
    without = replace(plans.ESTIMATE, kernels=(), kernel_seconds=0.0)
    words = read(replace(plans.flagship(), estimate=without)).words
    assert "loops 78.0 ms" in words
    assert "custom kernels" not in words and "from their shapes" not in words


def test_the_roofline() -> None:
    points = roofline.points(plans.ESTIMATE)
    assert [point.kind for point in points] == ["step", "slower", "kernel", "kernel", "kernel"]
    step = points[0]
    assert step.flops == pytest.approx(372.4e12 + 33.3e12) and step.bytes == pytest.approx(1.7156e12)
    assert step.speed / points[1].speed == pytest.approx(2.2694 / 1.2941)
    picture = svg(roofline.roofline(plans.ESTIMATE))
    corner = re.findall(r"[\d.]+ [\d.]+", marked(picture, "roof")[0].get("d", ""))[1]
    assert number(marked(picture, "ridge")[0], "x1") == pytest.approx(float(corner.split()[0]), abs=0.06)
    roof = float(corner.split()[1])
    dots = marked(picture, "dot")
    assert len(dots) == 5
    # Kernels are at half of the peak: log 2 below it, where a decade is log 10.
    heights = {round(number(dot, "cy") - roof, 1) for dot in dots if "kernel" in dot.get("class", "")}
    ticks = {one.text: number(one, "y") for one in marked(picture, "tick") if one.get("text-anchor") == "end"}
    assert max(heights) == pytest.approx(ticks["100"] - ticks["200"], abs=0.5)


def test_the_searchs_front() -> None:
    search = plans.search()
    picture = svg(searched.scatter(search) or "")
    marks = [mark for mark in picture.iter("a")]
    assert sorted(mark.find("text").text or "" for mark in marks) == list("1234567")  # type: ignore[union-attr]
    assert len(marked(picture, "behind")) == 3 and len(marked(picture, "stands")) == 1
    reader = read(plans.flagship(), search)
    assert {mark.get("href", "")[1:] for mark in marks} <= set(reader.attributes("id"))
    path = re.findall(r"([\d.]+) ([\d.]+)", marked(picture, "front")[0].get("d", ""))
    across, down = zip(*((float(x), float(y)) for x, y in path), strict=True)
    assert list(across) == sorted(across) and list(down) == sorted(down)
    words = reader.words
    assert "14 configurations: 10 compiled, 1 too large, 2 pruned, 1 refused" in words
    assert "The fastest has 1.07 times the tokens a second of the recipe as it stands." in words
    assert "0.1012 3,620 ms 148 ms 79.3 % US$0.47 68.8 %" in words
    assert "7 not on the front" in words
    assert "too large it needs 128.7 GiB of 95.0 GiB – 0.0700 135.5 %" in words
    assert "cannot be faster than 0.2114 ms a token – 0.2114 –" in words
    assert "Two at a time." in words


def test_the_best_is_lines_of_a_recipe() -> None:
    reader = read(plans.flagship(), plans.search())
    lines = searched.best(plans.search())
    assert YAML(typ="safe").load(lines) == {"remat": {"policy": "block"}, "train": {"micro_batch_size": 3}}
    assert " ".join(lines.split()) in reader.words
    assert searched.best(replace(plans.search(), front=(0,))) == ""


def test_a_search_without_a_front() -> None:
    found = plans.search()
    nothing = replace(found, points=found.points[10:], front=(), baseline=None)
    words = read(plans.flagship(), nothing).words
    assert "No configuration fits." in words and "4 not on the front" in words
    assert "The fastest, as lines of the recipe" not in words
    assert searched.gain(replace(found, baseline=None)) == "The recipe as it stands has no estimate."
    assert searched.gain(replace(found, baseline=6)) == "The recipe as it stands is the fastest."


def test_without_search_and_serving_there_is_no_section_of_them() -> None:
    labels = read(plans.flagship()).attributes("aria-labelledby")
    assert "search" not in labels and "serving" not in labels and "memory" in labels
    reader = read(plans.flagship(), None, [("KV cache", "50 local\n10 global")])
    assert "serving" in reader.attributes("aria-labelledby")
    assert "KV cache 50 local 10 global" in reader.words


@pytest.mark.parametrize(
    "low, high, ticks",
    [
        (0, 95, [0, 20, 40, 60, 80]),
        (0, 1.04, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 2588, [0, 500, 1000, 1500, 2000, 2500]),
    ],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert Scale(low, high, 0, 100).ticks() == pytest.approx(ticks)


def test_ticks_of_a_logarithmic_scale() -> None:
    assert Scale(10, 1000, 0, 100, logarithmic=True).ticks(8) == pytest.approx(
        [10, 20, 50, 100, 200, 500, 1000]
    )
    assert Scale(1, 1e6, 0, 100, logarithmic=True).ticks(8) == pytest.approx([10.0**i for i in range(7)])


@pytest.mark.parametrize(
    "written, wanted",
    [
        (gib(72.5 * 2**30), "72.5 GiB"),
        (gib(196_608), "0.2 MiB"),
        (gib(10_752), "10.5 KiB"),
        (gib(0), "0"),
        (ms(1.2941), "1,294 ms"),
        (ms(0.0484), "48.4 ms"),
        (ms(0.00383), "3.83 ms"),
        (capacity(95 * 2**30), "95.0 GiB"),
        (capacity(31.25 * 2**30), "31.25 GiB"),
        (hours(3.34), "3.34 h"),
        (hours(0.0319), "1.9 min"),
        (hours(0.0033), "11.9 s"),
        (usd(56.114), "US$56.11"),
        (usd(0.0112), "US$0.011"),
        (flops(3.724e14, "FLOP"), "372.4 TFLOP"),
        (flops(2.917e11, "FLOP/s"), "291.7 GFLOP/s"),
        (ms(None), "not known"),
        (moved(1.61e12), "1.6 TB"),
        (moved(2.1e6), "2.1 MB"),
    ],
)
def test_numbers(written: str, wanted: str) -> None:
    assert written.replace("\N{NO-BREAK SPACE}", " ") == wanted


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_from_what_they_lie_on(scheme: str) -> None:
    """WCAG 2: at least 4.5 to 1 for text, 3 to 1 for what is drawn."""
    (style,) = read(plans.flagship()).within["style"]
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light if scheme == "light" else dark))
    for name in ("ink", "muted", "link", "bad", "fsdp", "tp"):
        assert _contrast(colours[name], colours["paper"]) >= 4.5, name
    for name in ("ink", "muted"):
        assert _contrast(colours[name], colours["raised"]) >= 4.5, name
    assert _contrast(colours["ink"], colours["device"]) >= 4.5
    assert _contrast(colours["ink"], colours["bad-paper"]) >= 4.5
    for name in (*memory.PARTS, "mark"):
        assert _contrast(colours[name], colours["paper"]) >= 3, name
    for name in ("weights", "adapters", "optimizer", "temporaries", "batch", "code"):
        assert _contrast(colours["on"], colours[name]) >= 4.5, name


def _contrast(one: str, other: str) -> float:
    bright, dim = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
