"""Tests of the plan's estimates for a server against published logs of vLLM-TPU."""

from __future__ import annotations

import json
from statistics import median

import pytest

from recipec.compiler.roofline.server_text import LONGER
from scripts.serving_figures import BEGIN, END, LOGS, PAGE, Figure, figures, logs, tables

MEMORY = ("weights", "tokens")


@pytest.fixture(scope="module")
def found() -> list[Figure]:
    return list(figures())


def test_planning_page_has_the_estimates_of_published_servers(found: list[Figure]) -> None:
    written = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert written == f"{tables(found)}\n", "run python -m scripts.serving_figures"


def test_weights_and_tokens_of_the_cache_match_the_logs_within_one_percent(found: list[Figure]) -> None:
    assert {one.what for one in found} == {*MEMORY, "TTFT", "TPOT"}
    wrong = [one for one in found if one.what in MEMORY and abs(one.error) > 0.01]
    assert not wrong, wrong


def test_plan_states_how_much_longer_published_servers_took(found: list[Figure]) -> None:
    for what, stated in LONGER.items():
        times = [one.published / one.estimate for one in found if one.what == what]
        assert stated == tuple(round(one, 1) for one in (min(times), median(times), max(times)))


def test_times_are_not_shorter_than_the_estimates(found: list[Figure]) -> None:
    wrong = [one for one in found if one.what not in MEMORY and one.error > 0]
    assert not wrong, wrong


def test_each_log_has_its_source_and_a_figure_and_each_other_its_reason(found: list[Figure]) -> None:
    assert {one.server for one in found} == set(logs())
    for log in logs().values():
        assert all(log[key] for key in ("name", "model", "vllm", "date", "source"))
    assert all(json.loads(LOGS.read_text(encoding="utf-8"))["left_out"].values())
