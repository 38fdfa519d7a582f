"""Tests of the shipped recipes: each checks, and its head and docs/recipes.md match the recorded plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lower import Lowered, lower
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.program import Program
from recipec.compiler.miniature.small_checkpoint import shrink
from recipec.compiler.plan import first_estimate
from recipec.compiler.plan.depth import parts
from recipec.compiler.plan.results import Plan
from recipec.spec.load import load
from scripts import recipes
from scripts.recipe_pages import Planned, Record, head, with_head

MODELINE = "# yaml-language-server: $schema=../docs/recipe.schema.json\n"

OWN_DATA = {"W0401"}
"""The code of recipes whose data the user must supply."""
WARNINGS = {
    "gemma4-31b-v5p8": OWN_DATA,
    "gemma4-31b-int8-v5p8": OWN_DATA,
    "gemma4-31b-128k-v5p16": OWN_DATA,
    "qwen3-8b-32k-v6e8": OWN_DATA,
    "gemma4-31b-paper": {*OWN_DATA, "W0407"},
}
"""Intended warnings of `recipe check`: the published run padded its samples."""


@pytest.fixture(scope="module")
def lowered() -> Mapping[str, Lowered]:
    return {path.stem: lower(load(path)) for path in recipes.paths()}


@pytest.fixture(scope="module")
def programs(lowered: Mapping[str, Lowered]) -> Mapping[str, Program]:
    return {name: found.program for name, found in lowered.items() if found.program is not None}


@pytest.fixture
def lowered_once(programs: Mapping[str, Program], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower every recipe once for all tests."""
    monkeypatch.setattr(recipes, "program", lambda path: programs[path.stem])


@pytest.fixture(scope="module")
def record() -> Record:
    return recipes.read()


@pytest.fixture(scope="module")
def planned(record: Record) -> Planned:
    return dataclasses.replace(record.recipes["llama31-8b-v6e8"], seconds=1.0, mfu=0.4, interval=(0.9, 1.2))


def test_shipped_recipes_have_no_errors_and_only_known_warnings(lowered: Mapping[str, Lowered]) -> None:
    for name, made in lowered.items():
        found = {each.code for each in made.diagnostics if each.severity != "note"}
        assert found == WARNINGS.get(name, set()), name
        assert made.program is not None and made.program.name == name
        assert (recipes.FOLDER / f"{name}.yaml").read_text(encoding="utf-8").startswith(MODELINE)


def test_plan_record_is_current_for_every_tpu_recipe(programs: Mapping[str, Program], record: Record) -> None:
    of_tpus = {name: program for name, program in programs.items() if program.accelerator.platform == "tpu"}
    assert set(of_tpus) == set(record.recipes)
    stale = [name for name, found in record.recipes.items() if found.key != recipes.key(of_tpus[name])]
    again = f"planned before they were changed: python -m scripts.recipes plan {' '.join(stale)}"
    assert not stale, again


def test_planned_figures_fit_memory_and_are_consistent(
    programs: Mapping[str, Program], record: Record
) -> None:
    for name, found in record.recipes.items():
        program, memory = programs[name], found.memory
        assert 0 < memory.used <= memory.available == program.accelerator.hbm_bytes_per_device, name
        assert found.micro_batches == program.accumulation_steps
        assert found.tokens % (program.recipe.train.global_batch_size * program.recipe.data.max_length) == 0
        low, high = found.interval
        assert 0 < low <= high, name
        # Experts' products are small compared with the bytes that they move.
        least = 0.01 if program.architecture.expert_layers else 0.05
        assert (found.mfu is None) == (found.seconds is None), name
        assert found.mfu is None or least < found.mfu < 0.95, name
        assert max(found.compiled_layers) <= program.architecture.num_layers


def test_first_estimates_are_near_the_plans(programs: Mapping[str, Program], record: Record) -> None:
    for name, plan in record.recipes.items():
        if plan.first is not None:
            first = first_estimate.first_parts(programs[name], parts(programs[name]), Backend.TUNIX)
            assert first is not None and plan.first.seconds == pytest.approx(plan.seconds, rel=first.error), (
                name
            )
            assert plan.first.used == pytest.approx(
                plan.memory.used, rel=first_estimate.memory_error(programs[name])
            ), name


@pytest.mark.usefixtures("lowered_once")
def test_recipe_heads_and_page_match_the_record(record: Record) -> None:
    stale = [path.name for path, text in recipes.texts(record) if path.read_text(encoding="utf-8") != text]
    assert not stale, "run: python -m scripts.recipes write"


@pytest.mark.parametrize(
    ("model", "machine", "method"),
    [
        ("google/gemma-3-12b-it", "v5e-8", "full"),
        ("Qwen/Qwen3-14B", "tpu7x-8", "qlora"),
        ("meta-llama/Llama-3.1-70B-Instruct", "v6e-8", "lora"),
    ],
)
def test_fits_table_cells_match_a_fresh_computation(
    record: Record, tmp_path: Path, model: str, machine: str, method: str
) -> None:
    found = recipes.cell(model, machine, method, tmp_path)
    assert record.fits[model][machine][method] == found
    assert (found is None) == (method == "full")  # 12 billion weights and their state exceed 8 x 16 GB


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ("remat.policy=decoder", False),
        ("cost.train_usd_per_hour=1", False),
        ("mesh={accelerator: v6e-4, axes: {fsdp: 4}}", False),
        ("train.epochs=3", True),
        ("data.train=[data/mine.jsonl]", True),
        ("name=another", True),
    ],
)
def test_plan_key_changes_only_with_settings_that_affect_the_figures(
    programs: Mapping[str, Program], change: str, same: bool
) -> None:
    path = recipes.FOLDER / "llama31-8b-v6e8.yaml"
    before = recipes.key(programs["llama31-8b-v6e8"])
    assert (recipes.key(recipes.program(path, [change])) == before) is same


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_miniature_hidden_size_is_divisible_by_its_heads(
    devices: int, programs: Mapping[str, Program]
) -> None:
    """Check the hidden size, because transformers refuses any other config of Llama's: 3 heads of 64 too."""
    for name in ("llama32-1b-full-v5e4", "llama32-3b-v6e1", "llama31-70b-v5p8"):
        config = shrink(programs[name].config, {"fsdp": devices, "tp": 1})
        assert config["hidden_size"] % math.lcm(config["num_attention_heads"], 8) == 0, name
        assert config["num_attention_heads"] % config["num_key_value_heads"] == 0


def test_recipe_head_is_inserted_once_replaced_and_removed(planned: Planned) -> None:
    text = "# modeline\n# What it is.\nrecipe: 1  # Estimates: no head\n# Estimates: not in the head\n"
    lines = head(planned)
    once = with_head(text, lines)
    assert once.startswith("# modeline\n# What it is.\n#\n# Estimates: ") and once.endswith(text[25:])
    assert with_head(once, lines) == once
    other = head(dataclasses.replace(planned, seconds=3 * planned.seconds))
    assert other != lines and with_head(once, other) == with_head(text, other)
    assert with_head(once, []) == text
    assert all(len(line) <= 110 for line in lines)
    assert "\n".join(lines) in once and not any(line in text for line in lines)


def test_write_command_rewrites_only_stale_files(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    text = (recipes.FOLDER / "llama31-8b-v6e8.yaml").read_text(encoding="utf-8")
    (folder / "llama31-8b-v6e8.yaml").write_text(with_head(text, []), encoding="utf-8")
    places = {"FOLDER": folder, "PAGE": tmp_path / "recipes.md", "CARDS": tmp_path / "verified.json"}
    for name, value in {"ROOT": tmp_path, "REHEARSED": folder / "rehearsed.json", **places}.items():
        monkeypatch.setattr(recipes, name, value)
    kept = Record({"llama31-8b-v6e8": record.recipes["llama31-8b-v6e8"]}, record.fits)
    monkeypatch.setattr(recipes, "read", lambda: kept)
    assert recipes.main(["write"]) == 0
    assert (folder / "llama31-8b-v6e8.yaml").read_text(encoding="utf-8") == text
    assert capsys.readouterr().out == (
        "recipes/llama31-8b-v6e8.yaml: written\nverified.json: written\nrecipes.md: written\n"
    )
    assert recipes.main(["write"]) == 0 and capsys.readouterr().out == ""

    (folder / "llama31-8b-v6e8.yaml").write_text("recipe: 1\nname: x\n", encoding="utf-8")
    assert recipes.main(["write"]) == 1
    assert "error: " in capsys.readouterr().err


@pytest.mark.usefixtures("lowered_once")
def test_plan_command_compiles_only_changed_or_named_recipes(
    programs: Mapping[str, Program],
    planned: Planned,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(recipes, "RECORD", tmp_path / "estimates.json")
    current = Record(
        {
            name: dataclasses.replace(planned, key=recipes.key(program))
            for name, program in sorted(programs.items())
            if program.accelerator.platform == "tpu"
        },
        {},
    )
    recipes._keep(Record({**current.recipes, "gone": planned}, {}))

    def compiles(of: Program, **_: object) -> Plan:
        raise ArtifactError(f"{of.name} would be compiled", "do not")

    monkeypatch.setattr(recipes, "plan", compiles)
    assert recipes.main(["plan"]) == 0
    assert recipes.read() == current  # nothing compiled, and removed recipes left out

    old = dataclasses.replace(planned, key="another")
    recipes._keep(Record({**current.recipes, "qwen3-32b-v6e8": old}, {}))
    assert recipes.main(["plan", "llama31-8b-v6e8"]) == 1  # a named recipe is planned, changed or not
    assert "llama31-8b-v6e8 would be compiled" in capsys.readouterr().err
    assert recipes.main(["plan"]) == 1
    assert "qwen3-32b-v6e8 would be compiled" in capsys.readouterr().err
    assert recipes.main(["plan", "no-such"]) == 1
    assert "there is no recipe no-such" in capsys.readouterr().err
