"""Tests of `auto`: what the compiler chooses for attention and recomputation, and where it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli.main import app
from recipec.compiler.emitters.emit import emit
from recipec.compiler.lower import N0228, lower
from recipec.compiler.lowering.hardware import from_name
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.runtime_settings import run_settings
from recipec.compiler.plan import identity
from recipec.compiler.roofline import remat_policy
from recipec.compiler.roofline.remat_policy import POLICIES, candidates, choose
from recipec.compiler.roofline.step_estimate import Need
from recipec.spec.load import load

RECIPE = """\
recipe: 1
name: sample
model: {id: meta-llama/Llama-3.1-8B-Instruct}
mesh: {accelerator: v6e-8, axes: {fsdp: 8}}
lora: {}
data: {train: [gs://bucket/train.jsonl]}
"""
ON_CPU = "mesh={accelerator: cpu-1, axes: {fsdp: 1}}"
GIB = 2**30


def program(*sets: str) -> Program:
    lowered = lower(load(Path("sample.yaml"), sets, text=RECIPE))
    assert lowered.program is not None, lowered.diagnostics
    return lowered.program


@pytest.mark.parametrize(
    ("sets", "attention"),
    [
        ((), "splash"),
        (("model.attention=auto",), "splash"),
        (("model.attention=dot",), "dot"),
        ((ON_CPU,), "dot"),
        (("model.dtype=float32",), "dot"),
    ],
)
def test_attention_is_splash_where_it_runs(sets: tuple[str, ...], attention: str) -> None:
    of = program(*sets)
    assert of.recipe.model.attention == attention
    assert ("model.attention" in of.automatic) is ("model.attention=dot" not in sets)


@pytest.mark.parametrize(
    ("model", "accelerator", "block"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "v5e-8", 1024),
        ("meta-llama/Llama-3.1-8B-Instruct", "v5p-8", 512),
        ("google/gemma-3-4b-it", "v5e-8", 512),
        ("google/gemma-3-4b-it", "v6e-8", 1024),
        ("meta-llama/Llama-3.1-8B-Instruct", "cpu-8", None),
    ],
)
def test_attention_block_is_the_accelerators_for_models_with_and_without_windows(
    model: str, accelerator: str, block: int | None
) -> None:
    where = f"mesh={{accelerator: {accelerator}, axes: {{fsdp: {from_name(accelerator).devices}}}}}"
    of = program(f"model.id={model}", where)
    assert run_settings(of).model.attention_block == block


def test_attention_of_a_model_that_no_family_describes_is_its_own(root: Path) -> None:
    path = root / "tests/golden/backend-trl-as-it-is/recipe.yaml"
    of = lower(load(path)).program
    assert of is not None and of.accelerator.platform == "tpu" and not of.family.flash_attention
    assert of.recipe.model.attention == "dot" and "transformers" in of.automatic["model.attention"]


@pytest.mark.parametrize(
    ("most", "policy", "sure"),
    [
        ({"none": 31.0, "save_attention": 20.0, "decoder": 10.0}, "none", True),
        ({"none": 31.5, "save_dots": 31.0, "save_attention": 20.0, "decoder": 10.0}, "save_dots", True),
        ({"none": 31.5, "save_attention": 20.0, "decoder": 10.0}, "save_attention", True),
        ({"none": 50.0, "save_attention": 40.0, "decoder": 31.25}, "decoder", True),
        ({"none": 60.0, "save_attention": 50.0, "decoder": 40.0}, "decoder", False),
    ],
)
def test_policy_is_the_fastest_that_surely_fits(
    monkeypatch: pytest.MonkeyPatch, most: dict[str, float], policy: str, sure: bool
) -> None:
    def need(of: Program) -> Need:
        size = most.get(of.recipe.remat.policy, 100.0) * GIB
        return Need(state=size / 4, total=size / 2, most=size, least=size / 3)

    monkeypatch.setattr(remat_policy, "need", need)
    lowered = lower(load(Path("sample.yaml"), text=RECIPE))
    assert lowered.program is not None and lowered.program.recipe.remat.policy == policy
    assert [d.code for d in lowered.diagnostics if d.code == N0228] == ([] if sure else [N0228])
    reason = lowered.program.automatic["remat.policy"]
    assert reason.startswith(f"{policy} needs up to {most[policy]:.1f} of 31.25 GiB by calculation, ")
    assert all(f"{other} {size:.1f}" in reason for other, size in most.items() if other != policy)
    perhaps = "" if policy == "none" else "none may fit and is faster: recipe plan tells"
    assert reason.partition("; ")[2] == perhaps


def test_policies_are_compared_where_they_make_sense() -> None:
    assert candidates(program()) == POLICIES
    assert "save_attention" not in candidates(program("model.attention=dot"))
    assert candidates(program(ON_CPU)) == ("none",) and program(ON_CPU).recipe.remat.policy == "none"


def test_given_policy_is_kept_without_a_note() -> None:
    of = program("remat.policy=block")
    assert of.recipe.remat.policy == "block" and "remat.policy" not in of.automatic


def test_auto_is_the_step_of_the_written_words() -> None:
    of = program()
    words = program(f"remat.policy={of.recipe.remat.policy}", f"model.attention={of.recipe.model.attention}")
    assert identity.step(of) == identity.step(words) and run_settings(of) == run_settings(words)
    assert choose(words).policy == of.recipe.remat.policy


def test_lock_and_script_have_the_chosen_words() -> None:
    of = program()
    files = emit(of)
    recorded = json.loads(files["recipe.lock.json"])["recipe"]
    policy = of.recipe.remat.policy
    assert (recorded["model"]["attention"], recorded["remat"]["policy"]) == ("splash", policy)
    script = files["train.py"].decode()
    assert 'attention="splash"' in script and f'remat="{policy}"' in script


def test_explain_shows_the_choice_and_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "sample.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    shown = CliRunner().invoke(app, ["explain", str(path), "remat.policy"]).output
    of = program()
    line = next(line for line in shown.splitlines() if line.startswith("remat.policy  "))
    assert f"{of.recipe.remat.policy}  default, auto: {of.recipe.remat.policy} needs up to " in line
    assert "auto    " in shown  # among the choices
