"""Weights of sources by their sizes (data.temperature)."""

from __future__ import annotations

from collections.abc import Sequence


def tempered(sizes: Sequence[int], temperature: float) -> list[float]:
    """Return weights by which an epoch draws from each source in proportion to size ** (1 / temperature).

    The draws equal the samples in number, except for rounding; each nonempty source gives at least one. A
    temperature of 1 gives weights of 1; a higher temperature makes the sources' shares more equal (as
    multilingual BERT and T5 mix languages: https://arxiv.org/abs/2010.11934, section 3.2).

    Args:
        sizes: number of samples of each source.
    """
    largest = max(sizes)
    shares = [(size / largest) ** (1 / temperature) if size else 0.0 for size in sizes]
    scale = sum(sizes) / sum(shares)
    draws = [max(1, round(scale * share)) if size else 0 for share, size in zip(shares, sizes, strict=True)]
    return [drawn / size if size else 0.0 for drawn, size in zip(draws, sizes, strict=True)]
