"""Test how files are read: values as by PyYAML and json with their places, and maps of texts as values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipec.compiler.lowering.hardware import from_name
from recipec.port.keys import Keys, tools
from recipec.port.ledger import Ledger, Verdict
from recipec.port.port import Asked, port
from recipec.port.read import read
from recipec.port.settle import NAMES, older_beside, renamed
from recipec.port.source import MISSING, Source, Sources
from recipec.port.typed import typed
from tests.port import dialects

YAML = """\
# what YAML 1.1 makes of words and numbers
switches: [yes, No, on, OFF, true, y]
numbers: [010, 0x1F, 1_000, 1:30, 2e-4, 2.0e-4, .5, -3]
texts: ['yes', "no", 1e-4x, 3.0.1, null-ish]
nothing:
tilde: ~
base: &base {rank: 8, alpha: 16}
other: &other
  alpha: 16
  dropout: 0.1
merged:
  <<: [*base, *other]
  alpha: 32
copy: *base
many:
  - path: a.jsonl
    type: alpaca
  - *base
folded: >
  two lines
  of text
literal: |
  {% for m in messages %}
"a.b[0]": {c: 1}
on: 1
7: seven
"""


def source(folder: Path, text: str, name: str = "config.yaml") -> Source:
    (folder / name).write_text(text, encoding="utf-8")
    made, found = read(folder / name)
    assert made is not None, found
    return made


def code(folder: Path, content: str | bytes, name: str = "config.yaml") -> str:
    """Return the code of a file's error."""
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    made, found = read(folder / name)
    assert made is None
    return found[-1].code


def texts(data: Any) -> Any:
    """Return PyYAML's values with the two differences that port.read names."""
    if isinstance(data, dict):
        names = {True: "on", 7: "7"}
        return {names.get(key, key): texts(value) for key, value in data.items()}
    if isinstance(data, list):
        return [texts(item) for item in data]
    return 2e-4 if data == "2e-4" else data


def test_yaml_values_match_pyyaml(tmp_path: Path) -> None:
    assert source(tmp_path, YAML).data == texts(yaml.safe_load(YAML))


def test_yaml_keys_and_values_have_line_and_column(tmp_path: Path) -> None:
    made = source(tmp_path, YAML)
    lines = YAML.splitlines()
    for key in made.leaves():
        if key != "nothing":
            place = made.spans[key]
            assert lines[place.line - 1] == place.text and place.length > 0, key
    assert (made.spans["merged.alpha"].line, made.spans["merged.alpha"].column) == (13, 10)
    assert made.spans["merged.dropout"].line == 10, "the anchor's, where the value stands"
    assert made.spans["many[0].type"].text[made.spans["many[0].type"].column - 1 :] == "alpaca"
    assert made.span("nothing") == made.keys["nothing"]
    assert made.get("a.b[0].c") == 1 and made.get("many[1].rank") == 8 and made.get("many[2]") is MISSING


@pytest.mark.parametrize("name", ["config.yaml", "config.json"])
def test_numbers_too_large_for_float_become_text_and_are_refused(name: str, tmp_path: Path) -> None:
    large = "1" + "0" * 400
    made = source(tmp_path, f'{{"rank": {large}, "rate": {10**300}, "list": [-{large}]}}', name)
    assert made.data == {"rank": large, "rate": 10**300, "list": [f"-{large}"]}
    ledger = Ledger(Sources(made))
    keys = Keys(ledger, made, "Faketune", {"rank": 8})
    assert (keys.integer("rank"), keys.number("rate")) == (8, None)
    assert [d.code for d in ledger.diagnostics] == ["E1160", "E1160"]
    assert "must be a number below 1e30 in Faketune, not `1000" in ledger.diagnostics[0].message


def test_json_values_match_json_module_and_have_positions(tmp_path: Path) -> None:
    text = '{"a": [1, -2.5e3, true, null, "\\u00e9\\ud83d\\ude00/"],\n\t"b": {"c": {}, "d": []},\n "e": "x"}'
    made = source(tmp_path, text, "config.json")
    assert made.data == json.loads(text)
    assert made.leaves() == ["a", "b.c", "b.d", "e"]
    assert (made.spans["e"].line, made.spans["e"].column, made.spans["e"].length) == (3, 7, 3)
    assert made.keys["b.d"].line == 2


def test_duplicate_key_is_warned_about_and_last_value_is_used(tmp_path: Path) -> None:
    for name, text in (
        ("a.yaml", "a: {x: 1}\nb: 2\na: 3\n"),
        ("a.json", '{"a": {"x": 1},\n"b": 2,\n"a": 3}'),
    ):
        (tmp_path / name).write_text(text)
        made, found = read(tmp_path / name)
        assert made is not None and made.data == {"a": 3, "b": 2} and "a.x" not in made.spans
        assert [(d.code, d.span.line) for d in found if d.span] == [("W1115", 3)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# nothing but this\n", "E0005"),
        ("a: [1, 2\nb: 3\n", "E0006"),
        ("a: *nowhere\n", "E0006"),
        ("a: 2024-13\nb: !!int x\n", "E0006"),
        ("\ta: 1\n", "E0007"),
        ("? [a, b]\n: 1\n", "E0014"),
        ("[" * 60 + "]" * 60, "E0015"),
        ("[" * 9000, "E0015"),
        ("a: \x01\n", "E0016"),
        ("a: &a {<<: *a}\n", "E0015"),
    ],
)
def test_unreadable_yaml_gives_expected_error_code(text: str, expected: str, tmp_path: Path) -> None:
    assert code(tmp_path, text) == expected


def test_exponential_yaml_aliases_are_refused(tmp_path: Path) -> None:
    lists = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lists += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert code(tmp_path, "\n".join(lists)) == "E1109"
    maps = ["a0: &a0 {x: 1}"]
    maps += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 9)]
    assert code(tmp_path, "\n".join(maps)) == "E1109"


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("", 1, 1),
        ('{"a": 1,}', 1, 9),
        ('{"a": 1} x', 1, 10),
        ('{"a": [1, 2', 1, 7),
        ('{\n  // no\n  "a": 1}', 2, 3),
        ('{"a" 1}', 1, 6),
        ('{"a": tru}', 1, 7),
        ('{"a": "\\q"}', 1, 8),
        ('{"a": "x', 1, 7),
        ('{"a": ' + "9" * 5000 + "}", 1, 7),
    ],
)
def test_unreadable_json_gives_error_at_its_position(
    text: str, line: int, column: int, tmp_path: Path
) -> None:
    with pytest.raises(ValueError):
        json.loads(text)
    (tmp_path / "config.json").write_text(text)
    made, found = read(tmp_path / "config.json")
    assert made is None and found[0].span is not None
    assert (found[0].code, found[0].span.line, found[0].span.column) == (
        "E1105" if text else "E0005",
        line,
        column,
    )


def test_binary_oversized_or_missing_file_is_refused(tmp_path: Path) -> None:
    assert code(tmp_path, b"\x80\x03model\n") == "E0004"
    assert code(tmp_path, "a: 1".encode("utf-16")) == "E0004"
    assert code(tmp_path, b"#" * (10 << 20)) == "E0003"
    assert code(tmp_path, b"\xef\xbb\xbf{}", "config.json") == "E0018"
    assert read(tmp_path / "missing.yaml")[1][0].code == "E0001"
    assert read(tmp_path)[1][0].code == "E0002"


def test_yaml_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    made = source(tmp_path, "\ufeffa: 1\n")
    assert made.data == {"a": 1} and made.keys["a"].column == 1


def test_token_like_value_is_hidden_in_source_line(tmp_path: Path) -> None:
    made = source(tmp_path, "hub_token: hf_abcdefghijklmnopqrstuvwxyz\n")
    assert "abcdef" not in made.spans["hub_token"].text


@pytest.mark.parametrize(
    ("text", "verdicts", "codes"),
    [
        ("max_seq_length: 512\nmax_length: 64\n", [Verdict.UNSUPPORTED], ["W1194"]),
        ("max_seq_length: 64\nmax_length: 64\n", [Verdict.EXACT], []),
        ("max_seq_length:\nmax_length: 64\n", [Verdict.EXACT], []),
        ("use_flash_attention_2: true\nattn_implementation: sdpa\n", [Verdict.UNSUPPORTED], ["W1194"]),
        ("use_flash_attention_2: false\nattn_implementation: sdpa\n", [Verdict.EXACT], []),
        ("adafactor: false\noptim: adamw_torch\n", [], []),
        ("use_liger: true\nuse_liger_loss: false\n", [Verdict.UNSUPPORTED], ["W1194"]),
    ],
)
def test_old_and_new_key_name_with_different_values_gives_warning(
    text: str, verdicts: list[Verdict], codes: list[str], tmp_path: Path
) -> None:
    ledger = Ledger(Sources(renamed(source(tmp_path, text), "trl")))
    assert [found.code for found in older_beside(ledger, "trl")] == codes
    assert [found.verdict for found in ledger.findings] == verdicts


def test_old_key_names_are_read_under_their_new_names(tmp_path: Path) -> None:
    text = "max_seq_length: 512\nuse_flash_attention_2: true\nper_gpu_train_batch_size: 4\nother: 1\n"
    made = renamed(source(tmp_path, text), "trl")
    assert made.data == {
        "max_length": 512,
        "attn_implementation": "flash_attention_2",
        "per_device_train_batch_size": 4,
        "other": 1,
    }
    assert made.older["max_length"] == "max_seq_length" and made.spans["max_length"].line == 1
    both = source(tmp_path, "max_seq_length: 512\nmax_length: 64\n")
    assert renamed(both, "trl") == both, "the newer name holds, and the older one is told of"
    off = source(tmp_path, "adafactor: false\nuse_flash_attention_2: 3\n")
    assert renamed(off, "trl") == off, "a switch that is off, or is none, has no newer name"
    assert renamed(source(tmp_path, "adafactor: true\n"), "trainer").data == {"optim": "adafactor"}
    for dialect, names in NAMES.items():
        tables = tools()[dialect]["sections"].values()
        assert set(names.values()) <= {key for table in tables for key in table}, dialect


def test_deeply_nested_json_is_refused(tmp_path: Path) -> None:
    assert code(tmp_path, '{"a":' * 5000, "config.json") == "E0015"


GIVEN = {"learning_rate": "3e-4", "bf16": "True", "max_steps": "12", "model_name_or_path": "Qwen/Qwen3-8B"}
READ = {"learning_rate": 3e-4, "bf16": True, "max_steps": 12, "model_name_or_path": "Qwen/Qwen3-8B"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (GIVEN, READ),
        ({key: json.dumps(value) for key, value in GIVEN.items()}, READ),
        ({"HyperParameters": GIVEN, "RoleArn": "r"}, {"RoleArn": "r", **READ}),
        (
            {"lr_scheduler_kwargs": '{"min_lr_rate": 0.1}', "bf16": "no"},
            {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "bf16": False},
        ),
        ({"bf16": "maybe", "max_steps": "many"}, {"bf16": "maybe", "max_steps": "many"}),
        ({**GIVEN, "seed": 3}, {**GIVEN, "seed": 3}),
        ({"path": "3", "seed": "3"}, {"path": "3", "seed": "3"}),
    ],
)
def test_text_hyperparameters_are_parsed_by_argument_type(
    given: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    made = typed(dialects.source(tmp_path, "hyperparameters.json", given))
    assert made.data == expected
    assert made.span("bf16") is None or made.span("bf16").line > 0  # type: ignore[union-attr]


def test_sagemaker_job_file_is_ported_with_key_positions(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    given = {
        **GIVEN,
        "dataset_name": "a/b",
        "use_peft": "true",
        "max_length": "512",
        "sagemaker_program": "sft.py",
    }
    file.write_text(json.dumps({"HyperParameters": given}, indent=1), encoding="utf-8")
    made = port([file], Asked(from_name("v5p-8"), None, place=tmp_path / "recipe.yaml", script="sft"))
    assert made.whole and made.title == "TRL"
    rows = {row.key: row for row in made.rows}
    assert (rows["learning_rate"].line, rows["sagemaker_program"].verdict.value) == (3, "exact")
    assert "learning_rate: 0.0003" in made.text and "steps: 12" in made.text
