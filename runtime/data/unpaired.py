"""Check how many answers of unpaired_preference rows are desirable."""

from __future__ import annotations


def balance(liked: int, others: int, weights: tuple[float, float]) -> tuple[str, str] | None:
    """Return a remark on the balance of desirable answers, by the rule of TRL's KTOTrainer: eq. 8 of
    Ethayarajh et al. 2024, which keeps the two kinds' losses between 1 : 1 and 4 : 3.

    Args:
        liked, others: number of desirable and of undesirable answers; at least one in total.
        weights: train.desirable_weight and train.undesirable_weight.

    Returns:
        A sentence, and what to do; None if the balance is good.
    """
    if not liked or not others:
        kind = "desirable" if liked else "undesirable"
        what = "add answers of the other kind" + (", or learn these with objective: sft" if liked else "")
        return f"all {liked + others} answers are {kind}: there are no others to compare them with", what
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
