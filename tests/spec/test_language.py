"""Tests of the models: their defaults, their strictness, and each key's description."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from pydantic.fields import FieldInfo

from recipec.spec.language import Recipe, Section
from recipec.spec.schema import json_schema
from recipec.spec.structure import choices_of, section_of
from recipec.spec.validate import validate

SCHEMA = jsonschema.Draft202012Validator(json_schema())
SMALLEST: dict[str, Any] = {
    "recipe": 1,
    "name": "example",
    "model": {"id": "google/gemma-4-31B-it"},
    "mesh": {"accelerator": "v5p-8", "axes": {"fsdp": 4}},
    "data": {"train": ["a.jsonl"]},
}


def smallest(**changes: Any) -> dict[str, Any]:
    return {**SMALLEST, **changes}


def fields(kind: type[Section] = Recipe, where: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in kind.model_fields.items():
        path = f"{where}.{name}" if where else name
        yield path, info
        inner = section_of(info.annotation)[0]
        if inner is not None:
            yield from fields(inner, path)


def leaves(annotation: Any) -> set[Any]:
    """Return the plain types within an annotation."""
    if typing.get_origin(annotation) in (None, typing.Literal):
        return {annotation}
    return {leaf for inner in typing.get_args(annotation) for leaf in leaves(inner)}


def test_smallest_recipe_gets_the_default_values() -> None:
    recipe = Recipe.model_validate(SMALLEST)
    assert recipe.lora is None and recipe.serve is None and recipe.extends is None
    assert recipe.mesh.axes == {"fsdp": 4, "tp": 1} and list(recipe.mesh.axes) == ["fsdp", "tp"]
    assert recipe.data.train[0].path == "a.jsonl" and recipe.data.train[0].weight == 1.0
    assert (recipe.train.epochs, recipe.train.steps) == (1, None)
    assert (recipe.model.attention, recipe.remat.policy, recipe.data.max_length) == ("auto", "auto", 4096)
    optimizer = recipe.train.optimizer
    assert (optimizer.weight_decay, optimizer.max_grad_norm) == (0.0, 1.0)
    assert optimizer.learning_rate == 1e-5
    assert recipe.benchmark.request_rates == [1, 4, 16, "inf"]
    assert recipe.launch.kind == ["tpu-vm", "gke", "skypilot", "xpk"]


@pytest.mark.parametrize(
    ("schedule", "ratio"),
    [
        ({}, 0.03),
        ({"name": "linear"}, 0.03),
        ({"name": "constant"}, None),
        ({"warmup_steps": 10}, None),
        ({"warmup_steps": 0}, None),
        ({"warmup_steps": None}, 0.03),
        ({"warmup_ratio": 0.1}, 0.1),
        ({"warmup_ratio": None}, None),
    ],
)
def test_warmup_ratio_has_a_default_without_other_warmups(
    schedule: dict[str, Any], ratio: float | None
) -> None:
    recipe = Recipe.model_validate(smallest(train={"schedule": schedule}))
    assert recipe.train.schedule.warmup_ratio == ratio


def test_alpha_follows_rank_and_steps_replace_epochs() -> None:
    recipe = Recipe.model_validate(smallest(lora={"rank": 8}, train={"steps": 5}))
    assert recipe.lora is not None and recipe.lora.alpha == 16.0
    assert (recipe.train.epochs, recipe.train.steps) == (None, 5)
    lora = Recipe.model_validate(smallest(lora={})).lora
    assert lora is not None and (lora.rank, lora.alpha, lora.dropout) == (16, 32.0, 0.0)


def test_recipe_reads_back_unchanged_from_its_dump() -> None:
    recipe = Recipe.model_validate(smallest(lora={"layers": [1, 2]}, serve={}))
    assert Recipe.model_validate(recipe.model_dump()) == recipe
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe


def test_every_key_has_meaning_unit_default_and_a_description_of_each_choice() -> None:
    for path, info in fields():
        text = info.description or ""
        assert "Default: " in text or text.endswith("Required."), path
        if path != "recipe" and {int, float} & leaves(info.annotation):
            assert "Unit: " in text, path
        words = [word for word in choices_of(info.annotation)[0] if word != "inf"]
        extra: Any = info.json_schema_extra or {}
        assert list(extra.get("x-choices", {})) == words, path


@pytest.mark.parametrize("layers", ["all", "0-5", [0, 5]])
def test_lora_layers_accept_all_a_range_or_a_list(layers: Any) -> None:
    recipe = Recipe.model_validate(smallest(lora={"layers": layers}))
    assert recipe.lora is not None and recipe.lora.layers == layers


@pytest.mark.parametrize("layers", ["", "5-", "a-b", "1-2-3", 5, [], [1.0], [-1], [True], None])
def test_invalid_lora_layers_are_refused(layers: Any) -> None:
    assert validate(smallest(lora={"layers": layers})).recipe is None


@pytest.mark.parametrize("rate", ["inf", float("inf"), 1, 0.5])
def test_request_rates_are_numbers_or_inf(rate: Any) -> None:
    recipe = Recipe.model_validate(smallest(benchmark={"request_rates": [rate]}))
    assert recipe.benchmark.request_rates == ["inf" if rate in ("inf", float("inf")) else rate]


@pytest.mark.parametrize("rate", [0, "1", "Inf", float("nan"), True, None])
def test_invalid_request_rates_are_refused(rate: Any) -> None:
    assert validate(smallest(benchmark={"request_rates": [rate]})).recipe is None


@pytest.mark.parametrize("name", ["a", "gemma4-31b-codev", "a" * 63])
def test_valid_recipe_names_are_accepted(name: str) -> None:
    assert validate(smallest(name=name)).recipe is not None


@pytest.mark.parametrize("name", ["", "A", "1a", "a-", "a_b", "ü", "a/b", "..", "a" * 64, "a\n", "runtime"])
def test_invalid_recipe_names_are_refused(name: str) -> None:
    found = validate(smallest(name=name))
    assert found.recipe is None and [d.path for d in found.diagnostics] == ["name"]


@pytest.mark.parametrize("value", ["1", 1.0, True, None, [1], {"a": 1}])
def test_integer_key_refuses_values_of_other_types(value: Any) -> None:
    found = validate(smallest(train={"seed": value})).diagnostics
    assert [(d.code, d.path) for d in found] == [("E0103", "train.seed")]


@pytest.mark.parametrize("path", [path for path, _ in fields() if "." not in path and path != "recipe"])
@pytest.mark.parametrize("value", ["text", [{}], {"no_such_key": 1}])
def test_value_in_place_of_a_section_gives_no_pydantic_message(path: str, value: Any) -> None:
    found = validate(smallest(**{path: value}))
    assert found.recipe is not None or found.diagnostics
    for diagnostic in found.diagnostics:
        assert diagnostic.code.startswith("E01")
        assert "Input should" not in diagnostic.message and "Extra inputs" not in diagnostic.message


BESIDE: dict[str, Any] = {
    "train.distill": {"teacher": {"id": "Qwen/Qwen3-14B"}},
    "train.distill.teacher": {"id": "Qwen/Qwen3-14B"},
    "train.early_stopping": {"patience": 3},
    "train.generations": {"prompts": "prompts.jsonl"},
    "sharding.rules": [{"match": "a", "spec": ["tp"]}],
    "data.train": [{"path": "a.jsonl"}],
    "data.eval": [{"path": "b.jsonl"}],
    "cost.baseline": {"name": "a", "train_hours": 1.0, "train_usd_per_hour": 1.0, "serve_usd_per_hour": 1.0},
    "rewards": [{}],
    **{f"rewards.{kind}": {"column": "answer"} for kind in ("exact_match", "numeric_match", "code_tests")},
    "rewards.length": {"maximum": 256},
}
"""Other keys that sections and lists need next to the key of an example."""
CLASHES = {"mesh.topology": "accelerator"}
"""Keys that cannot be given together with a key."""
NEEDS = {"rewards.weight": {"function": "rewards.py:correct"}}
"""Other keys that an item needs next to a key."""


def placed(path: str, value: Any) -> dict[str, Any]:
    """Return a small recipe with a value at a path."""
    given: dict[str, Any] = json.loads(json.dumps(SMALLEST))
    *above, last = path.split(".")
    node: Any = given
    for depth, name in enumerate(above, 1):
        where = ".".join(above[:depth])
        if where in BESIDE:
            node[name] = json.loads(json.dumps(BESIDE[where]))
        node = node.setdefault(name, {})
        node = node[0] if isinstance(node, list) else node
    node[last] = value
    node |= NEEDS.get(path, {})
    node.pop(CLASHES.get(path), None)
    return given


def test_examples_of_every_key_are_valid_in_a_recipe() -> None:
    for path, info in fields():
        assert info.examples, path
        for example in info.examples:
            given = placed(path, example)
            assert validate(given).diagnostics == [], path
            assert [error.message for error in SCHEMA.iter_errors(given)] == [], path


@pytest.mark.parametrize(
    ("lora", "train", "rate"),
    [
        (None, {}, 1e-5),
        ({"rank": 16}, {}, 1e-4),
        ({"rank": 16}, {"objective": "dpo"}, 5e-6),
        (None, {"objective": "kto"}, 1e-6),
        (None, {"optimizer": {"name": "muon"}}, 1e-5),
        (None, {"optimizer": {"learning_rate": 1e-4}}, 1e-4),
    ],
)
def test_the_learning_rate_defaults_to_the_methods(
    lora: object, train: dict[str, object], rate: float
) -> None:
    recipe = Recipe.model_validate(
        {**SMALLEST, "lora": lora, "train": {**SMALLEST.get("train", {}), **train}}
    )
    optimizer = recipe.train.optimizer
    assert optimizer.learning_rate == rate
    assert ("learning_rate" in optimizer.model_fields_set) == (rate == 1e-4 and lora is None)
