"""The count of trained parameters, computed once more from the published sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from compiler.lower import Lowered

LOCAL, GLOBAL, HIDDEN, FEED_FORWARD = 50, 10, 5376, 21504
OUTPUTS = {  # (local layers, global layers): features that each projection gives, or takes for o_proj
    "q_proj": (32 * 256, 32 * 512),
    "k_proj": (16 * 256, 4 * 512),
    "v_proj": (16 * 256, None),
    "o_proj": (32 * 256, 32 * 512),
    "gate_proj": (FEED_FORWARD, FEED_FORWARD),
    "up_proj": (FEED_FORWARD, FEED_FORWARD),
    "down_proj": (FEED_FORWARD, FEED_FORWARD),
}


def peft_count(rank: int, targets: list[str]) -> int:
    """What PEFT trains: rank x (inputs + outputs) for each linear layer."""
    total = 0
    for target in targets:
        for layers, other in zip((LOCAL, GLOBAL), OUTPUTS[target], strict=True):
            total += layers * rank * (HIDDEN + other) if other else 0
    return total


@pytest.mark.parametrize("rank", [1, 16, 64])
@pytest.mark.parametrize("targets", [list(OUTPUTS), ["q_proj", "v_proj"], ["k_proj"], ["down_proj"]])
def test_independent_adapters_are_those_of_peft(
    lowered: Callable[..., Lowered], rank: int, targets: list[str]
) -> None:
    run = lowered(f"lora.rank={rank}", f"lora.targets=[{', '.join(targets)}]")
    assert run.program is not None
    assert run.program.trainable_parameters == peft_count(rank, targets)


def test_a_shared_a_is_counted_once(lowered: Callable[..., Lowered]) -> None:
    run = lowered("lora.kv=shared")
    assert run.program is not None
    assert run.program.trainable_parameters == peft_count(64, list(OUTPUTS)) - LOCAL * 64 * HIDDEN


def test_the_31b_has_the_parameters_that_its_config_adds_up_to(lowered: Callable[..., Lowered]) -> None:
    run = lowered()
    assert run.program is not None
    attention_local = HIDDEN * (2 * 32 * 256 + 2 * 16 * 256) + 2 * 256
    attention_global = HIDDEN * (2 * 32 * 512 + 4 * 512) + 2 * 512
    rest = 3 * HIDDEN * FEED_FORWARD + 4 * HIDDEN + 1
    expected = 262144 * HIDDEN + HIDDEN + LOCAL * attention_local + GLOBAL * attention_global + 60 * rest
    assert run.program.base_parameters == expected
