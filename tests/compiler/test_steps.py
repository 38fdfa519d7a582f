"""Tests of the lengths of runs, available rows, and paths that leave the recipe's folder."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from recipec.compiler.lowering.references import escapes
from recipec.compiler.lowering.run_length import read_local, run_length, warmup_steps
from recipec.spec.language import Source
from recipec.spec.load import Loaded

ROW = b'{"messages": [{"role": "user", "content": "abcdefgh"}]}\n'


def test_rows_are_counted_by_lines_up_to_their_limits(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(ROW * 3 + b"\n\nnot json\n")
    found = read_local(tmp_path, [Source(path="a.jsonl")])
    assert found is not None and found.rows == 4
    found = read_local(tmp_path, [Source(path="a.jsonl", limit=3), Source(path="a.jsonl", limit=9)])
    assert found is not None and found.rows == 3 + 4


@pytest.mark.parametrize(
    "path", ["absent.jsonl", "gs://bucket/a.jsonl", "a.arrow", "broken.json", ".", "\0.jsonl"]
)
def test_rows_of_missing_remote_or_unreadable_data_are_not_counted(path: str, tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(ROW)
    (tmp_path / "broken.json").write_text('[{"text": "a"} {"text": "b"}]')
    assert read_local(tmp_path, [Source(path=path)]) is None


def test_rows_and_lengths_are_the_same_in_every_format(tmp_path: Path) -> None:
    """The same samples as JSON Lines, as a JSON list, as CSV, as Parquet, and compressed."""
    rows = [{"prompt": f"Why {n}?", "completion": "because\nof that " * n} for n in range(40)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    names = ("a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz")
    found = [read_local(tmp_path, [Source(path=name, limit=limit)]) for name in names for limit in (None, 7)]
    assert found[0] is not None and found[0].rows == 40 and found[1] is not None and found[1].rows == 7
    assert found == found[:2] * len(names)


def test_steps_are_rounded_up_in_each_epoch(loaded: Callable[..., Loaded], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(ROW * 17)
    padded = ("data.train=[a.jsonl]", "train.epochs=2", "data.packing=false")
    recipe = loaded(*padded).recipe
    assert recipe is not None
    length = run_length(recipe, tmp_path)
    assert (length.steps, length.bound, length.exact) == (2 * 3, 2 * 3, False)
    assert length.words() == "at most 6 steps"
    recipe = loaded(*padded, "data.eval_fraction=0.01").recipe
    assert recipe is not None and run_length(recipe, tmp_path).steps == 2 * 2  # of 16 rows


def test_packing_gives_a_range_of_steps(loaded: Callable[..., Loaded], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(ROW.replace(b"abcdefgh", b"abcdefgh" * 100) * 1000)
    recipe = loaded("data.train=[a.jsonl]", "train.epochs=1", "data.packing=true").recipe
    assert recipe is not None
    length = run_length(recipe, tmp_path)
    assert length.least is not None and length.steps is not None and length.bound is not None
    assert 0 < length.least < length.steps < length.bound == -(-1000 // recipe.train.global_batch_size)
    assert length.words() == f"about {length.least} to {length.steps} steps"
    assert length.data is not None and length.data.lengths().startswith("about 164 to 332 tokens")


def test_split_texts_fill_several_rows_each(loaded: Callable[..., Loaded], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "' + "abcdefg " * 100_000 + '"}\n')
    given = ("data.train=[a.jsonl]", "data.format=text", "data.overlong=split", "data.max_length=1000")
    for packing in ("true", "false"):
        recipe = loaded(*given, f"data.packing={packing}", "train.epochs=1").recipe
        assert recipe is not None
        length, size = run_length(recipe, tmp_path), recipe.train.global_batch_size
        # 800,000 characters are 160,000 to 320,000 tokens.
        assert length.bound is None and length.least is not None and length.steps is not None
        assert 160 / size <= length.least < 200 / size + 1 and 320 / size <= length.steps <= 420 / size


def test_a_warm_up_ratio_is_rounded_up_to_whole_steps(loaded: Callable[..., Loaded]) -> None:
    recipe = loaded("train.schedule.warmup_ratio=0.05").recipe
    assert recipe is not None and warmup_steps(recipe, 41) == 3


@pytest.mark.parametrize("path", ["../a", "/a", "~/a", "a/../../b", "..\\a", "C:\\a"])
def test_paths_outside_the_recipe_folder_are_detected(path: str) -> None:
    assert escapes(path)


@pytest.mark.parametrize("path", ["a", "a/b.jsonl", "./a", "a/../b", "a..b", "gs://bucket/../a", "a/~b"])
def test_paths_inside_the_recipe_folder_are_accepted(path: str) -> None:
    assert not escapes(path)
