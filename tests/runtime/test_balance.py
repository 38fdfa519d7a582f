"""Tests of how tokens spread over experts.

The load-balancing loss is compared with transformers in float32. The reported shares are compared with a
plain count.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from recipec.runtime.metrics.loggers import Nowhere
from recipec.runtime.metrics.run_report import EXPERT_TOKENS, ExpertShares, Numbers, Report, advice
from recipec.runtime.model.expert_load import collected
from recipec.runtime.model.families.family import parameter_path
from recipec.runtime.model.sharding import shard_rows
from recipec.runtime.settings import TrainSettings
from recipec.runtime.training.losses import batch_loss
from recipec.runtime.training.objective_losses import balanced, micro_batch_loss
from recipec.runtime.training.step import Step
from tests import tiny
from tests.runtime import training
from tests.runtime.decoders import LIMIT, make

pytestmark = pytest.mark.usefixtures("highest")

EXPERTS, PER_TOKEN = 7, 3
WEIGHT = 0.3
"""A weight of the load-balancing loss far above real ones, so that it shows in the gradients."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LAYERS = {"num_hidden_layers": 3, "mlp_only_layers": [1]}


def packed() -> dict[str, np.ndarray]:
    """Make rows of two samples and padding of different lengths."""
    one = training.packed_batch()
    ends = np.random.default_rng(1).integers(10, training.LENGTH + 1, training.ROWS)
    real = np.arange(training.LENGTH)[None] < ends[:, None]
    one |= {name: one[name] * real for name in ("tokens", "positions", "segment_ids", "loss_mask")}
    return one | {"norm": np.asarray(100.0, np.float32)}


def by_runtime(
    folder: Path, axes: dict[str, int], remat: str, one: dict[str, np.ndarray]
) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the loss of a micro-batch, its metrics, and the gradients of all weights by path."""
    mesh, built = training.build(folder, axes, remat=remat, full=True)
    graph, state = nnx.split(built.model)

    @functools.partial(jax.jit, compiler_options=training.QUICK)
    def compute(state: Any, inputs: Any) -> Any:
        def loss_of(model: Any) -> Any:
            with collected(inputs["segment_ids"], probable=True) as found:
                loss = batch_loss(built.forward, model, inputs)
            return balanced(loss, {}, found, WEIGHT)

        wanted = nnx.DiffState(0, nnx.Param)
        return nnx.value_and_grad(loss_of, argnums=wanted, has_aux=True)(nnx.merge(graph, state))

    with mesh:
        (loss, more), gradients = compute(state, shard_rows(dict(one), mesh))
    leaves = jax.tree_util.tree_flatten_with_path(nnx.pure(gradients))[0]
    return (
        float(loss),
        {name: np.asarray(value) for name, value in more.items()},
        {parameter_path(path): np.asarray(leaf) for path, leaf in leaves},
    )


def test_balancing_loss_and_gradients_match_transformers(tmp_path: Path) -> None:
    """Compare losses, gradients and shares of packed rows.

    One mesh of 2 x 2 recomputes layers, and one device recomputes blocks.
    """
    model = make("qwen3_moe", tmp_path, **LAYERS, norm_topk_prob=False)
    one = packed()
    tensors = {name: torch.tensor(value).long() for name, value in one.items() if value.ndim == 2}
    real = tensors["segment_ids"] > 0
    # transformers separates samples by their positions, but only without a mask
    inputs = {"input_ids": tensors["tokens"], "position_ids": tensors["positions"], "use_cache": False}
    found = model(**inputs, output_router_logits=True)
    auxiliary = load_balancing_loss_func(found.router_logits, EXPERTS, PER_TOKEN, real.long())
    chosen = torch.log_softmax(found.logits[:, :-1].float(), -1)
    nll = -chosen.gather(-1, tensors["tokens"][:, 1:, None])[..., 0]
    counted = tensors["loss_mask"][:, 1:] * (tensors["segment_ids"][:, 1:] == tensors["segment_ids"][:, :-1])
    expected = (nll * counted).sum() / float(one["norm"]) + WEIGHT * auxiliary
    expected.backward()

    results = [
        by_runtime(tmp_path, *how, one)
        for how in (({"fsdp": 2, "tp": 2}, "decoder"), ({"fsdp": 1, "tp": 1}, "block"))
    ]
    count = np.array(
        [
            np.bincount(logits.topk(PER_TOKEN).indices[real.reshape(-1)].reshape(-1), minlength=EXPERTS)
            for logits in found.router_logits
        ]
    )
    layers = model.model.layers
    for loss, more, gradients in results:
        assert loss == pytest.approx(float(expected), rel=LIMIT)
        assert more["aux_loss"] == pytest.approx(float(auxiliary), rel=LIMIT)
        assert np.array_equal(more[EXPERT_TOKENS], count)
        for layer in (0, 2):
            pairs = {
                f"layers.{layer}.mlp.router.kernel": layers[layer].mlp.gate.weight.grad.T,
                f"layers.{layer}.attn.q_norm.w": layers[layer].self_attn.q_norm.weight.grad,
                f"layers.{layer}.input_layernorm.w": layers[layer].input_layernorm.weight.grad,
            }
            for path, gradient in pairs.items():
                worst = np.abs(gradients[path] - gradient.numpy()).max()
                assert worst <= 1e-4 * float(gradient.abs().max()), path
    for path, gradient in results[0][2].items():
        worst = np.abs(gradient - results[1][2][path]).max()
        assert worst <= LIMIT * max(np.abs(gradient).max(), 1e-3), path


def test_evaluation_and_dpo_reference_ignore_expert_balance(tmp_path: Path) -> None:
    """Evaluate with the same program with and without the loss, and count only one of DPO's two passes."""
    make("qwen3_moe", tmp_path, **LAYERS)
    mesh, built = training.build(tmp_path, {"fsdp": 1, "tp": 1}, targets=ATTENTION)
    one = training.batch(0)

    def step(objective: str, weight: float) -> Any:
        how = {"steps": 1, "global_batch_size": 8, "micro_batch_size": 1, "router_aux_loss_coef": weight}
        settings = TrainSettings(objective=objective, **how)
        optimizer = nnx.Optimizer(built.model, optax.sgd(1.0), wrt=nnx.LoRAParam)
        return Step(built, optimizer, settings, mesh, lambda *of: micro_batch_loss(built, settings, *of))

    with mesh:
        dpo, *sft = step("dpo", WEIGHT), step("sft", WEIGHT), step("sft", 0.0)
        *_, more = jax.eval_shape(dpo.jit(), dpo.live, dpo.base, one)
        assert more[EXPERT_TOKENS].shape == (2, EXPERTS)
        with_loss, without = (
            made.jit_evaluation().lower(made.live[0], made.base, one).as_text() for made in sft
        )
    assert with_loss == without


def test_gemma4_step_returns_expert_counts_under_rematerialization(tmp_path: Path) -> None:
    tiny.make_gemma4(tmp_path, **tiny.GEMMA4_EXPERTS)
    mesh, built = training.build(tmp_path, {"fsdp": 2, "tp": 1}, targets=ATTENTION, remat="decoder")
    settings = TrainSettings(steps=1, global_batch_size=8, micro_batch_size=4)
    with mesh:
        optimizer = nnx.Optimizer(built.model, optax.sgd(1.0), wrt=nnx.LoRAParam)
        step = Step(built, optimizer, settings, mesh, lambda *of: micro_batch_loss(built, settings, *of))
        *_, more = jax.eval_shape(step.jit(), step.live, step.base, training.batch(0))
    assert {name: array.shape for name, array in more.items()} == {
        EXPERT_TOKENS: (2, tiny.GEMMA4_EXPERTS["num_experts"])
    }


SPREAD = [[40, 40, 40, 40, 40, 40, 40, 40]] * 2
AT_TWO = [[40, 40, 40, 40, 40, 40, 40, 40], [2, 150, 3, 5, 0, 0, 160, 0]]


def steps(shares: ExpertShares, tokens: list[list[list[int]]], scale: int = 1) -> list[str]:
    for step, one in enumerate(tokens, 1):
        shares.of_step(step, [{EXPERT_TOKENS: scale * np.array(one)}])
    return shares.warnings(len(tokens))


def test_expert_shares_cover_all_micro_batches_of_a_step() -> None:
    shares = ExpertShares((0, 2), 2, "")
    parts = [{EXPERT_TOKENS: np.array(one)} for one in (SPREAD, AT_TWO)]
    assert shares.of_step(1, parts) == {"expert_share_min": 40 / 640, "expert_share_max": 200 / 640}
    assert shares.of_step(2, [{EXPERT_TOKENS: np.zeros((2, 8))}]) == {}


def test_expert_imbalance_is_warned_about_once() -> None:
    shares = ExpertShares((0, 3), 2, advice(0.0, balanced=True))
    assert steps(shares, [SPREAD, SPREAD, SPREAD]) == []
    assert steps(shares, [AT_TWO, AT_TWO, AT_TWO]) == [
        "warning: few experts get nearly all tokens of steps 1 to 3, in 1 of 2 layers with experts: 2 of the "
        "8 of layer 3 get 96.9 %",
        "  = help: set train.router_aux_loss_coef, for example to 0.001, or lower the learning rate",
    ]
    assert steps(shares, [AT_TWO, AT_TWO, AT_TWO]) == []


def test_imbalance_warning_needs_enough_tokens_experts_and_steps() -> None:
    assert steps(ExpertShares((0, 3), 2, ""), [AT_TWO]) == [], "320 tokens for 8 experts"
    assert steps(ExpertShares((0, 3), 3, ""), [AT_TWO] * 9) == [], "3 of 8 are no few"
    assert steps(ExpertShares((0, 3), 2, ""), [AT_TWO, SPREAD, SPREAD]) == [], "not over the whole interval"


@pytest.mark.parametrize(
    ("coefficient", "balanced", "help"),
    [
        (0.01, True, "raise train.router_aux_loss_coef, which is 0.01, or lower the learning rate"),
        (0.0, False, "lower the learning rate; check whether the data has only a few kinds of text"),
    ],
)
def test_imbalance_advice_depends_on_balancing_loss_support(
    coefficient: float, balanced: bool, help: str
) -> None:
    assert advice(coefficient, balanced) == help


def test_run_report_prints_the_imbalance_warning_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shares = ExpertShares((0, 3), 2, "do it")
    report = Report(0, 8, 4, lambda step: 0.1, Nowhere(tmp_path), shares)
    one = jnp.float32(1.0)
    for step in range(1, 9):
        more = [{EXPERT_TOKENS: jnp.asarray(AT_TWO), "aux_loss": one}]
        report.add(Numbers(step, [one], one, 100, more))
        if report.due(step):
            report.read()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "step", "warning:", "=", "step"]
