"""What a run can learn: a row for each `train.objective`. Nothing here imports jax: the compiler reads it.

The losses are functions of those names: for JAX in preference.py, for PyTorch in backends/trl/objectives.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Objective:
    """What sets an objective apart.

    Attributes:
        title: for a model card.
        pairs: whether a sample is a preference: two rows, the chosen answer's and the rejected one's.
        reference: whether the model without its adapters is asked as well, by a forward pass of its own.
        likelihood: whether the chosen texts are learnt too, by the mean over a micro-batch's tokens. The loss
            of a step hangs on how many rows its micro-batches have then.
        settings: keys of `train` that it alone reads.
    """

    title: str
    pairs: bool = False
    reference: bool = False
    likelihood: bool = False
    settings: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of a sample."""
        return 2 if self.pairs else 1

    @property
    def forward_passes(self) -> int:
        """Of a micro-batch through the model."""
        return 2 if self.reference else 1


OBJECTIVES = {
    "sft": Objective("supervised fine-tuning", settings=("label_smoothing", "z_loss", "neftune_noise_alpha")),
    "dpo": Objective(
        "direct preference optimisation (DPO)",
        pairs=True,
        reference=True,
        settings=("beta", "label_smoothing"),
    ),
    "orpo": Objective("odds ratio preferences (ORPO)", pairs=True, likelihood=True, settings=("beta",)),
}
