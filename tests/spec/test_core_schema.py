"""Tests of values in YAML 1.2's core schema."""

from __future__ import annotations

import math

import pytest

from recipec.spec.core_schema import flow, scalar


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.0e-4", 1e-4),
        ("-.5", -0.5),
        ("64", 64),
        ("007", 7),
        ("0x1F", 31),
        ("0o17", 15),
        ("", None),
        ("~", None),
        ("true", True),
        (".inf", math.inf),
        ("-.Inf", -math.inf),
        # Text in YAML 1.2, although YAML 1.1 read these as other types.
        ("yes", "yes"),
        ("1_000", "1_000"),
        ("inf", "inf"),
        (".", "."),
        ("2026-11-21", "2026-11-21"),
        ("9" * 400, "9" * 400),
    ],
)
def test_scalars_follow_the_yaml_1_2_core_schema(text: str, value: object) -> None:
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


def test_dot_nan_is_read_as_nan() -> None:
    assert math.isnan(scalar(".nan"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"fsdp": 4, "tp": 1}, "{fsdp: 4, tp: 1}"),
        (["a.jsonl", "1", "true", "", "a: b", "-x", "x:"], '[a.jsonl, "1", "true", "", "a: b", "-x", "x:"]'),
        ([1e-4, 1e-8, 64.0, None, True, math.inf], "[0.0001, 1e-08, 64.0, null, true, .inf]"),
        (
            ["a b", "\x1b[31m", "a\rb", "\x9b", "\u2028"],
            '[a b, "\\u001b[31m", "a\\rb", "\\u009b", "\\u2028"]',
        ),
        ("gs://bucket/run", "gs://bucket/run"),
        ("a, b", '"a, b"'),
    ],
)
def test_flow_text_reads_back_as_the_same_value(value: object, text: str) -> None:
    from recipec.spec.tree import plain
    from recipec.spec.yaml_document import read

    assert flow(value) == text
    root = read(text, "x").root
    assert root is not None and plain(root) == value
