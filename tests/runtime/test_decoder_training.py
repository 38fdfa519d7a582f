"""Train every family of the decoder, and compare with PEFT, in float32, with LoRA on every projection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runtime.decoders import CASES, CLOSED, EVERY, LIMIT, layers, make, marked
from tests.runtime.references import twenty_steps

pytestmark = pytest.mark.usefixtures("highest")

AXES = {"fsdp": 2, "tp": 2}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("case", "count", "targets"),
    [
        ("qwen3_moe", "num_experts", ("q_proj", "experts", "router")),
        ("nemotron_h-latent", "n_routed_experts", ("q_proj", "in_proj", "experts")),
    ],
)
def test_expert_adapters_on_the_ep_axis_train_as_in_peft(
    case: str, count: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    model = make(case, tmp_path / "base", **{count: 6})
    axes = {"fsdp": 2, "ep": 2, "tp": 2}
    alike = twenty_steps(tmp_path / "base", model, axes, tmp_path / "run", targets=targets)
    assert alike.losses <= LIMIT * alike.of_loss
    assert alike.gradients <= 1e-4
    assert alike.parameters <= 0.02 * alike.moved
    assert alike.moved > 5e-3


@pytest.mark.parametrize("case", map(marked, CASES))
def test_twenty_training_steps_match_peft(
    case: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    model = make(case, tmp_path / "base")
    projections = sum(
        # A router may be a linear layer too, of a class of its own.
        type(module).__name__ in ("Linear", "FalconLinear")
        and not name.endswith(("shared_expert_gate", ".gate", ".router"))
        and ".indexer." not in name
        and ".router." not in name  # Granite's and Trinity's, which `targets` leaves out
        and not (case in CLOSED and name.endswith("out_proj"))
        for name, module in layers(model).named_modules()
    )
    targets = CLOSED.get(case, EVERY)
    if "dsa" in case:  # an expression would also match a projection of GLM 5's indexer, in PEFT alone
        targets = (r".*[abo]_proj(_with_mqa)?", r".*(gate|up|down)_proj")
    # A router and experts are parameters. PEFT cannot adapt the router of these: its scores are corrected.
    corrected = case.startswith(("deepseek_v3", "glm"))
    if hasattr(model.config.get_text_config(), "num_experts") and not corrected:
        routers = () if case in ("afmoe", "lfm2_moe") else ("router",)
        targets = (*EVERY, "experts", *routers)
        mixtures = sum(any(hasattr(one, "experts") for one in layer.children()) for layer in layers(model))
        projections += (2 + len(routers)) * mixtures
    alike = twenty_steps(tmp_path / "base", model, AXES, tmp_path / "run", targets=targets)
    record_property("losses", alike.losses / alike.of_loss)
    print(f"\n{case}: {alike}")
    assert alike.adapted == projections
    assert alike.losses <= LIMIT * alike.of_loss
    assert alike.gradients <= 1e-4
    assert alike.parameters <= 0.02 * alike.moved, "Adam makes much of the noise of gradients that are small"
    assert alike.moved > 5e-3
