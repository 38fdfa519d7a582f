"""Tests of a recipe's card: the facts from the repository's records, or "not yet" without any."""

from __future__ import annotations

import json
import re

from typer.testing import CliRunner

from recipec.compiler import card
from recipec.compiler.cli.main import app
from recipec.compiler.emitters.readme import emit_readme
from recipec.compiler.lowering.program import Program
from scripts import recipes
from scripts.recipe_pages import verified
from tests.emit.emitting import compiled

RECIPE = recipes.FOLDER / "qwen3-32b-v6e8.yaml"


def program(*sets: str) -> Program:
    return compiled(RECIPE, sets)


def test_card_shows_the_recorded_plan_and_numerics() -> None:
    found = card.card(program())
    planned = json.loads(recipes.RECORD.read_text())["recipes"][RECIPE.stem]
    used = sum(size for part, size in planned["memory"].items() if part != "available") / 2**30
    assert found["compiled"].figures.startswith(f"{used:.1f} of 31.25 GiB on each device, ")
    assert found["compiled"].date == planned["date"]
    assert found["compiled"].versions == {name: planned["versions"][name] for name in ("libtpu", "jax")}
    proofs = json.loads(recipes.PROOFS.read_text())["proofs"]
    of_family = [one for case, one in proofs.items() if case == "qwen3" or case.startswith("qwen3-")]
    worst = max(float(one["logits"]) for one in of_family if "logits" in one)
    assert f"logits within {worst:.0e}" in found["numerics"].figures
    assert found["probed"] == found["served"] == card.Result()


def test_card_finds_a_record_by_compiled_step_and_not_by_name() -> None:
    """Match a record by the compiled step: another rank has no record, and another name has one."""
    assert card.card(program("lora.rank=8"))["compiled"] == card.Result()
    assert card.card(program("name=mine", "launch.zone=us-east5-a")) == card.card(program())


def test_recorded_rehearsal_counts_only_for_an_unchanged_recipe() -> None:
    figures = {
        "train": "4 steps, loss 12.38 to 5.15, 1448 tokens/s",
        "compare": "step 4: 87 arrays, bit-identical",
        "verify": "verified: max logits difference 1.3e-05 (tolerance 5.3e-04)",
    }
    made = {"key": card.key(program()), "date": "2026-01-02", "versions": {"jax": "1", "flax": "2"}}
    records = {RECIPE.stem: {**made, "figures": figures}}
    known = verified({RECIPE.stem: program()}, {}, records, {})["rehearsed"]
    said = "loss 12.38 to 5.15; killed and resumed, bit-identical; merged, logits within 1.3e-05"
    assert known == {card.key(program()): card.Result(said, {"jax": "1"}, "2026-01-02")}
    assert not verified({RECIPE.stem: program("lora.rank=8")}, {}, records, {})["rehearsed"]


def test_card_command_and_artifact_readme_agree() -> None:
    def shown(*options: str) -> str:
        done = CliRunner().invoke(app, ["card", str(RECIPE), *options], catch_exceptions=False)
        assert done.exit_code == 0
        return done.stdout

    values = json.loads(shown("--json"))
    assert values["verified"]["probed"] is None
    cells = [re.split(" {2,}", line.strip()) for line in shown().splitlines()]
    assert ["probed on hardware", "probe.py", "not yet"] in cells
    readme = emit_readme(program())
    for kind, row in zip(card.KINDS, card.rows(program()), strict=True):
        assert f"| {' | '.join(row)} |" in readme
        assert row[2] == (values["verified"][kind] or {"found": "not yet"})["found"]
        assert [cell for cell in row if cell] in cells
