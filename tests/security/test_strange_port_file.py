"""Tests of a stranger's config of another tool: its port runs nothing of it."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli.main import app
from recipec.port.meaning import conversion
from recipec.spec.commented_recipe import Line, recipe_text
from recipec.spec.load import load

BREAKING = 'x"""\n    open("CANARY", "w")\n    """'
"""A column's name that ends a docstring."""

CONVERSIONS = {
    "prompts": conversion.prompts(
        conversion.Prompt(BREAKING, BREAKING, BREAKING, BREAKING, BREAKING, BREAKING, BREAKING, BREAKING),
        "X's",
    ),
    "prompts without input": conversion.prompts(
        conversion.Prompt(BREAKING, BREAKING, BREAKING, None, BREAKING), "X's"
    ),
    "alpaca": conversion.alpaca(conversion.Alpaca(*[BREAKING] * 7), ranking=False),
    "ranked alpaca": conversion.alpaca(conversion.Alpaca(*[BREAKING] * 7), ranking=True),
    "tagged": conversion.tagged(
        conversion.Tagged(BREAKING, BREAKING, BREAKING, {BREAKING: BREAKING}, BREAKING, BREAKING, BREAKING)
    ),
}


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_column_names_stay_text_in_the_generated_transform(kind: str) -> None:
    tree = ast.parse(CONVERSIONS[kind])
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    calls = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert "open" not in calls and calls <= {"plain", "answer", "isinstance"} and "convert" in functions
    assert all(isinstance(node, ast.FunctionDef | ast.Assign | ast.Expr) for node in tree.body)


@pytest.mark.parametrize("end", ["\n", "\r", "\x85", "\u2028", "\u2029", "\r\n"])
def test_line_breaks_in_quoted_values_do_not_end_a_comment(end: str) -> None:
    """Write comments next to a line, above it, and in the recipe's head."""
    for comment in (f"a{end}name: evil", f"{'long ' * 40}{end}name: evil"):
        lines = {"recipe": Line(1), "name": Line("good", comment), "train.seed": Line(3, comment)}
        text = recipe_text(lines, [f"From a{end}name: evil"])
        found = load(Path("recipe.yaml"), text=text).raw
        assert found == {"recipe": 1, "name": "good", "train": {"seed": 3}}, text


def test_ported_recipe_names_no_code_except_its_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(
        "model_name_or_path: meta-llama/Llama-3.2-1B-Instruct\nstage: sft\nfinetuning_type: lora\n"
        "lora_rank: 8\ndataset: mine\ntemplate: llama3\ntrust_remote_code: true\n"
        'output_dir: "out\\n---\\nkind: Pod"\n'
    )
    columns = {"file_name": "a.json", "formatting": "sharegpt", "columns": {"messages": BREAKING}}
    tags = {"role_tag": BREAKING, "user_tag": BREAKING, "assistant_tag": "b"}
    Path("dataset_info.json").write_text(json.dumps({"mine": columns | {"tags": tags}}))
    ported = CliRunner().invoke(app, ["port", "config.yaml", "dataset_info.json", "-o", "recipe.yaml"])
    assert ported.exit_code == 0, ported.stderr
    text = Path("recipe.yaml").read_text()
    assert "trust_remote_code" not in text and "kind: Pod" not in text
    assert load(Path("recipe.yaml")).raw["data"]["transform"] == "convert.py:convert"
    assert "open" not in {
        n.id for n in ast.walk(ast.parse(Path("convert.py").read_text())) if isinstance(n, ast.Name)
    }
    assert not Path("CANARY").exists()
