"""The losses of policies by their names, with TRL's names and formulas. Only the standard library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossType:
    """How the losses of tokens are computed, and how they are added up.

    Attributes:
        aggregation: a name of `token_weights.AGGREGATIONS`.
        ratio: what is divided by its probability under the policy that sampled it: "token"; "sequence", the
            geometric mean over a completion's tokens; or "sequence_product", the whole completion.
        clips_gradient: whether the surrogate is clipped, as PPO clips it. Otherwise the ratio is a weight
            without a gradient, of at most epsilon_high.
        penalizes_reward: whether beta times the divergence from the reference is subtracted from the reward,
            summed over a completion, instead of added to the loss.
    """

    aggregation: str
    ratio: str = "token"
    clips_gradient: bool = True
    penalizes_reward: bool = False


LOSS_TYPES = {
    "grpo": LossType("sequence_mean"),
    "bnpo": LossType("token_mean"),
    "dapo": LossType("token_mean"),
    "dr_grpo": LossType("fixed_length"),
    "luspo": LossType("token_sum", ratio="sequence"),
    "gspo": LossType("sequence_mean", ratio="sequence"),
    "cispo": LossType("token_mean", clips_gradient=False),
    "rloo": LossType("sequence_mean", ratio="sequence_product", penalizes_reward=True),
}
"""Shao et al. 2024 (GRPO), Xiao et al. 2025 (BNPO), Yu et al. 2025 (DAPO), Liu et al. 2025 (Dr. GRPO), Zheng
et al. 2025 (GSPO), MiniMax 2025 (CISPO), Ahmadian et al. 2024 (RLOO), and TRL's luspo.

TRL's bnpo averages over the tokens of each micro-batch. Averaged over those of the whole step, as here, it is
dapo. In TRL, gspo is the loss_type grpo with importance_sampling_level "sequence", and luspo's level is
"token" unless the config sets it."""

RATIOS = ("token", "sequence", "sequence_product")
KL_ESTIMATORS = ("k3", "k1")


@dataclass(frozen=True)
class LossSettings:
    """The settings of a policy's loss.

    Attributes:
        loss_type: a name of LOSS_TYPES.
        epsilon: the ratio is clipped at 1 - epsilon.
        epsilon_high: the ratio is clipped at 1 + epsilon_high; None for epsilon. For cispo, which clips only
            above, the largest ratio itself.
        beta: weight of the divergence from the reference, in each token's loss.
        kl: the estimator of that divergence (Schulman 2020), in nats a token: k3, never negative, or k1, the
            difference of the log-probabilities.
        kl_bias_correction: multiply the estimate by the ratio (DeepSeek-V3.2, section 3.1), so that its
            gradient is the divergence's. The gradient of k1 has expectation 0 without it.
        ratio: a name of RATIOS in place of the loss type's; None for the loss type's.
    """

    loss_type: str = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    kl: str = "k3"
    kl_bias_correction: bool = True
    ratio: str | None = None
