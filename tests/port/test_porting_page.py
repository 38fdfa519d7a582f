"""Check the pages about ports: options, examples, and the runs that port/scripts/same_run.json records.

With SAME_RUN_ENVIRONMENTS, a folder of the tools' environments, `make nightly` repeats these runs. Without it
there are no such tests.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from recipec.compiler.cli.main import app
from recipec.port import dialects
from recipec.port.scripts.same_run import (
    PAGE,
    TOOLS,
    Run,
    Sample,
    compared,
    page,
    recorded,
    same,
    same_run,
    samples,
)


def test_porting_page_names_all_dialects_and_only_existing_options(root: Path) -> None:
    help = CliRunner().invoke(app, ["port", "--help"], env={"COLUMNS": "200"}).stdout
    options = set(re.findall(r"--[a-z-]+", help)) - {"--help"}
    text = (root / "docs" / "porting.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in dialects.KNOWN)
    commands = re.findall(r"^recipe port .*|`recipe port [^`]+`", text, re.M)
    used = {word for command in commands for word in re.findall(r" (--[a-z]+)", command)}
    assert len(options) == 20 and len(used) > 5 and used <= options


def test_page_matches_record_and_differences_are_explained() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text, recorded()) == text
    for name, of_tool in recorded().items():
        assert set(of_tool["features"]) <= set(TOOLS[name].features)
        assert [
            feature for feature, one in of_tool["features"].items() if not (same(one) or one["said"])
        ] == []


def test_packed_row_is_split_into_its_samples() -> None:
    """Tell samples apart by positions that start again, by numbers of a mask, or by what positions see."""
    batch = {"input_ids": [[5, 6, 7, 8, 0]], "labels": [[-100, 6, -100, 8, -100]]}
    numbers = np.array([1, 1, 2, 2, 0])
    sees = np.tril(numbers[:, None] == numbers) & (numbers > 0)
    masks = (
        {"attention_mask": [[1, 1, 1, 1, 0]], "position_ids": [[0, 1, 0, 1, 2]]},
        {"attention_mask": [numbers.tolist()]},
        {"attention_mask": np.where(sees, 0.0, -1e9)[None, None].tolist()},
    )
    expected = [Sample((5, 6), (False, True)), Sample((7, 8), (False, True))]
    assert [list(samples({**batch, **mask})) for mask in masks] == [expected] * 3


def test_comparison_names_the_differing_quantities() -> None:
    one, other = Sample((5, 6), (False, True)), Sample((5, 6), (False, False))
    run = Run([[one, other]], [2.0], [1e-3])
    assert same(compared(run, Run([[other, one]], [2.00005], [1e-3])))
    found = compared(run, Run([[one, one]], [2.1], [1.1e-3]))
    assert {name for name, value in found.items() if value} == {"masks", "rates", "losses", "most"}
    assert compared(run, Run([[one, other]] * 2, [2.0] * 2, [1e-3] * 2))["steps"] == "1, and 2 here"


if FOLDER := os.environ.get("SAME_RUN_ENVIRONMENTS"):

    @pytest.mark.nightly
    @pytest.mark.parametrize(
        ("name", "feature"),
        [
            (name, feature)
            for name in TOOLS
            if (Path(FOLDER) / name).exists()
            for feature in TOOLS[name].features
        ],
    )
    def test_ported_run_matches_the_tools_run(name: str, feature: str, tmp_path: Path) -> None:
        result = same_run(TOOLS[name], feature, Path(str(FOLDER)) / name, tmp_path / "run")
        assert same(result) or result["said"], result
