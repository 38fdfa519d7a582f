"""Tests of DPO and ORPO in train_torchax.py against train.py, in float32.

Runs are whole, or started from an adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from recipec.compiler.emitters.backends import Backend
from recipec.compiler.parity.compare import ComparedRun, compare
from tests.parity.preferences import LIMITS, assert_one_run, case
from tests.parity.running import Place

pytestmark = pytest.mark.nightly

MODELS: dict[str, tuple[Any, ...]] = {
    "gemma3": (
        "google/gemma-3-1b-it",
        ["sliding_attention"] * 5 + ["full_attention"],
        {"fsdp": 1, "tp": 2},
        ["q_proj", "k_proj", "o_proj", "up_proj"],
    ),
    "qwen3": ("Qwen/Qwen3-0.6B", ["full_attention"] * 2, {"fsdp": 2, "tp": 1}, ["v_proj", "down_proj"]),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Place]:
    """Return a function that makes the folder of a model and an objective once."""
    made: dict[tuple[str, str], Place] = {}

    def get(model: str, objective: str) -> Place:
        if (model, objective) not in made:
            folder = tmp_path_factory.mktemp(f"{model}-{objective}")
            small = case(*MODELS[model], objective, eval_fraction=0.1)
            made[model, objective] = Place(folder, small)
        return made[model, objective]

    return get


@pytest.mark.parametrize(("model", "objective"), [("gemma3", "dpo"), ("qwen3", "orpo")])
def test_all_backends_give_the_same_preference_run(
    model: str, objective: str, place: Callable[[str, str], Place]
) -> None:
    """Shard over fsdp and tp, and evaluate before the run and at its end."""
    assert_one_run(place(model, objective))


def test_dpo_reference_excludes_the_starting_adapter(
    place: Callable[[str, str], Place],
) -> None:
    """Compare with train.py, which continues from the same adapter."""
    here = place("qwen3", "dpo")
    whole = here.train(Backend.TORCHAX, "first")
    adapter = here.folder / "first" / "adapter"
    here.merge("on", "--import-adapter", adapter)
    own = here.train(Backend.TUNIX, "on", "--resume", "--steps", "1")
    other = here.train(Backend.TORCHAX, "again", "--adapter", adapter, "--steps", "1")
    rows = compare([ComparedRun("tunix", own), ComparedRun("torchax", other)], LIMITS)
    assert [row for row in rows if not row.ok] == []
    assert other.losses[0] < whole.losses[0] - 1e-3, "what was learned is seen against the base"
