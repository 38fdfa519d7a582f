"""Pass rates with intervals over prompts, because the samples of one prompt are not independent.

pass@k: Chen et al., Evaluating Large Language Models Trained on Code (2021), arXiv:2107.03374, equation 1.
Wilson's interval: Wilson (1927), JASA 22. With the effective sample size of clustered samples, as in surveys:
Korn and Graubard (1998), Survey Methodology 24; Franco et al. (2019), J. Survey Statistics and Methodology 7.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

Z95 = 1.959963984540054
"""The standard normal distribution's quantile for a two-sided 95 % interval."""

DRAWS = 4_000_000
"""The largest number of random draws of one bootstrap; they take about a second."""


@dataclass(frozen=True)
class MeanEstimate:
    """A mean over prompts, and the ends of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """A paired difference of means over the same prompts.

    Attributes:
        value, low, high: the mean and the ends of its 95 % interval.
        better, worse: number of prompts where the second side is above, and below, the first.
        p_value: of the two-sided sign test on them; with one sample per prompt it is McNemar's exact test.
    """

    value: float
    low: float
    high: float
    better: int
    worse: int
    p_value: float


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Estimate without bias the chance that one of k samples passes, given that `passed` of `samples` did.

    Raises:
        ValueError: there are fewer than k samples, or `passed` is larger than `samples`.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {passed} in {samples}")
    return float(1 - Fraction(math.comb(samples - passed, k), math.comb(samples, k)))


def ladder(samples: int) -> list[int]:
    """Return the values of k for which pass@k is reported: 1, 2, 5, 10, 20 ... and `samples` itself."""
    steps = (digit * 10**power for power in range(len(str(samples))) for digit in (1, 2, 5))
    return [*(k for k in steps if k < samples), samples]


def mean_rate(rates: Sequence[float]) -> MeanEstimate:
    """Return the mean of a rate over prompts, with Wilson's interval at the effective sample size.

    The effective size is the size of a simple random sample with the same variance as these prompts, and at
    least their number. If all rates are 0 or 1, it equals their number, which gives Wilson's own interval.

    Args:
        rates: one value between 0 and 1 for each prompt; at least one.
    """
    count = len(rates)
    mean = math.fsum(rates) / count
    if count < 2 or all(rate in (0, 1) for rate in rates):
        return wilson(mean, count)
    variance = math.fsum((rate - mean) ** 2 for rate in rates) / (count - 1) / count
    return wilson(mean, max(float(count), mean * (1 - mean) / variance if variance else 0.0))


def wilson(share: float, size: float) -> MeanEstimate:
    """Return Wilson's score interval of a share observed in a sample of `size`."""
    square = Z95 * Z95
    middle = (share + square / (2 * size)) / (1 + square / size)
    half = Z95 / (1 + square / size) * math.sqrt(share * (1 - share) / size + square / (4 * size * size))
    return MeanEstimate(share, max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)))


def normal(mean: float, standard_error: float) -> MeanEstimate:
    """Return the 95 % interval of a mean with a known standard error."""
    return MeanEstimate(mean, mean - Z95 * standard_error, mean + Z95 * standard_error)


def paired(first: Sequence[float], second: Sequence[float], seed: int = 0) -> Difference:
    """Return the mean of second - first over prompts, with a percentile bootstrap interval over prompts.

    Args:
        first, second: a value for each prompt, in the same order; at least one.
        seed: of the resampling; the same seed and numbers give the same interval.
    """
    deltas = [b - a for a, b in zip(first, second, strict=True)]
    count = len(deltas)
    rounds = max(1000, min(10_000, DRAWS // count))
    draw = random.Random(seed)
    means = [math.fsum(draw.choices(deltas, k=count)) / count for _ in range(rounds)]
    cuts = statistics.quantiles(means, n=40, method="inclusive")
    better, worse = sum(delta > 0 for delta in deltas), sum(delta < 0 for delta in deltas)
    return Difference(
        math.fsum(deltas) / count,
        cuts[0],
        cuts[-1],
        better,
        worse,
        sign_test(better, worse),
    )


def sign_test(better: int, worse: int) -> float:
    """Return the probability of a split at least this uneven if both outcomes are equally likely."""
    count = better + worse
    tail = sum(math.comb(count, i) for i in range(min(better, worse) + 1))
    return float(min(Fraction(1), Fraction(2 * tail, 2**count)))
