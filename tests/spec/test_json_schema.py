"""Tests of the language's JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from recipec.spec.schema import json_schema, modeline, text
from recipec.spec.tree import plain
from recipec.spec.yaml_document import read


@pytest.fixture(scope="module")
def validator() -> Any:
    return jsonschema.Draft202012Validator(json_schema())


def recipe(path: Path) -> Any:
    root = read(path.read_text(encoding="utf-8"), path.name).root
    assert root is not None
    return plain(root)


def test_committed_recipe_schema_json_is_current(root: Path) -> None:
    committed = (root / "docs" / "recipe.schema.json").read_text(encoding="utf-8")
    assert committed == text(), "run: python -m recipec.spec.schema > docs/recipe.schema.json"


def test_generated_schema_is_a_valid_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    assert json.loads(text()) == json_schema()


def test_example_recipes_satisfy_the_schema(root: Path, validator: Any) -> None:
    paths = sorted((root / "recipes").glob("*.yaml"))
    assert paths
    for path in paths:
        assert [error.message for error in validator.iter_errors(recipe(path))] == [], path.name


@pytest.mark.parametrize(
    "case",
    ["schema-unknown-key", "schema-key-of-another-section", "schema-unknown-section", "schema-unknown-axis",
     "schema-missing-keys", "schema-only-a-name", "schema-number-in-quotes", "schema-truth-values",
     "schema-text-for-structure", "schema-not-a-choice", "schema-null-as-text", "schema-out-of-range",
     "schema-malformed-text", "schema-layers-of-other-kinds", "schema-language-version", "schema-empty"],
)  # fmt: skip
def test_schema_refuses_the_invalid_golden_recipes(root: Path, validator: Any, case: str) -> None:
    assert not validator.is_valid(recipe(root / "tests" / "golden" / case / "recipe.yaml"))


def test_a_recipe_that_extends_another_may_leave_keys_out(validator: Any) -> None:
    assert validator.is_valid({"extends": "base.yaml", "mesh": {"accelerator": "v6e-8"}})
    assert not validator.is_valid({"mesh": {"accelerator": "v6e-8"}})
    assert not validator.is_valid({"extends": "base.yaml", "mesh": {"acelerator": "v6e-8"}})


def fields(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return every key of the language with its schema, by section and name."""
    kinds = [("", schema)]
    for name, kind in schema["$defs"].items():
        kinds += [(name, branch) for branch in (kind, *kind.get("anyOf", []))]
    found = {f"{kind}.{name}": field for kind, s in kinds for name, field in s.get("properties", {}).items()}
    axes = {f"Axes.{name}": field for name, field in found["Mesh.axes"]["properties"].items()}
    return found | axes


def test_every_key_has_a_description_and_examples_that_are_valid() -> None:
    schema = json_schema()
    for name, field in fields(schema).items():
        assert "Default: " in field["description"] or "Required." in field["description"], name
        assert field["examples"], name
        at_its_place = jsonschema.Draft202012Validator({"$defs": schema["$defs"], **field})
        for example in field["examples"]:
            assert [error.message for error in at_its_place.iter_errors(example)] == [], name


def test_every_enum_value_has_a_description() -> None:
    def described(node: Any, name: str) -> None:
        for key, below in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(below, dict | list) and key != "examples":
                described(below, f"{name}.{key}")
        if "enum" in node:
            meanings = node["enumDescriptions"]
            assert len(meanings) == len(node["enum"]) and all(meanings), name

    described(json_schema(), "")
    assert "x-choices" not in text()


def test_a_modeline_names_the_schema() -> None:
    assert modeline("../recipe.schema.json") == "# yaml-language-server: $schema=../recipe.schema.json"
