"""Rows of the format unpaired_preference as a whole: how many answers are desirable."""

from __future__ import annotations


def balance(liked: int, others: int, weights: tuple[float, float]) -> tuple[str, str] | None:
    """What is to be said of how many answers of a run are desirable, as TRL's KTOTrainer weighs it: eq. 8 of
    Ethayarajh et al. 2024, which has the two kinds' losses between 1 : 1 and 4 : 3.

    Args:
        liked, others: desirable answers, and undesirable ones, of at least one in all.
        weights: train.desirable_weight and train.undesirable_weight.

    Returns:
        A sentence, and what to do; None where all is well.
    """
    if not liked or not others:
        kind = "desirable" if liked else "undesirable"
        what = "add answers of the other kind" + (", or learn these with objective: sft" if liked else "")
        return f"all {liked + others} answers are {kind}: there are no others to tell them from", what
    desirable, undesirable = weights
    low, high = (round(others * undesirable / liked * ratio, 2) for ratio in (1, 1.33))
    least, most = (round(liked * desirable / others / ratio, 2) for ratio in (1.33, 1))
    if liked == others or low <= desirable <= high or least <= undesirable <= most:
        return None
    return (
        f"desirable answers are {liked} of {liked + others}: KTO asks for a desirable_weight from {low:g} to "
        f"{high:g}, or an undesirable_weight from {least:g} to {most:g}",
        f"desirable_weight: {low:g}" if low > 0 else f"undesirable_weight: {most:g}",
    )
