"""Tests of the correction for a server's other log-probabilities against TRL's trainer."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch

from recipec.runtime.errors import UserError
from recipec.runtime.reinforcement.correction import check_mismatch, importance_weights, mismatch
from recipec.runtime.sections import Rollout
from recipec.spec.language import reinforcement
from tests.runtime.test_advantages import GENERATIONS, LENGTH, PROMPTS, by_trl, rewards_by_function

MODES = get_args(reinforcement.Rollout.model_fields["importance_sampling_mode"].annotation)
NAMES = {
    "sampling_logp_difference": "sampling/sampling_logp_difference/mean",
    "sampling_logp_difference_max": "sampling/sampling_logp_difference/max",
    "importance_sampling_ratio": "sampling/importance_sampling_ratio/mean",
    "importance_sampling_ratio_min": "sampling/importance_sampling_ratio/min",
    "importance_sampling_ratio_max": "sampling/importance_sampling_ratio/max",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("least", "most"), [(None, 3.0), (0.5, 1.5), (0.8, None)])
def test_weights_and_metrics_match_trl(mode: str, least: float | None, most: float | None) -> None:
    """Compare with GRPOTrainer to 1e-5, with tokens of which the server reports nothing."""
    count = PROMPTS * GENERATIONS
    random = np.random.default_rng(5)
    trained = random.normal(-2.0, 1.0, (count, LENGTH))
    served = trained + random.normal(0.0, 0.7, trained.shape)
    served[2, 1] = served[5, 0] = np.nan
    settings: dict[str, Any] = {
        "importance_sampling_mode": mode,
        "importance_sampling_clip_min": least,
        "importance_sampling_clip_max": most,
    }
    theirs = by_trl(
        "GRPOTrainer",
        rewards_by_function().astype(np.float64),
        served.tolist(),
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        mask_truncated_completions=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (torch.tensor(trained), None, None),
        **{f"vllm_{name}": value for name, value in settings.items()},
    )
    rollout, mask = Rollout(engine="vllm", **settings), np.ones(trained.shape, bool)
    weights = importance_weights(trained, served, mask, rollout)
    expected = np.broadcast_to(theirs["importance_sampling_ratio"].numpy(), trained.shape)
    assert np.abs(weights - expected).max() <= 1e-5
    assert np.ptp(weights) > 0.5
    for name, value in mismatch(trained, served, mask, weights, rollout).items():
        assert value == pytest.approx(theirs["metrics"][NAMES[name]][0], abs=1e-5), name


def test_tokens_outside_of_the_mask_and_of_no_probability_are_harmless() -> None:
    trained, served = np.full((2, 3), -1.0), np.full((2, 3), -1.0)
    trained[0], served[0, 0], trained[1, 0] = np.nan, -np.inf, 2000.0
    mask = np.array([[False] * 3, [True, True, False]])
    for mode in MODES:
        weights = importance_weights(trained, served, mask, Rollout(importance_sampling_mode=mode))
        assert np.isfinite(weights).all() and (weights[0] == 1).all() and weights[1, 2] == 1
        assert weights[1, 0] == (3.0 if mode.endswith("truncate") else 0.0)


def test_another_model_is_refused() -> None:
    check_mismatch({"sampling_logp_difference": 0.2})
    with pytest.raises(UserError, match=r"differ by 4\.50 nats a token"):
        check_mismatch({"sampling_logp_difference": 4.5})
