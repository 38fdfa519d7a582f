"""Which plots of a run there are, and of which metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A plot's metrics: (name, what it is called), and how they are drawn.

    Attributes:
        scale: what values are divided by.
        mean: whether a trailing mean of the first is drawn, too.
    """

    key: str
    title: str
    what: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    scale: float = 1.0
    mean: bool = False
    logarithmic: bool = False
    floor: bool = False


KINDS = (
    Kind(
        "loss",
        "Loss",
        "Mean over the targets of a step, in nats a token; of the evaluation data at the steps where it was "
        "evaluated.",
        "loss",
        (("loss", "training"), ("eval_loss", "evaluation")),
        mean=True,
        logarithmic=True,
    ),
    Kind(
        "rewards",
        "Rewards",
        "Implicit rewards of the preferred and of the other answers: beta times the log probability's "
        "difference from the reference.",
        "reward",
        (("rewards_chosen", "chosen"), ("rewards_rejected", "rejected")),
    ),
    Kind(
        "margin",
        "Reward margin",
        "The chosen answers' reward less that of the rejected ones.",
        "reward",
        (("rewards_margin", "margin"),),
    ),
    Kind(
        "accuracy",
        "Reward accuracy",
        "Share of the pairs in which the chosen answer has the higher reward.",
        "share",
        (("rewards_accuracy", "accuracy"),),
        floor=True,
    ),
    Kind(
        "learning-rate",
        "Learning rate",
        "As the schedule gave it.",
        "learning rate",
        (("learning_rate", "learning rate"),),
        floor=True,
    ),
    Kind(
        "grad-norm",
        "Gradient norm",
        "Of the step's accumulated gradient, before clipping.",
        "norm",
        (("grad_norm", "gradient norm"),),
        mean=True,
        logarithmic=True,
    ),
    Kind(
        "speed",
        "Tokens a second",
        "Real tokens, over all devices. The first step after each start compiles.",
        "tokens/s",
        (("tokens_per_second", "tokens/s"),),
        floor=True,
    ),
    Kind(
        "step-time",
        "Step time",
        "Of an optimizer step, averaged over the steps between two readings of the devices.",
        "s",
        (("step_seconds", "step time"),),
        logarithmic=True,
        floor=True,
    ),
    Kind(
        "memory",
        "Peak memory",
        "Highest so far: of the fullest device, or of the process where devices do not count (CPU).",
        "GiB",
        (("peak_memory_bytes", "peak memory"),),
        scale=2**30,
        floor=True,
    ),
)
