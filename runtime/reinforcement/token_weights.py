"""The weight of each completion token in a step's loss.

Every loss type adds up the losses of tokens, each with a weight: a share of its completion, of the step's
tokens, or of a fixed length. The host computes the weights from the whole step's completions before the step.
So the loss is the same however the completions are put into micro-batches and rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .loss_types import LOSS_TYPES

Array = np.ndarray


def trained_mask(mask: Array, truncated: Array | None = None) -> Array:
    """Return bool[rows, tokens], the tokens that are trained, without truncated completions.

    TRL's mask_truncated_completions: the completions still count as rows, and their rewards in their groups.

    Args:
        mask: bool[rows, tokens], the tokens of completions.
        truncated: bool[rows], completions that were cut off at the maximum length; None to train them too.
    """
    mask = np.asarray(mask, bool)
    return mask if truncated is None else mask & ~np.asarray(truncated, bool)[:, None]


def token_weights(mask: Array, loss_type: str, max_completion_length: int | None = None) -> Array:
    """Return float32[rows, tokens], each token's weight in the loss of a whole optimizer step; 0 outside of
    the mask. The losses of tokens, multiplied by their weights and added up, are the step's loss.

    Args:
        mask: bool[rows, tokens], the trained tokens of all completions of the step, a completion in each row.
            Rows that only fill up a micro-batch must not be among them: each row counts as a completion.
        loss_type: a name of LOSS_TYPES.
        max_completion_length: in tokens, for dr_grpo.

    Raises:
        ValueError: max_completion_length is missing.
    """
    mask = np.asarray(mask, bool)
    per_row = AGGREGATIONS[LOSS_TYPES[loss_type].aggregation](mask.sum(1), max_completion_length)
    return np.where(mask, per_row[:, None], 0.0).astype(np.float32)


def _sequence_mean(lengths: Array, _: int | None) -> Array:
    """Average over the tokens of each completion, then over completions."""
    return 1.0 / (np.maximum(lengths, 1) * max(len(lengths), 1))


def _token_mean(lengths: Array, _: int | None) -> Array:
    """Average over all tokens."""
    return np.full(len(lengths), 1.0 / max(lengths.sum(), 1))


def _token_sum(lengths: Array, _: int | None) -> Array:
    """Add up the tokens of each completion, and average over completions."""
    return np.full(len(lengths), 1.0 / max(len(lengths), 1))


def _fixed_length(lengths: Array, max_completion_length: int | None) -> Array:
    """Divide by the maximum length instead of a completion's own, and average over completions."""
    if max_completion_length is None:
        raise ValueError("this aggregation needs max_completion_length")
    return np.full(len(lengths), 1.0 / (max(len(lengths), 1) * max_completion_length))


AGGREGATIONS: dict[str, Callable[[Array, int | None], Array]] = {
    "sequence_mean": _sequence_mean,
    "token_mean": _token_mean,
    "token_sum": _token_sum,
    "fixed_length": _fixed_length,
}
"""(the lengths of completions int[rows], the maximum length) -> the weight of a token of each,
float64[rows]."""
