"""Tests of which rows two sources share, against the rows that `datasets` selects."""

from __future__ import annotations

import itertools

import datasets
import pytest

from recipec.compiler.lowering.splits import complement, shared
from recipec.spec.language import Source

SPLITS = (
    *("train", "test", "train+test", "train[:5%]", "train[5%:]", "train[-5%:]", "train[10%:20%]"),
    *("train[:100]", "train[100:]", "train[-100:]", "train[:-100]", "train[50:150]", "train[:0]"),
    *("train[:5%]+train[50%:60%]", "train[0%:]", "train[:100%]"),
)


def rows(split: str | None, limit: int | None, size: int) -> set[tuple[str, int]]:
    parts = datasets.ReadInstruction.from_spec(split or "train").to_absolute({"train": size, "test": size})
    chosen = [
        (part.splitname, row)
        for part in parts
        for row in range(part.from_ or 0, part.to if part.to is not None else size)
    ]
    return set(chosen[:limit])


@pytest.mark.parametrize("limits", [(None, None), (120, None), (None, 40), (120, 40)])
def test_shared_rows_of_split_expressions_agree_with_datasets(limits: tuple[int | None, int | None]) -> None:
    said = 0
    for first, second in itertools.product((None, *SPLITS), SPLITS):
        sources = [
            Source(path="hf://a/b", split=split, limit=limit)
            for split, limit in zip((first, second), limits, strict=True)
        ]
        found = shared(*sources)
        for size in (400, 1_000, 5_000):
            a, b = rows(first, limits[0], size), rows(second, limits[1], size)
            if not a or not b:
                continue
            what = f"{first} {second} {limits} {size}"
            if found is None:
                assert not a & b, what
            elif found.rows == "all":
                assert b <= a, what
            elif found.rows == "some":
                assert a & b, what
        said += found is None or found.rows != "unknown"
    assert said > 0.6 * len(SPLITS) * (len(SPLITS) + 1)  # few pairs are left open


@pytest.mark.parametrize(
    ("first", "second", "rows", "revision"),
    [
        ("hf://a/b", "hf://a/b@main", "all", False),
        ("hf://a/b", "hf://a/b@v1", "all", True),
        ("hf://a/b@v1", "hf://a/b@v1", "all", False),
        ("hf://datasets/a/b/x.jsonl", "hf://datasets/a/b@main/x.jsonl", "all", False),
        ("hf://datasets/a/b/x.jsonl", "hf://datasets/a/b/y.jsonl", None, False),
        ("./data/a.jsonl", "data/../data/a.jsonl", "all", False),
        ("gs://a/b.jsonl", "gs://a/c.jsonl", None, False),
        ("hf://a/b", "hf://a/c", None, False),
    ],
)
def test_same_data_set_is_recognized_by_its_address(
    first: str, second: str, rows: str | None, revision: bool
) -> None:
    found = shared(Source(path=first), Source(path=second))
    assert (found and found.rows, bool(found and found.revision)) == (rows, revision)


def test_limit_and_configuration_decide_which_rows_are_read() -> None:
    def read(**keys: object) -> Source:
        return Source.model_validate({"path": "hf://a/b", **keys})

    assert shared(read(limit=100), read(split="train[100:]")) is None
    assert shared(read(), read(limit=5)) is not None
    assert shared(read(config="x"), read(config="y")) is None


@pytest.mark.parametrize(
    ("split", "rest"),
    [
        ("train[:5%]", "train[5%:]"),
        ("train[-100:]", "train[:-100]"),
        ("train", None),
        ("train[1:2]", None),
        (None, None),
    ],
)
def test_complement_is_the_rest_of_a_split(split: str | None, rest: str | None) -> None:
    assert complement(split) == rest
