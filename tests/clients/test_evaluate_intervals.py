"""Tests of the arithmetic of pass rates, against enumeration, scipy and simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from recipec.runtime.clients import intervals


@pytest.mark.parametrize("samples", [2, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(samples: int) -> None:
    for passed in range(samples + 1):
        outcomes = [True] * passed + [False] * (samples - passed)
        for k in range(1, samples + 1):
            subsets = [any(subset) for subset in itertools.combinations(outcomes, k)]
            assert intervals.pass_at_k(samples, passed, k) == pytest.approx(sum(subsets) / len(subsets))


def test_pass_at_k_is_accurate_for_many_samples() -> None:
    assert intervals.pass_at_k(10_000, 1, 1) == 1e-4
    assert intervals.pass_at_k(2000, 3, 1000) == pytest.approx(1 - 0.125, abs=1e-3)


@pytest.mark.parametrize(("samples", "ks"), [(1, [1]), (8, [1, 2, 5, 8]), (100, [1, 2, 5, 10, 20, 50, 100])])
def test_reported_k_values_go_up_to_the_sample_count(samples: int, ks: list[int]) -> None:
    assert intervals.ladder(samples) == ks


@pytest.mark.parametrize(("passed", "count"), [(0, 7), (7, 7), (120, 164)])
def test_one_sample_per_prompt_gives_scipys_wilson_interval(passed: int, count: int) -> None:
    from scipy import stats

    wanted = stats.binomtest(passed, count).proportion_ci(method="wilson")
    found = intervals.mean_rate([1.0] * passed + [0.0] * (count - passed))
    assert (found.value, found.low, found.high) == pytest.approx((passed / count, wanted.low, wanted.high))


def test_interval_of_clustered_samples_covers_the_true_rate() -> None:
    """Use prompts of different difficulty: an interval that ignores clusters would cover too rarely."""
    random = np.random.default_rng(0)
    prompts, samples, rounds = 40, 10, 2000
    covered = naive = 0
    for _ in range(rounds):
        rates = random.binomial(samples, random.beta(0.5, 1.0, prompts)) / samples
        found = intervals.mean_rate(rates.tolist())
        covered += found.low <= 1 / 3 <= found.high
        unclustered = intervals.wilson(float(rates.mean()), prompts * samples)
        naive += unclustered.low <= 1 / 3 <= unclustered.high
    assert 0.93 < covered / rounds < 0.98
    assert naive / rounds < 0.7


def test_the_paired_difference_agrees_with_scipys_bootstrap() -> None:
    from scipy import stats

    random = np.random.default_rng(1)
    first = random.binomial(5, 0.4, 60) / 5
    second = np.clip(first + random.choice([-0.2, 0, 0.2, 0.4], 60), 0, 1)
    found = intervals.paired(first.tolist(), second.tolist())
    wanted = stats.bootstrap(
        (second - first,), np.mean, method="percentile", n_resamples=10_000, rng=np.random.default_rng(2)
    ).confidence_interval
    assert found.value == pytest.approx((second - first).mean())
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=0.005)
    assert (found.better, found.worse) == (int((second > first).sum()), int((second < first).sum()))


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (3, 4), (20, 5)])
def test_sign_test_matches_scipys_binomial_test(better: int, worse: int) -> None:
    from scipy import stats

    wanted = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert intervals.sign_test(better, worse) == pytest.approx(wanted)
