"""Tests of how `recipe new` reads the columns of public data sets: no text vanishes without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli.main import app
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lower import lower
from recipec.compiler.new.data_source import NewData, as_turns, look
from recipec.runtime.data.columns import is_text, stands, strings, texts_of
from recipec.runtime.data.formats import PARSERS, ParsedSample
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.load import load
from tests.new.public_rows import REFUSED, ROWS, A, C, Q, T

GOLDEN = Path(__file__).parent / "golden" / "public_columns.txt"


def looked(folder: Path, *rows: dict[str, Any]) -> NewData:
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return as_turns(look(file, None))


def test_public_columns_match_the_golden_file(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    sources = {name: looked(tmp_path, row) for name, row in ROWS.items()}
    text = "".join(f"{name}: {one.format} {one.columns_read()}\n" for name, one in sources.items())
    if request.config.getoption("--update"):
        GOLDEN.write_text(text, "utf-8")
    assert text == GOLDEN.read_text("utf-8")


@pytest.mark.parametrize("name", ROWS)
def test_texts_of_public_data_sets_are_read_or_named(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    source = looked(tmp_path, row)
    parsed = PARSERS[str(source.format)]("", row, source.fields)
    samples = [parsed] if isinstance(parsed, ParsedSample) else parsed.answers()
    texts = [*texts_of([message for one in samples for message in one.messages or []])]
    texts += [(one.prompt or "") + one.completion for one in samples if one.completion]
    whole = "\n".join(texts)
    named = {*parsed.unread.parts, *parsed.unread.texts}
    for column, value in row.items():
        if column not in named and column != "tools":
            for text in filter(is_text, strings(value)):
                assert stands(text, whole) or all(stands(part, text) for part in texts), column


@pytest.mark.parametrize("name", REFUSED)
def test_columns_of_no_format_are_refused_with_a_reason(name: str, tmp_path: Path) -> None:
    row, why = REFUSED[name]
    source = looked(tmp_path, row)
    assert source.format is None and why in str(source.refused())


def test_longest_of_answer_and_solution_is_learned(tmp_path: Path) -> None:
    row = {"problem": Q, "answer": "blue", "solution": A}
    assert looked(tmp_path, row).fields["output"] == "solution"
    assert looked(tmp_path, {**row, "answer": f"{A} {C}"}).fields["output"] == "answer"


def test_nulls_of_the_first_row_do_not_hide_a_format(tmp_path: Path) -> None:
    source = looked(tmp_path, {"question": Q, "answer": None}, {"question": Q, "answer": A})
    assert (source.format, source.fields) == ("instruction", {"instruction": "question", "output": "answer"})


def test_the_commands_name_columns_that_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"id": 3, "question": Q, "cot": T, "answer": A, "hint": C}
    Path("qa.jsonl").write_text((json.dumps(row) + "\n") * 40, "utf-8")
    words = ("--model", "Qwen/Qwen3-4B", "--accelerator", "v6e-1", "--data", "qa.jsonl")
    made = CliRunner().invoke(app, ["new", "qa", *words])
    read = "reads question as instruction, cot as reasoning and answer as output"
    assert f"qa.jsonl: {read}; hint and id are not used" in made.output
    assert "warning[W0433]: text that is not used in the 40 samples of data.train: hint in 40" in made.output
    assert "fields: {instruction: question, output: answer, reasoning: cot}" in Path("qa.yaml").read_text()
    checked = CliRunner().invoke(app, ["check", "qa.yaml", "--notes"])
    assert checked.exit_code == 0 and "`id` is not used" in checked.output and "hint in 40" in checked.output


def test_check_reads_the_columns_of_a_parquet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    monkeypatch.chdir(tmp_path)
    rows = [{"question": Q, "answer": A, "meta": {"rating": 3, "note": C}}, {"question": Q, "answer": A}]
    parquet.write_table(pa.Table.from_pylist(rows), "qa.parquet")
    words = ("--model", "Qwen/Qwen3-4B", "--accelerator", "v6e-1", "--data", "qa.parquet")
    made = CliRunner().invoke(app, ["new", "qa", *words])
    assert "reads question as instruction and answer as output; meta is not used" in made.output
    checked = CliRunner().invoke(app, ["check", "qa.yaml"])
    assert "text that is not used in the 2 samples of data.train: meta in 1" in checked.output


def test_preferences_without_a_question_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text(json.dumps({"chosen": A, "rejected": C}) + "\n", "utf-8")
    words = ("--model", "Qwen/Qwen3-4B", "--accelerator", "v6e-1", "--data", "pairs.jsonl")
    made = CliRunner().invoke(app, ["new", "pairs", *words])
    assert isinstance(made.exception, ArtifactError) and "not whole conversations" in str(made.exception)


@pytest.mark.parametrize("chosen", [None, "prompt_completion"])
def test_help_for_unknown_columns_leads_to_a_recipe(
    chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"foo": "Why is the sky as blue as it is?", "bar": "Because of the light."}
    Path("odd.jsonl").write_text(f"{json.dumps(row)}\n" * 60, "utf-8")
    words = ["new", "odd", "--model", "Qwen/Qwen3-4B", "--accelerator", "v6e-8", "-o", "."]
    format = ["--format", chosen] if chosen else []
    refused = CliRunner().invoke(app, [*words, "--data", "odd.jsonl", *format])
    assert isinstance(refused.exception, ArtifactError) and refused.exception.help is not None
    line = refused.exception.help.partition("recipe: ")[2].partition("; ")[0]
    assert CliRunner().invoke(app, words).exit_code == 0
    for name in ("odd.jsonl", "foo", "bar"):
        line = line.replace("FILE" if name == "odd.jsonl" else "COLUMN", name, 1)
    text = Path("odd.yaml").read_text("utf-8")
    begin, end = text.index("data:\n"), text.index("train:\n", text.index("data:\n") + 20)
    Path("odd.yaml").write_text(f"{text[:begin]}{line}\n{text[end:]}", "utf-8")
    done = CliRunner().invoke(app, ["check", "odd.yaml"])
    assert done.exit_code == 0, done.output


def test_help_for_one_of_several_sources_leaves_the_others_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second source needs data.fields, which the first one may not have."""
    monkeypatch.chdir(tmp_path)
    rows = {
        "own.jsonl": {"instruction": "a", "output": "b"},
        "two.jsonl": {"instruction": "a", "response": "b"},
    }
    for name, row in rows.items():
        Path(name).write_text(f"{json.dumps(row)}\n" * 10, "utf-8")
    parts = {"name": "two", "train": "[{path: own.jsonl}, {path: two.jsonl}]"}
    text = RECIPE.format(**parts, fields="{output: response}")
    (found,) = (d for d in diagnosed(text) if d.severity == "error")
    assert (found.code, found.path) == ("E0435", "data.train[0].path")
    assert found.help == "data.train[0].fields: {}: the columns have the format's own names"
    text = text.replace("{path: own.jsonl}", "{path: own.jsonl, fields: {}}")
    assert not [d for d in diagnosed(text) if d.severity == "error"]
    text = text.replace("fields: {output: response}", "fields: {}")
    (found,) = (d for d in diagnosed(text) if d.severity == "error")
    assert found.help == "data.train[1].fields: {output: response}"


RECIPE = """\
recipe: 1
name: {name}
model: {{id: Qwen/Qwen3-4B}}
mesh: {{accelerator: v6e-8, axes: {{fsdp: 8, tp: 1}}}}
lora: {{rank: 8}}
data: {{train: {train}, format: instruction, fields: {fields}, max_length: 1024}}
train: {{epochs: 1, global_batch_size: 8}}
"""


def diagnosed(text: str) -> list[Diagnostic]:
    return lower(load(Path("two.yaml"), text=text)).diagnostics
