"""The pictures of a plan's page: drawn to scale, whole, and to be told apart."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from recipec.compiler.plan.page import memory, mesh, placements, roofline
from recipec.compiler.plan.page import search as searched
from recipec.compiler.plan.page.mesh import Grid
from recipec.compiler.plan.page.numbers import capacity, flops, gib, hours, moved, ms, usd
from recipec.compiler.plan.page.svg import Scale
from tests.plan import plans
from tests.plan.pages import marked, number, read, svg


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


def test_every_device_of_two_slices_is_drawn_in_its_host() -> None:
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
def test_devices_that_hold_the_same_piece_are_marked(axes: tuple[str, ...], same: int) -> None:
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


def test_a_step_without_kernels_is_drawn_without_their_time() -> None:
    assert "custom kernels" in read(plans.flagship()).words
    without = replace(plans.ESTIMATE, kernels=(), kernel_seconds=0.0)
    words = read(replace(plans.flagship(), estimate=without)).words
    assert "loops 78.0 ms" in words
    assert "custom kernels" not in words and "from their shapes" not in words


def test_the_roofline_has_the_step_and_its_kernels_at_their_intensity() -> None:
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


def test_the_searchs_front_is_drawn_with_a_mark_for_each_point() -> None:
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


def test_ticks_of_a_logarithmic_scale_are_round() -> None:
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
def test_numbers_are_written_as_people_read_them(written: str, wanted: str) -> None:
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
