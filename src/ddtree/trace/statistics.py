"""Intervals and tests by which runs are held against each other."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

RARE = 5  # cells with fewer expected draws are pooled, as the G-test asks for


def paired_interval(
    first: Sequence[float], second: Sequence[float], weights: Sequence[tuple[float, float]] | None = None,
    repeats: int = 10_000, seed: int = 0,
) -> tuple[float, float]:  # fmt: skip
    """95 % bootstrap interval of mean(first) - mean(second) over prompts drawn together.

    With `weights` the entries are tokens and the weights rounds, so that the means are pooled
    accept lengths: tokens of the drawn prompts over their rounds.
    """
    rounds = weights or [(1.0, 1.0)] * len(first)
    generator = random.Random(seed)
    indices = range(len(first))
    differences = []
    for _ in range(repeats):
        drawn = generator.choices(indices, k=len(first))
        mean_first = sum(first[i] for i in drawn) / sum(rounds[i][0] for i in drawn)
        mean_second = sum(second[i] for i in drawn) / sum(rounds[i][1] for i in drawn)
        differences.append(mean_first - mean_second)
    differences.sort()
    return differences[int(0.025 * repeats)], differences[int(0.975 * repeats) - 1]


class GTest(NamedTuple):
    """A G-test summed over independent tables; `p_value` is None where there were too few draws."""

    statistic: float
    degrees_of_freedom: int
    num_contexts: int
    num_draws: int
    p_value: float | None


Draws = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Sampled outputs, each a prompt and its tokens."""


def compare_draws(first: Draws, second: Draws) -> GTest:
    """Whether two sets of sampled outputs come from one distribution.

    Given the tokens before it, a draw depends on nothing else. So for each prompt and beginning of an
    output that both sets have often enough, how often each token came next is held against the other
    set's counts (G-test of homogeneity), and the statistics of these tables add up.
    """
    statistic, freedom, contexts, draws = 0.0, 0, 0, 0
    for counts in _contexts(_by_prompt(first), _by_prompt(second)):
        table_statistic, table_freedom = homogeneity(*counts)
        if table_freedom:
            statistic, freedom = statistic + table_statistic, freedom + table_freedom
            contexts, draws = contexts + 1, draws + counts[0].total() + counts[1].total()
    p_value = chi_squared_tail(statistic, freedom) if freedom else None
    return GTest(statistic, freedom, contexts, draws, p_value)


def _by_prompt(draws: Draws) -> dict[tuple[int, ...], list[Sequence[int]]]:
    found: dict[tuple[int, ...], list[Sequence[int]]] = {}
    for prompt, tokens in draws:
        found.setdefault(tuple(prompt), []).append(tokens)
    return found


def _contexts(
    first: dict[tuple[int, ...], list[Sequence[int]]], second: dict[tuple[int, ...], list[Sequence[int]]]
) -> Iterator[tuple[Counter[int], Counter[int]]]:
    """Counts of the next token, of both sets, after each beginning that both have."""
    groups = [(first[prompt], second[prompt], 0) for prompt in sorted(set(first) & set(second))]
    while groups:
        one, other, place = groups.pop()
        counts = (_next_tokens(one, place), _next_tokens(other, place))
        yield counts
        for token in sorted(set(counts[0]) & set(counts[1])):
            if min(counts[0][token], counts[1][token]) >= RARE:
                groups.append((_with(one, place, token), _with(other, place, token), place + 1))


def _next_tokens(outputs: Sequence[Sequence[int]], place: int) -> Counter[int]:
    return Counter(tokens[place] for tokens in outputs if len(tokens) > place)


def _with(outputs: Sequence[Sequence[int]], place: int, token: int) -> list[Sequence[int]]:
    return [tokens for tokens in outputs if len(tokens) > place and tokens[place] == token]


def homogeneity(first: Counter[int], second: Counter[int]) -> tuple[float, int]:
    """G statistic, with Williams' correction for small counts, and degrees of freedom of two sets of counts.

    Cells that should have fewer than `RARE` draws in a set go together. (0, 0) where too few are left.
    """
    totals = (first.total(), second.total())
    if min(totals) == 0:
        return 0.0, 0
    smaller = min(totals) / sum(totals)
    often: list[tuple[int, int]] = []
    rare = (0, 0)
    for token in sorted(set(first) | set(second)):
        cell = (first[token], second[token])
        if smaller * sum(cell) >= RARE:
            often.append(cell)
        else:
            rare = (rare[0] + cell[0], rare[1] + cell[1])
    if smaller * sum(rare) >= RARE:
        often.append(rare)
    if len(often) < 2:
        return 0.0, 0
    kept = [sum(cell[side] for cell in often) for side in (0, 1)]
    if min(kept) == 0:
        return 0.0, 0
    number, statistic = sum(kept), 0.0
    for cell in often:
        for side in (0, 1):
            if cell[side]:
                expected = sum(cell) * kept[side] / number
                statistic += 2 * cell[side] * math.log(cell[side] / expected)
    freedom = len(often) - 1
    spread = [number * sum(1 / total for total in sums) - 1 for sums in (kept, map(sum, often))]
    return statistic / (1 + spread[0] * spread[1] / (6 * number * freedom)), freedom


def chi_squared_tail(statistic: float, degrees_of_freedom: int) -> float:
    """The chance that a chi-squared number of so many degrees of freedom exceeds `statistic`."""
    import torch

    half = torch.tensor([degrees_of_freedom / 2, max(statistic, 0.0) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
