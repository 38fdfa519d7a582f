"""Test what keys become, by tables: keys/DIALECT.yaml has a run, its other files, and the effects of changes.

A case has, each where it matters:
    given       keys of the run in place of its own; (gone) takes one away
    beside      likewise of the files next to it
    row         of the data, in rows.jsonl
    script      of TRL's
    sets        values of the recipe, (gone) for none
    whole       the whole recipe, where every key is spoken of once and there are no diagnostics
    says        verdicts by key
    codes       all diagnostics, by code and key
    refused     the error that is one of them, and has a help
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from recipec.port.ledger import Verdict
from tests.port.dialects import KEYS, codes, finding, ported, spoken, table

TABLES = {path.stem: table(path.stem) for path in KEYS.iterdir()}


STATED = (
    *("train.optimizer.learning_rate", "train.optimizer.weight_decay", "train.optimizer.max_grad_norm"),
    *("train.schedule.name", "train.global_batch_size", "train.micro_batch_size", "data.max_length"),
)
"""Numbers of a run that a port writes out, because a tool's default is not the language's."""
OF_LORA = ("lora.rank", "lora.alpha", "lora.dropout")
WARMUP = {"train.schedule.warmup_steps", "train.schedule.warmup_ratio"}


def unstated(dialect: str, made: Any) -> list[str]:
    """Return the numbers for which a port without errors leaves the recipe to the language's defaults."""
    if any(diagnostic.severity == "error" for diagnostic in made.diagnostics):
        return []
    paths = [*STATED, *(OF_LORA if made.value("lora", "") is not None else ())]
    out = [path for path in paths if path not in made.lines]
    if made.value("train.schedule.name") != "constant" and not WARMUP & {*made.lines}:
        out.append("train.schedule.warmup_steps")
    return [path for path in out if (dialect, path) != ("maxtext", "lora.dropout")]  # Qwix has none either


def changed(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**base, **given}.items() if value != "(gone)"}


@pytest.mark.parametrize(
    ("dialect", "case"),
    [
        pytest.param(dialect, case, id=f"{dialect}-{title.replace(' ', '-')}-{number}")
        for dialect, table in TABLES.items()
        for title, cases in table["cases"].items()
        for number, case in enumerate(cases)
    ],
)
def test_key_table_case_gives_expected_values_and_diagnostics(
    tmp_path: Path, dialect: str, case: dict[str, Any]
) -> None:
    table = TABLES[dialect]
    given = changed(table["base"], case.get("given", {}))
    beside = {**{role: {} for role in case.get("beside", {})}, **table.get("beside", {})}
    beside = {role: changed(keys, case.get("beside", {}).get(role, {})) for role, keys in beside.items()}
    if row := case.get("row", table.get("row")):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    script = case.get("script", "sft") if dialect == "trl" else None
    made = ported(dialect, tmp_path, given, script=script, **beside)
    assert {path: made.value(path, "(gone)") for path in case.get("sets", {})} == case.get("sets", {})
    assert unstated(dialect, made) == []
    if "whole" in case:
        spoken(made)
        assert ({path: line.value for path, line in made.lines.items()}, codes(made)) == (case["whole"], [])
    for key, verdict in case.get("says", {}).items():
        found = finding(made, key)
        assert found.verdict.value == verdict, key
        assert found.note or found.verdict not in (Verdict.APPROXIMATED, Verdict.UNSUPPORTED), key
    if "codes" in case:
        assert codes(made) == [tuple(each) for each in case["codes"]]
    if "refused" in case:
        assert tuple(case["refused"]) in codes(made)
        assert all(diagnostic.help for diagnostic in made.diagnostics)
