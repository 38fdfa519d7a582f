"""The page of a plan: what stands on it, what it may not do, and where its pictures put things."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from dataclasses import fields, is_dataclass, replace
from typing import Any
from xml.etree import ElementTree

import pytest
from ruamel.yaml import YAML

from recipec.compiler.plan import calibration
from recipec.compiler.plan.page import search as searched
from recipec.compiler.plan.page.document import page
from recipec.compiler.plan.page.numbers import gib, moved
from tests.plan import plans
from tests.plan.pages import PLANS, Reader, read

EVIL = "<script>alert(1)</script>\"'&</style>"


def test_the_page_has_the_figures_of_the_plan() -> None:
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


def test_the_page_has_every_part_of_the_memory() -> None:
    words = read(plans.flagship()).words
    for field in fields(plans.MEMORY):
        count = getattr(plans.MEMORY, field.name)
        assert " ".join(gib(count).split()) in words
        if field.name != "available":
            assert f"{count:,.0f}" in words
    for one in plans.LARGEST:
        assert f"{one.name} {one.shape} {one.count} {' '.join(gib(one.bytes).split())}" in words


def test_the_page_says_what_the_step_does_with_its_time() -> None:
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


def test_the_page_says_what_its_figures_rest_on() -> None:
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


def test_the_page_of_a_step_that_does_not_fit_says_by_how_much() -> None:
    reader = read(plans.too_large())
    assert "It does not fit. A device would need 128.7 GiB of HBM and has 95.0 GiB: 33.7 GiB too much" in (
        reader.words
    )
    assert "missing 33.7 GiB 35.5 % 36,174,558,659" in reader.words
    assert any(one["class"] == "over" for one in reader.named("rect"))
    assert "It does not fit" not in read(plans.flagship()).words


def test_the_page_of_a_refused_step_gives_no_time() -> None:
    words = read(plans.refused()).words
    assert "Step of a micro-batch not known the compiler refused it" in words
    assert "The compiler refused the step, and gives no time" in words
    assert calibration.sentence() not in words
    assert "128.7 GiB" in words


def test_the_page_of_a_machine_without_a_price_gives_hours_and_no_cost() -> None:
    words = read(plans.unpriced()).words
    assert "Cost of the run no price" in words and "Price an hour no price" in words
    assert "US$" not in words and "0.28 h" in words


def test_the_page_of_a_run_of_unknown_length_gives_a_steps_time_alone() -> None:
    words = read(plans.unknown_length()).words
    assert "Run not known" in words and "Optimizer steps not known" in words
    assert "Tokens a second, at most 9,210" in words
    assert "A million tokens, at least US$0.51 US$0.89" in words


def test_the_best_is_lines_of_a_recipe() -> None:
    reader = read(plans.flagship(), plans.search())
    lines = searched.best(plans.search())
    assert YAML(typ="safe").load(lines) == {"remat": {"policy": "block"}, "train": {"micro_batch_size": 3}}
    assert " ".join(lines.split()) in reader.words
    assert searched.best(replace(plans.search(), front=(0,))) == ""


def test_the_page_of_a_search_that_found_nothing_says_so() -> None:
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
