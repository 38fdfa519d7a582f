"""Tests of the losses of reinforcement learning against TRL's trainers, in float32, on random logits."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from recipec.runtime.reinforcement.loss_types import LOSS_TYPES, LossSettings
from recipec.runtime.reinforcement.policy_loss import METRICS, Completions, policy_loss
from recipec.runtime.reinforcement.token_weights import token_weights, trained_mask

WORDS, LENGTH, LONGEST = 7, 6, 9
LENGTHS = np.array([6, 2, 1, 4, 0, 5])
"""The trained tokens of six completions; the fifth was cut off, and is masked."""
ROWS = len(LENGTHS)
MASK = trained_mask(np.arange(LENGTH) < np.maximum(LENGTHS, 3 * (LENGTHS == 0))[:, None], LENGTHS == 0)
IN_TRL = {"gspo": "grpo"}
"""Names of TRL's loss_type where it differs."""


def values() -> dict[str, np.ndarray]:
    """Return logits float32[B, T, V], tokens int32[B, T], and log-probabilities and advantages."""
    random = np.random.default_rng(11)
    logits = random.normal(0.0, 1.5, (ROWS, LENGTH, WORDS)).astype(np.float32)
    tokens = random.integers(0, WORDS, (ROWS, LENGTH)).astype(np.int32)
    logps = np.asarray(chosen(logits, tokens))
    near, far = (logps + random.normal(0, s, logps.shape).astype(np.float32) for s in (0.3, 0.6))
    advantages = np.array([1.3, -0.7, 0.4, -1.1, 0.9, 0.0], np.float32)
    return {"logits": logits, "tokens": tokens, "old": near, "reference": far, "advantages": advantages}


def chosen(logits: Any, tokens: Any) -> Any:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[..., 0]


def step_of(settings: LossSettings, known: dict[str, np.ndarray], old: bool) -> Completions:
    """Return the whole step as one micro-batch, a completion in each row."""
    return Completions(
        mask=MASK,
        segment_ids=np.ones((ROWS, LENGTH), np.int32),
        advantages=np.repeat(known["advantages"][:, None], LENGTH, 1),
        weights=token_weights(MASK, settings.loss_type, LONGEST),
        tokens=np.float32(MASK.sum()),
        old=known["old"] if old else None,
        reference=known["reference"],
        correction=known.get("correction"),
    )


def by_jax(settings: LossSettings, known: dict[str, np.ndarray], batch: Completions) -> tuple[Any, Any, Any]:
    """Return the loss, its gradient by the logits, and the metrics."""

    def loss(logits: Any) -> Any:
        return policy_loss(settings, chosen(logits, known["tokens"]), batch, jnp.ones(batch.mask.shape))

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(known["logits"])
    return float(value), np.asarray(gradient), {name: float(value) for name, value in metrics.items()}


def by_trl(settings: LossSettings, known: dict[str, np.ndarray], old: bool) -> tuple[float, Any, Any]:
    """Return the same from GRPOTrainer, or from RLOOTrainer."""
    from trl import GRPOTrainer, RLOOTrainer

    leaf = torch.tensor(known["logits"]).requires_grad_()
    ids, mask = torch.tensor(known["tokens"]).long(), torch.tensor(MASK).long()
    logps = torch.log_softmax(leaf, -1).gather(-1, ids[..., None])[..., 0]
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    trainer: Any = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, torch.ones_like(logps), None),
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=False,
        accelerator=accelerator,
        args=SimpleNamespace(
            use_bias_correction_kl=settings.kl_bias_correction, delta=None, steps_per_generation=1
        ),
        aux_loss_enabled=False,
        beta=settings.beta,
        current_gradient_accumulation_steps=1,
        epsilon_high=high,
        epsilon_low=settings.epsilon,
        importance_sampling_level=settings.ratio or LOSS_TYPES[settings.loss_type].ratio,
        loss_type=IN_TRL.get(settings.loss_type, settings.loss_type),
        max_completion_length=LONGEST,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm="correction" in known,
        vllm_importance_sampling_correction=True,
    )
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor(known["advantages"]),
        "num_items_in_batch": mask.sum(),
        "ref_per_token_logps": torch.tensor(known["reference"]),
    }
    if "correction" in known:
        inputs["importance_sampling_ratio"] = torch.tensor(known["correction"])
    before = torch.tensor(known["old"]) if old else logps.detach()
    if old:
        inputs["old_per_token_logps"] = before
    inputs["old_logps"] = (before * mask).sum(1)
    trainer_class = RLOOTrainer if settings.loss_type == "rloo" else GRPOTrainer
    loss = trainer_class._compute_loss(trainer, None, inputs)
    loss.backward()
    logged = {name: float(np.mean(value)) for name, value in trainer._metrics["train"].items()}
    return float(loss.detach()), leaf.grad.numpy(), logged


def cases() -> list[tuple[LossSettings, bool]]:
    """Return settings, and whether the old log-probabilities are passed."""
    settings = []
    for name, beta, high, old in itertools.product(LOSS_TYPES, (0.0, 0.04), (None, 0.28), (False, True)):
        if name == "rloo":
            if not beta:
                settings.append((LossSettings(name, epsilon_high=high), old))
            continue
        corrections = (False, True) if beta else (True,)
        levels: tuple[Any, ...] = (None,)
        if name in ("dapo", "luspo", "cispo"):
            levels = ("token", "sequence")
        for correction, level in itertools.product(corrections, levels):
            # cispo's is the largest ratio, and has no other default in TRL.
            high = 1.1 if name == "cispo" and high else high
            settings.append((LossSettings(name, 0.2, high, beta, "k3", correction, level), old))
    return settings


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_gradient_and_metrics_match_trl(loss_type: str) -> None:
    """Compare the loss to 1e-5 of its size, and its gradient by the logits to 1e-6."""
    known = values()
    compared = 0
    for settings, old in cases():
        if settings.loss_type != loss_type:
            continue
        value, gradient, metrics = by_jax(settings, known, step_of(settings, known, old))
        expected, theirs, logged = by_trl(settings, known, old)
        if loss_type == "rloo":
            # TRL's also has the constant of the completion without tokens.
            expected += float(known["advantages"][LENGTHS == 0].sum()) / ROWS
        assert value == pytest.approx(expected, rel=1e-5, abs=1e-6), settings
        assert np.abs(theirs).max() > 1e-3
        assert np.abs(gradient - theirs).max() <= 1e-6, settings
        if settings.beta and (not settings.kl_bias_correction or settings.ratio in (None, "token")):
            assert metrics["kl"] == pytest.approx(logged["kl"], rel=1e-5), settings
        if loss_type in ("grpo", "bnpo", "dapo", "dr_grpo") and settings.ratio != "sequence":
            for side in ("low", "high"):
                assert metrics[f"clip_{side}"] == pytest.approx(logged[f"clip_ratio/{side}_mean"])
            assert not old or metrics["clip_low"] > 0 < metrics["clip_high"]
        if loss_type == "cispo" and settings.ratio == "token":
            assert metrics["clip_high"] == pytest.approx(logged["cispo_clip_ratio"])
        assert metrics["entropy"] == pytest.approx(1.0)
        assert old or metrics["ratio"] == pytest.approx(1.0)
        compared += 1
    assert compared >= 4


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "rloo"])
def test_correction_for_a_server_multiplies_the_policys_loss_as_in_trl(loss_type: str) -> None:
    """Compare the loss to 1e-5 of its size, and its gradient by the logits to 1e-6. The divergence from the
    reference is not multiplied."""
    random = np.random.default_rng(12)
    known = {**values(), "correction": random.uniform(0.0, 3.0, MASK.shape).astype(np.float32)}
    settings = LossSettings(loss_type, 0.2, 1.1 if loss_type == "cispo" else None, 0.3)
    value, gradient, _ = by_jax(settings, known, step_of(settings, known, True))
    expected, theirs, _ = by_trl(settings, known, True)
    assert value == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert np.abs(gradient - theirs).max() <= 1e-6
    plain, _, _ = by_jax(settings, known, replace(step_of(settings, known, True), correction=None))
    assert abs(plain - value) > 1e-3


@pytest.mark.parametrize("correction", [False, True])
def test_k1_divergence_matches_tunix_and_its_gradient(correction: bool) -> None:
    """TRL has no k1 in this loss. Without the bias correction it is Tunix's; with it, the ratio's product."""
    from tunix.rl.common import compute_kl_divergence

    known, settings = values(), LossSettings(beta=0.5, kl="k1", kl_bias_correction=correction)
    batch = step_of(settings, known, old=True)
    without = replace(settings, beta=0.0)

    def expected(logits: Any) -> Any:
        logps = chosen(logits, known["tokens"])
        kl = compute_kl_divergence(logps, known["reference"], "kl")
        if correction:
            kl = kl * jnp.exp(logps - known["old"])
        loss, _ = policy_loss(without, logps, batch)
        return loss + 0.5 * jnp.where(MASK, kl, 0.0).sum() / MASK.sum()

    value, gradient, _ = by_jax(settings, known, batch)
    theirs, by_logits = jax.value_and_grad(expected)(known["logits"])
    assert value == pytest.approx(float(theirs), rel=1e-5)
    assert np.abs(gradient - by_logits).max() <= 1e-6


def packed(known: dict[str, np.ndarray], batch: Completions, rows: list[list[int]]) -> Any:
    """Put completions into rows of 16 tokens, after prompts of two tokens; return their batch and logits.

    Args:
        rows: the numbers of the completions of each row.
    """
    fields = ("mask", "advantages", "weights", "old", "reference")
    shape = (len(rows), 16)
    filled = {name: np.zeros(shape, getattr(batch, name).dtype) for name in fields}
    # What the model computes for other tokens must have no influence.
    filled["old"] += np.float32(-np.inf)
    filled["reference"] += np.float32(np.nan)
    segments = np.zeros(shape, np.int32)
    logits = np.full((*shape, WORDS), 1e3, np.float32)
    tokens = np.zeros(shape, np.int32)
    for row, numbers in enumerate(rows):
        place = 0
        for segment, number in enumerate(numbers, 1):
            length = LENGTHS[number]
            end = place + 2 + length
            inside = slice(place + 2, end)
            segments[row, place:end] = segment
            for name in fields:
                filled[name][row, inside] = getattr(batch, name)[number, :length]
            logits[row, inside] = known["logits"][number, :length]
            tokens[row, inside] = known["tokens"][number, :length]
            place = end
    return replace(batch, segment_ids=segments, **filled), {"logits": logits, "tokens": tokens}


def unpacked(gradient: Any, rows: list[list[int]]) -> np.ndarray:
    """Return the gradient by the logits of all completions, from the one by the logits of rows."""
    out = np.zeros((ROWS, LENGTH, WORDS), np.float32)
    for row, numbers in enumerate(rows):
        place = 0
        for number in numbers:
            length = LENGTHS[number]
            out[number, :length] = gradient[row, place + 2 : place + 2 + length]
            place += 2 + length
    return out


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_and_packed_rows_give_the_same_loss(loss_type: str) -> None:
    """Compare sums over micro-batches, in any order and packing, with the loss of the whole step to 1e-6."""
    settings = LossSettings(loss_type, beta=0.04)
    known = values()
    batch = step_of(settings, known, old=True)
    value, gradient, metrics = by_jax(settings, known, batch)
    for micro_batches in ([[[5, 0]], [[3, 1, 2]], [[4]]], [[[2, 4], [0]], [[1], [5, 3]]]):
        total, summed = 0.0, np.zeros_like(gradient)
        totals: dict[str, float] = defaultdict(float)
        for rows in micro_batches:
            part, logits = packed(known, batch, rows)
            loss, by_logits, more = by_jax(settings, logits, part)
            total += loss
            summed += unpacked(by_logits, rows)
            # Prompts and padding get none.
            assert np.count_nonzero(by_logits) == np.count_nonzero(unpacked(by_logits, rows))
            for name, metric in more.items():
                totals[name] += metric
        assert total == pytest.approx(value, abs=1e-6)
        assert np.abs(summed - gradient).max() <= 1e-6
        assert totals == pytest.approx(metrics, abs=1e-6) and set(totals) == set(METRICS)


def test_micro_batch_of_padding_has_no_loss() -> None:
    settings = LossSettings(beta=0.04)
    known = values()
    batch = replace(step_of(settings, known, old=False), mask=np.zeros_like(MASK), tokens=np.float32(0))
    value, gradient, metrics = by_jax(settings, known, batch)
    assert value == 0 and not gradient.any() and set(metrics.values()) == {0.0}


def test_unknown_settings_and_missing_references_are_refused() -> None:
    known = values()
    for wrong in ({"ratio": "word"}, {"kl": "k2"}, {"beta": 0.1}):
        settings = LossSettings(**wrong)
        batch = replace(step_of(settings, known, old=False), reference=None)
        with pytest.raises(ValueError):
            by_jax(settings, known, batch)
