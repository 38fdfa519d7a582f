"""What a run can learn: a row for each `train.objective`. Nothing here imports jax: the compiler reads it.

The losses of pairs are in pair_losses.py, that of single answers in unpaired.py; those of micro-batches in
step.py, preference.py and kto.py, and for PyTorch in backends/trl/objectives.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Objective:
    """What sets an objective apart.

    Attributes:
        title: for a model card.
        format: the `data.format` that it alone learns from; "" where samples are texts to write.
        losses: of which train.loss_type chooses one where `settings` has that, each with the keys of `train`
            that it alone reads; none where samples are texts to write. Of pairs they are keys of
            `pair_losses.PAIR_LOSSES`.
        reference: whether the model that training starts from is asked as well, by a forward pass of its own.
        likelihood: what of the chosen texts is learned too, times train.cpo_alpha: "text" with the prompt,
            "answer", or "" for nothing. It is the mean over a micro-batch's tokens, so that the loss of a
            step hangs on how many rows its micro-batches have.
        settings: keys of `train` that it reads, whatever its loss.
        mismatched: losses that also ask the models for prompts with other rows' answers, so that the loss of
            a step hangs on which rows its micro-batches have.
    """

    title: str
    format: str = ""
    losses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    reference: bool = False
    likelihood: str = ""
    settings: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()

    @property
    def pairs(self) -> bool:
        """Whether a sample is a preference: two rows, the chosen answer's and the rejected one's."""
        return self.format == "preference"

    @property
    def rows(self) -> int:
        """Rows of a sample."""
        return 2 if self.pairs else 1

    def forward_passes(self, loss_type: str) -> int:
        """Of a micro-batch through the model."""
        return (2 if self.reference else 1) * (2 if loss_type in self.mismatched else 1)

    def loss(self, loss_type: str) -> str | None:
        """The key of `losses` that train.loss_type means; None where there is no such loss."""
        name = loss_type if "loss_type" in self.settings else next(iter(self.losses), None)
        return name if name in self.losses else None

    def reads(self, loss_type: str) -> tuple[str, ...]:
        """The keys of `train` that it reads with a loss."""
        return *self.settings, *self.losses.get(str(self.loss(loss_type)), ())


OBJECTIVES = {
    "sft": Objective("supervised fine-tuning", settings=("label_smoothing", "z_loss", "neftune_noise_alpha")),
    "dpo": Objective(
        "direct preference optimization (DPO)",
        "preference",
        losses={
            **{name: ("label_smoothing",) for name in ("sigmoid", "robust")},
            **{name: () for name in ("sigmoid_norm", "hinge", "ipo", "apo_zero", "apo_down", "sppo_hard")},
        },
        reference=True,
        settings=("beta", "loss_type"),
    ),
    "cpo": Objective(
        "contrastive preference optimization (CPO)",
        "preference",
        losses={
            "sigmoid": ("label_smoothing",),
            **{"hinge": (), "ipo": ()},
            "simpo": ("simpo_gamma", "label_smoothing"),
        },
        likelihood="answer",
        settings=("beta", "loss_type", "cpo_alpha"),
    ),
    "orpo": Objective(
        "odds ratio preferences (ORPO)",
        "preference",
        losses={"odds_ratio": ()},
        likelihood="text",
        settings=("beta",),
    ),
    "kto": Objective(
        "Kahneman-Tversky optimization (KTO)",
        "unpaired_preference",
        losses={"kto": (), "apo_zero_unpaired": ()},
        reference=True,
        settings=("beta", "loss_type", "desirable_weight", "undesirable_weight"),
        mismatched=("kto",),
    ),
}

SETTINGS = tuple(
    dict.fromkeys(
        key for one in OBJECTIVES.values() for keys in (one.settings, *one.losses.values()) for key in keys
    )
)
"""Every key of `train` that some objective alone reads."""

QUIET = {"label_smoothing": 0.0, "z_loss": 0.0, "desirable_weight": 1.0, "undesirable_weight": 1.0}
"""Of them, what goes without saying; so does an objective's first loss."""


def keeps_copy(objective: str, lora: Any) -> bool:
    """Whether a run keeps what it starts from beside what it trains: an objective's reference, which of fresh
    adapters is the base without them, and of those of lora.start_from a copy, as in TRL."""
    return OBJECTIVES[objective].reference and (lora is None or lora.start_from is not None)


def settings_of(train: Mapping[str, Any]) -> str:
    """The keys of a recipe's `train` that its objective reads, in words: ", beta 0.1, loss_type ipo"."""
    objective = OBJECTIVES[train["objective"]]
    quiet = {**QUIET, "loss_type": next(iter(objective.losses), None)}
    read = objective.reads(train.get("loss_type", "sigmoid"))
    values = {key: train[key] for key in read if train.get(key) not in (None, quiet.get(key))}
    return "".join(
        f", {key} {value if isinstance(value, str) else format(value, 'g')}" for key, value in values.items()
    )
