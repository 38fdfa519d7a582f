"""Test the tables of keys: how a row is read, what it says about a key, and that no key is in two rows."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from recipec.port.common_keys import COMMON, say_common
from recipec.port.dialects import KNOWN, load
from recipec.port.engine import collect, record
from recipec.port.keys import REASONS, Keys, Row, table
from recipec.port.ledger import Ledger
from recipec.port.meaning import adapters, losses, training, training_arguments
from recipec.port.rules import Follow
from recipec.port.source import Sources
from recipec.spec import words
from recipec.spec.commented_recipe import Line
from recipec.spec.structure import section_at
from tests.port.dialects import codes, finding, source, values

ROWS = table("""
exact a b: they mean
    the same
lost c=null/off: nothing is lost
learned d=[1]/0: nothing is learned
setting e -> c
switch f -> lora.rslora: alpha / sqrt(rank)
integer g -> lora.rank
number h -> lora.alpha: nearly
exact below.i: within
unused j: not read
positive k -> train.optimizer.max_grad_norm
either l -> remat.policy=decoder/none
count m -> checkpoint.keep
exact m: all are kept
E1145 n=1: the tool stops at {key} => {key}: 1
exact n: the only value
sets -> lora.init=peft: as in the tool
sets -> data.shuffle_seed=null
""")

TABLES = {
    f"{name}.{title}": rows
    for name in ("axolotl_data", *KNOWN)
    for title, rows in vars(import_module(f"recipec.port.dialects.{name}")).items()
    if isinstance(rows, tuple) and rows and isinstance(rows[0], Row)
}
TABLES |= {
    f"{name}.RULES-{number}": rule.table
    for name in KNOWN
    for number, rule in enumerate(load(name).RULES)
    if isinstance(rule, Follow) and rule.table not in TABLES.values()
}
SHARED = {
    "common": COMMON,
    "adapters": adapters.FEATURES,
    "trainer": training_arguments.KEYS,
    "losses": (*losses.OF_SFT, *losses.OF_PREFERENCES),
    "losses.dpo": losses.OF_DPO,
    "training": training.OF_OPTIMIZERS,
}


def followed(folder: Path, **given: Any) -> Ledger:
    ledger = Ledger(Sources(source(folder, "config.yaml", given)))
    collect(Keys(ledger, ledger.sources.main, "Faketune", {"g": 8}).follow(ROWS, off=(False,)))
    return ledger


def test_key_table_parses_rows_defaults_and_continuation_lines() -> None:
    assert ROWS[0] == Row("exact", {"a": (), "b": ()}, "", "they mean the same")
    assert ROWS[2].keys == {"d": ([1], 0)} and ROWS[1].keys == {"c": (None, "off")}
    assert (ROWS[3].target, ROWS[3].note) == ("c", "") and ROWS[6].target == "lora.alpha"


@pytest.mark.parametrize(
    ("given", "key", "verdict", "note"),
    [
        ({"a": 1}, "a", "exact", "they mean the same"),
        ({"c": "off"}, "c", "exact", "off"),
        ({"c": False}, "c", "exact", "off"),
        ({"c": 2}, "c", "unsupported", "nothing is lost"),
        ({"d": [1]}, "d", "exact", "off"),
        ({"d": 1}, "d", "unsupported", "`d` changes what is learned: nothing is learned"),
        ({"e": 1}, "e", "exact", "it has no effect without c"),
        ({"c": True, "e": 1}, "e", "unsupported", "a setting of c, which recipec does not have"),
        ({"f": True}, "f", "exact", "alpha / sqrt(rank)"),
        ({"g": 4}, "g", "exact", ""),
        ({"h": 4}, "h", "approximated", "nearly"),
        ({"below": {"i": 1}}, "below.i", "exact", "within"),
        ({"j": 1}, "j", "unused", "not read"),
        ({"k": 0}, "k", "exact", ""),
        ({"l": True}, "l", "exact", ""),
        ({"m": 3}, "m", "exact", ""),
        ({"m": -1}, "m", "exact", "all are kept"),
        ({"n": 1}, "n", "exact", "the only value"),
        ({"n": 2}, "n", "unsupported", "the tool stops at n"),
    ],
)
def test_table_row_determines_verdict_and_note_of_its_keys(
    tmp_path: Path, given: dict[str, Any], key: str, verdict: str, note: str
) -> None:
    made = followed(tmp_path, **given)
    assert (finding(made, key).verdict.value, finding(made, key).note) == (verdict, note)
    errors = {"d": "E1180", "n": "E1145"} if verdict == "unsupported" else {}
    assert codes(made) == [(code, name) for name, code in errors.items() if name == key]


def test_table_row_sets_recipe_value_at_its_target(tmp_path: Path) -> None:
    made = followed(tmp_path, f=True, h=3)
    assert (made.value("lora.rslora"), made.value("lora.alpha"), made.value("lora.rank")) == (True, 3, 8)
    assert followed(tmp_path, f=False).value("lora.rslora", "absent") == "absent"
    more = followed(tmp_path, k=0, l=False, m=3)
    assert values(more, "train.optimizer.max_grad_norm", "remat.policy", "checkpoint.keep") == [
        None,
        "none",
        3,
    ]
    assert more.lines["lora.init"] == Line("peft", "as in the tool") and "data.shuffle_seed" in more.lines
    lines = followed(tmp_path, k=0.5, l=True, m=0).lines
    assert lines["train.optimizer.max_grad_norm"].value == 0.5 and lines["remat.policy"].value == "decoder"
    assert "checkpoint.keep" not in lines


def test_common_key_is_reported_only_if_tool_has_it_and_no_finding_exists(tmp_path: Path) -> None:
    given = {"plot_loss": True, "debug": True, "disable_tqdm": True}
    made = Ledger(Sources(source(tmp_path, "config.yaml", given)))
    keys = Keys(made, made.sources.main, "LLaMA-Factory")
    record(keys.unless("debug", (), "said"))
    collect(say_common(keys, "llamafactory"))
    assert finding(made, "plot_loss").note == REASONS["log"] and finding(made, "debug").note == "said"
    collect(say_common(Keys(made, made.sources.main, "litgpt"), "litgpt"))
    assert finding(made, "plot_loss"), "litgpt has no such key, and says nothing of it"


@pytest.mark.parametrize("rows", [*TABLES.values(), *SHARED.values()], ids=[*TABLES, *SHARED])
def test_key_tables_have_unique_keys_reasons_and_valid_targets(rows: tuple[Row, ...]) -> None:
    keys = [key for row in rows if not row.passes_on for key in row.keys]
    assert len(keys) == len(set(keys)), sorted(key for key in keys if keys.count(key) > 1)
    assert all(row.note for row in rows if row.verdict in ("lost", "learned"))
    assert all(row.target for row in rows if row.verdict == "setting")
    assert all(row.note and row.help for row in rows if row.is_error)
    for row in rows:
        if row.target and row.verdict != "setting":
            target = row.target.partition("=")[0]
            within, _, name = target.rpartition(".")
            section = section_at(tuple(filter(None, within.split("."))))
            assert section is not None and name in section.model_fields
            # What a recipe with the tool's word is told to write is where the port puts it.
            said = {words.key(key.rpartition(".")[2], within) for key in row.keys}
            assert all(word in (None, target) or target.replace(".", ": {") in word for word in said)
