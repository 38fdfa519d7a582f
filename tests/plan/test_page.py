"""Tests of a plan's HTML page: its text, its Plotly figures, and what it must not contain."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

import pytest
from markupsafe import Markup
from ruamel.yaml import YAML

from recipec.compiler.pages.document import Block, Document, Plot, Section, Text, sheet
from recipec.compiler.pages.html import COLORS, scatter, script_hash, write
from recipec.compiler.pages.numbers import capacity, flops, gib, hours, moved, ms, usd
from recipec.compiler.plan.plan_document import MEMORY, points
from recipec.compiler.plan.search_document import best, standing
from tests.plan import plans
from tests.plan.pages import PLANS, Reader, page, read

GOLDEN = Path(__file__).parent / "golden"
EVIL = "<script>alert(1)</script>\"'&</style>"


@pytest.mark.parametrize("name", ["flagship", "two slices"])
def test_words_of_the_page_match_the_golden_file(name: str, update: bool) -> None:
    words = read(
        PLANS[name](), plans.search(), [("KV cache", sheet("", [Text("50 local\n10 global", "code")]))]
    ).words
    shown = "\n".join(wrap(words, 100, break_on_hyphens=False, break_long_words=False)) + "\n"
    path = GOLDEN / f"page-{name.replace(' ', '-')}.txt"
    if update:
        path.write_text(shown)
    assert shown == path.read_text()


def test_page_says_if_all_layers_were_compiled_and_if_it_came_from_the_cache() -> None:
    plan = plans.flagship()
    words = read(replace(plan, estimate=replace(plan.estimate, compiled_layers=(60,)), cached=True)).words
    assert (
        "All 60 layers of the step of train.py were compiled to the end for v5p:2x2x1." in words
        and "this plan came from the cache" in words
    )


@pytest.mark.parametrize("name", PLANS)
def test_page_is_well_formed_html(name: str) -> None:
    text = page(PLANS[name](), plans.search(), [("KV cache", sheet("", [Text("50 local  25,600", "code")]))])
    reader = Reader(text)
    assert reader.elements[0][0] == "html"
    assert max(Counter(reader.attributes("id")).values()) == 1
    assert not re.search(r"\b(nan|inf|None|Undefined)\b", reader.words)
    labels = reader.attributes("aria-labelledby")
    assert len(labels) == 9 and set(labels) <= set(reader.attributes("id"))


@pytest.mark.parametrize("name", PLANS)
def test_plotly_accepts_every_figure_of_the_page(name: str) -> None:
    from plotly.graph_objects import Figure

    figures = read(PLANS[name](), plans.search()).figures
    assert len(figures) >= 4
    for figure in figures.values():
        Figure(**figure)  # raises on an unknown attribute
        assert not re.search(r"\bNaN\b|\bInfinity\b", json.dumps(figure))


@pytest.mark.parametrize("name", PLANS)
def test_page_loads_no_external_resources(name: str) -> None:
    reader = read(PLANS[name](), plans.search())
    assert reader.attributes("href") == reader.attributes("src") == []
    assert {"link", "img", "iframe", "object"}.isdisjoint(tag for tag, _ in reader.elements)
    (style,) = reader.within["style"]
    for text in (style, *reader.within["script"]):
        assert not re.search(r"@import|url\(|https?:|fetch|XMLHttpRequest", text)
    policy = next(one for one in reader.named("meta") if "http-equiv" in one)["content"]
    assert policy.startswith("default-src 'none'; ")
    digests = {
        base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in reader.within["script"]
    }
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == digests


def test_content_security_policy_forbids_inserted_scripts() -> None:
    """Block a foreign script, even if a text were inserted as markup."""
    blocks: list[Block] = [
        Plot("one", "", [scatter("a", [1], [2], "red")]),
        Text(Markup("<script>stranger()</script>")),
    ]
    sections = [Section("only", "Only", (), blocks)]
    reader = Reader(
        write(Document("name", sections, title="title", generator="recipec", command=("command", "")), "plan")
    )
    library, drawn, strange = reader.within["script"]
    assert strange == "stranger()" and "Plotly.newPlot(" in drawn
    policy = next(one for one in reader.named("meta") if "http-equiv" in one)["content"]
    assert [script_hash(one) in policy for one in (library, drawn, strange)] == [True, True, False]


def test_names_cannot_become_markup() -> None:
    plan, search = _evil(plans.sliced()), _evil(plans.search())
    reader = read(plan, search, [(EVIL, sheet("", [Text(EVIL)]))])
    usual = read(plans.sliced(), plans.search(), [("Title", sheet("", [Text("text")]))])
    assert Counter(tag for tag, _ in reader.elements) == Counter(tag for tag, _ in usual.elements)
    assert not any(name.startswith("on") for _, attributes in reader.elements for name in attributes)
    assert reader.words.count(EVIL) > 20
    assert EVIL not in page(plan, search, [(EVIL, sheet("", [Text(EVIL)]))])
    # Plotly interprets its texts as markup.
    assert "<" not in json.dumps(reader.figures).replace("<extra></extra>", "")


def _evil(value: Any) -> Any:
    """Replace every text in a value, except those that are compared with known words."""
    if is_dataclass(value) and not isinstance(value, type):
        kept = {"status", "kind", "spec", "axes", "source", "lane"}
        changed = {field.name: getattr(value, field.name) for field in fields(value)}
        changed = {name: one if name in kept else _evil(one) for name, one in changed.items()}
        return replace(value, **changed)
    if isinstance(value, dict):
        # The keys of the recipe, which have dots, are looked up.
        return {key if "." in key else f"{EVIL}{key}": _evil(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_evil, value))
    return EVIL if isinstance(value, str) and value else value


def test_page_of_a_too_large_step_shows_the_missing_memory() -> None:
    reader = read(plans.too_large())
    assert "It does not fit. A device would need 128.7 GiB of HBM and has 95.0 GiB: 33.7 GiB too much" in (
        reader.words
    )
    assert "missing 33.7 GiB 35.5 % 36,174,558,659" in reader.words
    assert "It does not fit" not in read(plans.flagship()).words


def test_the_page_of_a_refused_step_gives_no_time() -> None:
    words = read(plans.refused()).words
    assert "Step of a micro-batch not known the compiler refused it" in words
    assert "The compiler refused the step, and gives no time" in words
    assert plans.INTERVAL.basis not in words
    assert "128.7 GiB" in words


def test_the_page_of_a_machine_without_a_price_gives_hours_and_no_cost() -> None:
    words = read(plans.unpriced()).words
    assert "Cost of the run no price" in words and "Price an hour no price" in words
    assert "US$" not in words and "0.28 h" in words


def test_page_of_a_run_of_unknown_length_gives_only_rates() -> None:
    words = read(plans.unknown_length()).words
    assert "Run not known" in words and "Optimizer steps not known" in words
    assert "Tokens a second, at most 9,210" in words
    assert "A million tokens, at least US$0.507 US$0.456 to US$0.608" in words


def test_page_shows_the_best_configuration_as_recipe_yaml() -> None:
    reader = read(plans.flagship(), plans.search())
    lines = best(plans.search())
    assert YAML(typ="safe").load(lines) == {"remat": {"policy": "block"}, "train": {"micro_batch_size": 3}}
    assert " ".join(lines.split()) in reader.words
    assert best(replace(plans.search(), front=(0,))) == ""


def test_page_says_when_the_search_found_no_fitting_configuration() -> None:
    found = plans.search()
    nothing = replace(found, points=found.points[10:], front=(), baseline=None)
    words = read(plans.flagship(), nothing).words
    assert "No configuration fits." in words and "4 not on the front" in words
    assert "The fastest, as lines of the recipe" not in words
    assert standing(replace(found, baseline=None)) == "The recipe as it stands has no estimate."
    assert standing(replace(found, baseline=6)) == "The recipe as it stands is the fastest."


def test_page_omits_search_and_serving_sections_without_results() -> None:
    labels = read(plans.flagship()).attributes("aria-labelledby")
    assert "search" not in labels and "serving" not in labels and "memory" in labels
    reader = read(plans.flagship(), None, [("KV cache", sheet("", [Text("50 local\n10 global", "code")]))])
    assert "serving" in reader.attributes("aria-labelledby")
    assert "KV cache 50 local 10 global" in reader.words


def test_the_memory_is_drawn_to_scale() -> None:
    figure = read(plans.flagship()).figures["memory-parts"]
    drawn = [bar["x"][0] for bar in figure["data"]]
    assert drawn == pytest.approx([getattr(plans.MEMORY, name) / plans.GIB for name in MEMORY], rel=1e-4)
    assert [shape["x0"] for shape in figure["layout"]["shapes"]] == [95]
    too_large = plans.too_large().estimate.memory
    figure = read(plans.too_large()).figures["memory-parts"]
    assert [shape["x0"] for shape in figure["layout"]["shapes"]] == [
        95,
        pytest.approx(too_large.used / plans.GIB, rel=1e-4),
    ]


def test_every_device_of_two_slices_is_drawn_with_its_host() -> None:
    reader = read(plans.sliced())
    said = [
        text
        for slice in (0, 1)
        for row in reader.figures[f"slice-{slice}"]["data"][0]["customdata"]
        for text in row
    ]
    assert said[0] == "device 0: dcn 0, fsdp 0, tp 0, host 0"
    assert said[-1] == "device 255: dcn 1, fsdp 31, tp 3, host 63"
    assert len(set(said)) == 256
    assert "slice 0: 128 devices, 32 hosts" in reader.words and "DCN" in reader.words
    many = replace(plans.sliced(), slices=8, devices=1024, hosts=256, axes={"dcn": 8, "fsdp": 32, "tp": 4})
    reader = read(many)
    assert "slice-3" in reader.figures and "slice-4" not in reader.figures
    assert "4 more slices like this." in reader.words


def test_page_shows_weights_sharded_over_the_cp_axis() -> None:
    reader = read(replace(plans.flagship(), axes={"fsdp": 1, "cp": 4, "tp": 1}))
    said = [text for row in reader.figures["slice-0"]["data"][0]["customdata"] for text in row]
    assert said[3] == "device 3: fsdp 0, cp 3, host 0"
    assert "Cut over cp 4 pieces, each on 1 device; " in reader.words


def test_page_of_a_step_without_kernels_omits_kernel_time() -> None:
    assert "custom kernels" in read(plans.flagship()).words
    without = replace(plans.ESTIMATE, kernels=(), timeline=replace(plans.TIMELINE, kernels=0.0))
    reader = read(replace(plans.flagship(), estimate=without))
    assert "exposed copies 9.00 ms" in reader.words
    assert "custom kernels" not in reader.words and "from their shapes" not in reader.words
    assert "custom kernels" not in [bar["name"] for bar in reader.figures["time-parts"]["data"]]


def test_the_roofline_has_the_step_and_its_kernels_at_their_intensity() -> None:
    step, *kernels = points(plans.ESTIMATE)
    assert len(kernels) == 3
    assert step[2] == pytest.approx(372.4e12 + 33.3e12) and step[3] == pytest.approx(1.7156e12)
    roof, ridge, steps, drawn = read(plans.flagship()).figures["roofline-points"]["data"]
    assert roof["x"][1] == ridge["x"][0] == pytest.approx(459e12 / 2765e9, rel=1e-4)
    assert roof["y"][1:] == [459, 459] and roof["y"][0] == pytest.approx(roof["x"][0] * 2.765, rel=1e-4)
    assert steps["text"] + drawn["text"] == list("abcd")
    # The kernels run at half of the peak.
    assert drawn["y"] == pytest.approx([459 / 2] * 3, rel=0.02)


def test_search_front_figure_has_a_mark_for_each_point() -> None:
    reader = read(plans.flagship(), plans.search())
    behind, front, stands = reader.figures["front"]["data"]
    assert sorted(front["text"]) == list("1234567") and len(behind["x"]) == 3 and len(stands["x"]) == 1
    assert front["x"] == sorted(front["x"]) and front["y"] == sorted(front["y"], reverse=True)
    marked = front["customdata"][front["text"].index("1")]
    assert marked.replace("\N{NO-BREAK SPACE}", " ") == (
        "remat.policy=block, train.micro_batch_size=3: 0.1012 ms a token, 79.3 % of the HBM, "
        "US$0.472 a million tokens"
    )


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
def test_numbers_are_written_with_readable_units(written: str, wanted: str) -> None:
    assert written.replace("\N{NO-BREAK SPACE}", " ") == wanted


def test_page_colors_meet_wcag_contrast() -> None:
    """Require WCAG 2's contrast: 4.5 to 1 for text and 3 to 1 for drawings, in both color schemes."""
    (style,) = read(plans.flagship()).within["style"]
    for scheme in re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2]:
        colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", scheme))
        for name in ("ink", "muted", "link", "bad"):
            assert _contrast(colors[name], colors["paper"]) >= 4.5, name
        for name in ("ink", "muted"):
            assert _contrast(colors[name], colors["raised"]) >= 4.5, name
        assert _contrast(colors["ink"], colors["bad-paper"]) >= 4.5
        for drawn in COLORS:
            assert _contrast(drawn, colors["paper"]) >= 3, drawn
            assert _contrast("#ffffff", drawn) >= 4.5, drawn


def _contrast(one: str, other: str) -> float:
    bright, dim = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def _luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
