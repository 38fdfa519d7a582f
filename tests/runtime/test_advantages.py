"""Tests of advantages against TRL's trainers, and of the weights that take the place of its means."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from recipec.runtime.reinforcement.advantages import (
    combined_rewards,
    group_advantages,
    kl_penalty,
    leave_one_out_advantages,
    overlong_penalty,
    without_difference,
)
from recipec.runtime.reinforcement.token_weights import token_weights, trained_mask

PROMPTS, GENERATIONS = 5, 4
WEIGHTS = (1.0, 0.25, 2.0)
END, LENGTH = 1, 3


def rewards_by_function() -> np.ndarray:
    """Return float32[3, prompts, generations]: one group has equal rewards, one has a single reward, one has
    none, and single functions did not score some completions."""
    rewards = np.random.default_rng(3).normal(0.5, 1.0, (3, PROMPTS, GENERATIONS)).astype(np.float32)
    rewards[:, 1] = rewards[:, 1, :1]
    rewards[:, 2, 1:] = np.nan
    rewards[:, 3] = np.nan
    rewards[0, 0, 2] = rewards[1, 4, 3] = rewards[2, 4, 3] = np.nan
    return rewards


def by_trl(
    name: str, by_function: np.ndarray, sampled: list[list[float]] | None = None, **settings: Any
) -> dict[str, Any]:
    """Return what TRL's trainer makes of rewards of completions that it is told it sampled.

    Every completion has LENGTH tokens; those of the last prompt end without the end token.

    Args:
        sampled: the log-probabilities that its vLLM reports.
    """
    import trl

    count = PROMPTS * GENERATIONS
    completions = [[7] * (LENGTH - 1) + [END if row < count - GENERATIONS else 7] for row in range(count)]
    old = torch.arange(count * LENGTH).reshape(count, LENGTH) * -0.01
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        gather=lambda x: x,
        process_index=0,
        reduce=lambda x, reduction: x,
        num_processes=1,
    )
    class_of = getattr(trl, name)
    trainer: Any = SimpleNamespace(
        _calculate_rewards=lambda *_: torch.tensor(by_function.reshape(len(by_function), -1).T),
        _get_per_token_logps_and_entropies=lambda *_, **__: (old, None, None),
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _metrics={"train": defaultdict(list)},
        _pending_extra_logs={},
        _pending_metrics={},
        _tokenizer=SimpleNamespace(pad_token_id=0),
        accelerator=accelerator,
        args=SimpleNamespace(
            gradient_accumulation_steps=1, gradient_checkpointing_kwargs=None, per_device_train_batch_size=8
        ),
        beta=0.0,
        entropy_coef=0.0,
        environment_factories=None,
        environments=None,
        eos_token_ids=[END],
        eos_token_id=END,
        log_multimodal=False,
        mask_truncated_completions=True,
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        multi_objective_aggregation="sum_then_normalize",
        normalize_advantages=False,
        num_generations=GENERATIONS,
        num_iterations=1,
        off_policy_mask_threshold=None,
        pad_to_multiple_of=None,
        ref_model=None,
        reward_clip_range=None,
        reward_func_names=["one", "two", "three"],
        reward_weights=torch.tensor(WEIGHTS),
        scale_rewards="group",
        temperature=1.0,
        tools=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
    )
    trainer.args.steps_per_generation = 1
    vars(trainer).update(settings)
    ids = [[5]] * count
    of_class = {
        "RLOOTrainer": (ids, completions, completions),
        "GRPOTrainer": (ids, completions, None, completions, sampled, {}, None, None),
    }
    trainer._generate = lambda prompts: of_class[name]
    inputs = [{"prompt": "a"} for _ in range(count)]
    return class_of._generate_and_score_completions(trainer, inputs) | {"metrics": trainer._metrics["train"]}


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_advantages_match_grpo_trainer(scale_rewards: str) -> None:
    """Compare with GRPOTrainer to 1e-6: weights, equal rewards, and completions that nothing scored."""
    by_function = rewards_by_function().astype(np.float64)
    theirs = by_trl("GRPOTrainer", by_function, scale_rewards=scale_rewards)
    rewards = combined_rewards(by_function, WEIGHTS)
    advantages = group_advantages(rewards, scale_rewards)
    assert advantages.dtype == np.float32 and np.abs(advantages).max() > 0.5
    assert np.abs(advantages.ravel() - theirs["advantages"].numpy()).max() <= 1e-6
    assert not advantages[1:4].any()
    assert without_difference(rewards).tolist() == [False, True, True, True, False]
    assert np.nanmean(rewards) == pytest.approx(theirs["metrics"]["reward"][0], rel=1e-6)


@pytest.mark.parametrize("normalize", [False, True])
def test_leave_one_out_advantages_match_rloo_trainer(normalize: bool) -> None:
    by_function = rewards_by_function().astype(np.float64)
    theirs = by_trl("RLOOTrainer", by_function, normalize_advantages=normalize)
    advantages = leave_one_out_advantages(combined_rewards(by_function, WEIGHTS), normalize)
    assert np.abs(advantages).max() > 0.5
    assert np.abs(advantages.ravel() - theirs["advantages"].numpy()).max() <= 1e-6


def test_divergence_in_rewards_matches_rloo_trainer() -> None:
    """RLOO's divergence is part of the reward. Truncated completions have none, because they are masked."""
    by_function = rewards_by_function().astype(np.float64)
    count = PROMPTS * GENERATIONS
    old, reference = np.random.default_rng(4).normal(-2.0, 1.0, (2, count, LENGTH))
    both = iter([torch.tensor(old), torch.tensor(reference)])
    theirs = by_trl(
        "RLOOTrainer",
        by_function,
        beta=0.1,
        ref_model="another",
        _get_per_token_logps_and_entropies=lambda *_, **__: (next(both), None, None),
    )
    mask = trained_mask(np.ones((count, LENGTH)), np.arange(count) >= count - GENERATIONS)
    rewards = combined_rewards(by_function, WEIGHTS)
    advantages = leave_one_out_advantages(
        rewards - 0.1 * kl_penalty(old, reference, mask).reshape(rewards.shape)
    )
    assert np.abs(advantages.ravel() - theirs["advantages"].numpy()).max() <= 1e-6


def test_truncated_completions_and_token_count_match_grpo_trainer() -> None:
    theirs = by_trl("GRPOTrainer", rewards_by_function())
    count = PROMPTS * GENERATIONS
    mask = trained_mask(np.ones((count, LENGTH)), np.arange(count) >= count - GENERATIONS)
    assert (mask == theirs["completion_mask"].numpy()).all()
    assert token_weights(mask, "dapo").max() == pytest.approx(1 / float(theirs["num_items_in_batch"]))


def test_equal_rewards_have_no_advantage_in_spite_of_rounding() -> None:
    """The mean of three times 0.1 is not 0.1."""
    rewards = np.full((1, 3), 0.1)
    assert rewards.mean() != 0.1
    assert not group_advantages(rewards).any() and not leave_one_out_advantages(rewards).any()


@pytest.mark.parametrize("buffer", [0, 20])
def test_overlong_penalty_matches_trl(buffer: int) -> None:
    from trl.rewards import get_soft_overlong_punishment

    lengths = [0, 79, 80, 81, 90, 99, 100, 101, 500]
    theirs = get_soft_overlong_punishment(100, buffer)(completion_ids=[[1] * length for length in lengths])
    assert overlong_penalty(np.array(lengths), 100, buffer).tolist() == pytest.approx(theirs)


def test_weights_are_the_means_of_each_loss_type() -> None:
    """Compare with the sums by hand: completions of 3, 1 and no trained tokens, of at most 4."""
    mask = np.arange(4) < np.array([[3], [1], [0]])
    expected = {
        "grpo": [1 / 9, 1 / 3],
        "gspo": [1 / 9, 1 / 3],
        "rloo": [1 / 9, 1 / 3],
        "bnpo": [1 / 4, 1 / 4],
        "dapo": [1 / 4, 1 / 4],
        "cispo": [1 / 4, 1 / 4],
        "dr_grpo": [1 / 12, 1 / 12],
        "luspo": [1 / 3, 1 / 3],
    }
    for loss_type, per_row in expected.items():
        weights = token_weights(mask, loss_type, 4)
        assert weights.dtype == np.float32
        assert weights[:2, 0].tolist() == pytest.approx(per_row), loss_type
        assert not weights[~mask].any() and weights[0, :3].tolist() == [weights[0, 0]] * 3
    empty = [token_weights(np.zeros((2, 4)), loss_type, 4) for loss_type in expected]
    assert not np.any(empty)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="2 weights for 3"):
        combined_rewards(rewards_by_function(), [1.0, 2.0])
    with pytest.raises(ValueError, match="'groups', not one of group"):
        group_advantages(np.zeros((1, 2)), "groups")
    with pytest.raises(ValueError, match="max_completion_length"):
        token_weights(np.ones((1, 2)), "dr_grpo")
