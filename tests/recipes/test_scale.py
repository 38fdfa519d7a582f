"""Tests that docs/scale.md matches the record of its plans, and the record the current recipe."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from scripts import scale
from scripts.recipes import key


@pytest.fixture(scope="module")
def record() -> scale.Record:
    return scale.read()


def test_scale_page_matches_the_record(record: scale.Record) -> None:
    text = scale.PAGE.read_text(encoding="utf-8")
    assert scale.page(text, record) == text
    other = replace(record["v5p-32"], rows=5)
    assert scale.page(text, {**record, "v5p-32": other}) != text
    fewer = {name: one for name, one in record.items() if name != "v5p-32"}
    assert re.search(r"left out: .*\bv5p-32\b", scale.page(text, fewer))


def test_scale_record_is_of_the_current_recipe(record: scale.Record) -> None:
    assert list(record) == [name for name in scale.CASES if name in record]
    for name, kept in record.items():
        program = scale.lowered(scale.CASES[name])
        planned_again = kept.planned.key == key(program)
        assert planned_again is (name not in scale.EARLIER), f"python -m scripts.scale plan '{name}'"
        assert (kept.chips, kept.hosts, kept.rows) == (
            program.accelerator.chips,
            program.accelerator.hosts,
            program.recipe.train.global_batch_size,
        )


def test_table_gives_step_and_price_of_a_chip_relative_to_the_first_row(record: scale.Record) -> None:
    one = record["v5p-8"]
    plan = replace(one.planned, seconds=1.0, interval=(0.5, 2.0), tokens=8000, usd_per_hour=36.0)
    twice = replace(plan, seconds=1.25, tokens=16000)
    first, second = (
        replace(one, planned=planned, chips=4 * (at + 1)) for at, planned in enumerate((plan, twice))
    )
    rows = scale.tables({"v5p-8": first, "v5p-32": second})["growing"].splitlines()[2:]
    # 36 dollars an hour for 0.5 to 2 seconds a step of 8,000 tokens.
    assert rows[0].endswith("|0.50 to 2.00|4,000 to 16,000|100%|0.62 to 2.50|")
    assert rows[1].endswith("|0.62 to 2.50|6,400 to 25,600|80%|0.39 to 1.56|")


def test_step_that_does_not_fit_has_only_its_memory(record: scale.Record) -> None:
    one = record["v5p-8"]
    over = replace(one.planned, memory=replace(one.planned.memory, temporaries=2e11))
    tables = scale.tables({"v5p-8": one, "v5p-32": replace(one, planned=over)})
    row = next(line for line in tables["growing"].splitlines() if line.startswith("|v5p-32"))
    assert re.search(r"of 95\.00\|{7}$", row)
    assert "v5p-32" not in tables["epoch"]
