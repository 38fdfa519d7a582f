"""Tests that docs/scale.md matches the record of its plans, and the record the current recipe."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from recipec.compiler.errors import ArtifactError
from recipec.compiler.plan.results import Collective
from scripts import scale
from scripts.recipes import key
from scripts.scale_pages import Record, Scaled, link_bytes, page, tables


@pytest.fixture(scope="module")
def record() -> Record:
    return scale.read()


@pytest.fixture(scope="module")
def one(record: Record) -> Scaled:
    return record.cases["v5p-8"]


def test_scale_page_matches_the_record(record: Record) -> None:
    text = scale.PAGE.read_text(encoding="utf-8")
    assert scale.written(text, record) == text
    other = replace(record.cases["v5p-32"], rows=5)
    assert scale.written(text, Record({**record.cases, "v5p-32": other})) != text
    fewer = Record({name: one for name, one in record.cases.items() if name != "v5p-32"})
    assert re.search(r"left out: .*\bv5p-32\b", scale.written(text, fewer))


def test_page_without_table_placeholder_is_refused(record: Record) -> None:
    with pytest.raises(ArtifactError, match="no place for the table v5p"):
        page(scale.PAGE.read_text(encoding="utf-8").replace("<!-- v5p -->", ""), record)


def test_scale_record_is_of_the_current_recipe(record: Record) -> None:
    cases = {case.name: case for case in scale.cases()}
    assert list(record.cases) == [name for name in cases if name in record.cases]
    for name, kept in record.cases.items():
        case = cases[name]
        program = scale.lowered(case)
        assert kept.planned.key == key(program), f"python -m scripts.scale plan '{name}'"
        assert (kept.chips, kept.slices, kept.rows) == (
            program.accelerator.chips,
            program.accelerator.slices,
            program.recipe.train.global_batch_size,
        )


def test_link_bytes_count_links_to_neighbor_chips() -> None:
    """Count links of 100 GB/s each way: v5p-8 is 2x2x1, v5p-64 2x4x4, v5p-128 4x4x4, v6e-256 16x16."""
    found = {name: link_bytes(name) / 1e9 for name in ("v5p-8", "v5p-64", "v5p-128", "v6e-8", "v6e-256")}
    assert found == {"v5p-8": 200, "v5p-64": 300, "v5p-128": 600, "v6e-8": 200, "v6e-256": 400}


def test_exposed_step_time_adds_ici_and_dcn_transfer_times(one: Scaled) -> None:
    gathered = Collective("all-gather", ("fsdp",), False, 1, 8e9)
    summed = Collective("all-reduce", ("dcn",), True, 1, 1e9)
    step = replace(
        one,
        axes={"dcn": 2, "fsdp": 4, "tp": 1},
        collectives=(gathered, summed),
        planned=replace(one.planned, seconds=1.0, micro_batches=2),
    )
    # Three quarters of 8 GB over two links of 100 GB/s. A sum over two slices sends half each way.
    assert step.ici_seconds == pytest.approx(2 * 6 / 200)
    assert step.dcn_seconds == pytest.approx(2 * 1 / 6.25)
    assert step.exposed == pytest.approx(2 + step.ici_seconds + step.dcn_seconds)


def test_first_row_of_v5p_table_is_the_100_percent_baseline(record: Record) -> None:
    first = next(line for line in tables(record)["v5p"].splitlines() if line.startswith("| v5p-8 "))
    assert "| 100% |" in first
