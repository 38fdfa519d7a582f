"""Tests of the count of trained parameters, computed again from the published sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from recipec.compiler.lower import Lowered

LOCAL, GLOBAL, HIDDEN, FEED_FORWARD = 50, 10, 5376, 21504
OUTPUTS = {  # (local layers, global layers): output features of each projection, or input features for o_proj
    "q_proj": (32 * 256, 32 * 512),
    "k_proj": (16 * 256, 4 * 512),
    "v_proj": (16 * 256, None),
    "o_proj": (32 * 256, 32 * 512),
    "gate_proj": (FEED_FORWARD, FEED_FORWARD),
    "up_proj": (FEED_FORWARD, FEED_FORWARD),
    "down_proj": (FEED_FORWARD, FEED_FORWARD),
}


def peft_count(rank: int, targets: list[str]) -> int:
    """Return what PEFT trains: rank x (inputs + outputs) for each linear layer."""
    total = 0
    for target in targets:
        for layers, other in zip((LOCAL, GLOBAL), OUTPUTS[target], strict=True):
            total += layers * rank * (HIDDEN + other) if other else 0
    return total


@pytest.mark.parametrize("targets", [list(OUTPUTS), ["q_proj", "v_proj"], ["k_proj"], ["down_proj"]])
def test_independent_adapters_have_the_parameter_count_of_peft(
    lowered: Callable[..., Lowered], targets: list[str]
) -> None:
    run = lowered("lora.rank=16", f"lora.targets=[{', '.join(targets)}]")
    assert run.program is not None
    assert run.program.trainable_parameters == peft_count(16, targets)


def test_shared_kv_adapter_counts_its_a_matrix_once(lowered: Callable[..., Lowered]) -> None:
    run = lowered("lora.kv=shared")
    assert run.program is not None
    assert run.program.trainable_parameters == peft_count(64, list(OUTPUTS)) - LOCAL * 64 * HIDDEN


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        ("google/gemma-4-31B-it", ["lora.targets=[v_proj]"], "1.1 of 30.7 billion parameters (3.6%)"),
        (
            "google/gemma-4-31B-it",
            ["lora.layers=[0]", "lora.targets=[q_proj]"],
            "0.044 of 30.7 billion parameters (0.1%)",
        ),
        (
            "google/gemma-4-26B-A4B-it",
            [],
            "1.65 of 25.2 billion parameters (6.5%): the experts of 30 layers carry no adapter",
        ),
        ("google/gemma-3-270m-it", [], "100 of 268 million parameters (37.4%)"),
    ],
)
def test_report_states_the_share_of_parameters_with_adapters(
    lowered: Callable[..., Lowered], model: str, changes: list[str], said: str
) -> None:
    """Count the 31B's v_proj: 50 layers have one of 4096 x 5376."""
    run = lowered(f"model.id={model}", *changes)
    assert run.program is not None, run.diagnostics
    assert str(run.program.reach) == said
