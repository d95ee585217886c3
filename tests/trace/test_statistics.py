"""Intervals and G-tests: known values, and how often equal distributions look different."""

import random
from collections import Counter

import pytest

from ddtree.trace.statistics import chi_squared_tail, compare_draws, homogeneity, paired_interval


def test_intervals_of_pairs_hold_the_difference():
    generator = random.Random(1)
    first = [generator.gauss(3.0, 0.5) for _ in range(200)]
    second = [value - 0.2 + generator.gauss(0.0, 0.05) for value in first]
    low, high = paired_interval(first, second)
    assert low < 0.2 < high
    assert high - low < 0.03  # far narrower than of two samples that are not paired


def test_weights_pool_tokens_over_rounds():
    low, high = paired_interval([30, 10], [20, 20], [(10, 10), (5, 10)])
    assert low == pytest.approx(0.0)  # the second prompt alone: 2 less 2
    assert high == pytest.approx(1.0)  # the first alone: 3 less 2


@pytest.mark.parametrize(("statistic", "freedom", "tail"), [(3.841, 1, 0.05), (11.07, 5, 0.05), (0, 3, 1.0)])
def test_tails_of_chi_squared(statistic, freedom, tail):
    assert chi_squared_tail(statistic, freedom) == pytest.approx(tail, abs=1e-4)


def test_a_table_worked_by_hand():
    # G = 2 (30 ln(30/40) + 70 ln(70/60) + 50 ln(50/40) + 50 ln(50/60)) = 8.4022
    # Williams: 1 + (200 (1/100 + 1/100) - 1) (200 (1/80 + 1/120) - 1) / (6 * 200) = 1.007917
    statistic, freedom = homogeneity(Counter({1: 30, 2: 70}), Counter({1: 50, 2: 50}))
    assert (statistic, freedom) == (pytest.approx(8.4022 / 1.007917, abs=5e-4), 1)


def test_rare_tokens_go_together():
    first, second = Counter({1: 50, 2: 2, 3: 3, 4: 2}), Counter({1: 50, 5: 4, 6: 3})
    _, freedom = homogeneity(first, second)
    assert freedom == 1
    assert homogeneity(Counter({1: 3}), Counter({1: 3})) == (0.0, 0)
    assert homogeneity(Counter(), Counter({1: 30})) == (0.0, 0)


def test_equal_distributions_rarely_look_different():
    generator = random.Random(7)

    def draws():
        return [((prompt,), generator.choices(range(6), [8, 5, 3, 2, 1, 1], k=3))
                for prompt in range(12) for _ in range(80)]  # fmt: skip

    tails = [compare_draws(draws(), draws()).p_value for _ in range(40)]
    assert min(tails) > 1e-4
    assert 8 < sum(tail < 0.5 for tail in tails) < 32
