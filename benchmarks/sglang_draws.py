"""Sampling cases, what each draw's distribution must be, and G-tests of draws; numpy alone, no SGLang.

Where penalties count a request's own output, no two draws have the same distribution. So each draw x becomes
u = F(x-) + v P(x) with v uniform: if x was drawn from P, u is uniform whatever P was, and independent of all
u before it (the randomised probability integral transform). P is worked out in float64 after the request's
own tokens, in the order of SGLang's plain decoding without overlap. F may run through the tokens in any order
that is fixed before the draw; two are used, each of which gathers other faults at one end:

    likely   the most probable token first: a preference for drafts, or a cut that is off
    recent   the token drawn last first, then the one before: counts that are missing

What counts get wrong by a round is a few tokens' share alone, so how often a token was the one drawn just
before, or two before, and so on, is held against the sum of those tokens' probabilities too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

BINS, PAIR_BINS, PLACE_BINS, INDEX_BINS = 32, 8, 16, 8
LAGS = 6
RARE = 5  # cells with fewer expected draws are pooled, as the G-test asks for
RARE_REPEATS = 25  # lags with fewer expected repeats are left out
# Indices with fewer draws are left out: over hundreds of small rows the G-test's own error adds up.
RARE_INDEX = 20 * INDEX_BINS
NEAR = 1e-5  # a cut this close to a token is left to rounding
SIGNIFICANCE = 1e-4  # over all tests of a run
STOPS = (5, 11, 17, 23, 29, 35, 41, 47)
HISTORY = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens")

Sampling = Mapping[str, Any]  # SGLang's sampling parameters


@dataclass(frozen=True, slots=True)
class Case:
    """Requests whose sampling parameters take turns, each of about so many tokens."""

    sampling: tuple[Sampling, ...]
    tokens: int = 200


KINDS: Mapping[str, Case] = {
    "temperature 0.7": Case(({"temperature": 0.7},)),
    "temperature 1.3": Case(({"temperature": 1.3},)),
    "top_k": Case(({"temperature": 1.0, "top_k": 12},)),
    "top_p": Case(({"temperature": 1.0, "top_p": 0.8},)),
    "top_k top_p": Case(({"temperature": 1.2, "top_k": 20, "top_p": 0.75},)),
    "min_p": Case(({"temperature": 1.0, "min_p": 0.12},)),
    "frequency": Case(({"temperature": 1.0, "frequency_penalty": 0.6},), 120),
    "presence": Case(({"temperature": 1.0, "presence_penalty": 1.1},), 60),
    "repetition": Case(({"temperature": 1.0, "repetition_penalty": 1.7},), 60),
    "min_new_tokens": Case(
        ({"temperature": 1.0, "min_new_tokens": 60, "stop_token_ids": list(STOPS)},), 120
    ),
    "logit_bias": Case(({"temperature": 1.0, "logit_bias": {"9": 2.5, "20": 1.5, "33": -3.0}},)),
}  # fmt: skip
EVERYTHING: Sampling = {
    "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "frequency_penalty": 0.13,
    "presence_penalty": 0.21, "repetition_penalty": 1.11, "min_new_tokens": 40, "stop_token_ids": list(STOPS),
    "logit_bias": {"9": 1.5, "40": -1.0},
}  # fmt: skip
CASES: Mapping[str, Case] = {
    **KINDS,
    "all at once": Case((EVERYTHING,), 120),
    "mixed": Case((*(s for case in KINDS.values() for s in case.sampling), EVERYTHING), 120),
}


class Distributions(NamedTuple):
    """What a request's draws must be distributed as."""

    probs: np.ndarray  # [T, V] float64
    is_near: np.ndarray  # [T] bool: rounding may decide what is cut


class Uniforms(NamedTuple):
    """The draws of one request, transformed."""

    likely: np.ndarray  # [T] in [0, 1)
    recent: np.ndarray  # [T]
    is_used: np.ndarray  # [T] bool: neither left to rounding nor impossible
    num_impossible: int
    repeats: Repeats


class Repeats(NamedTuple):
    """How often a draw was the token drawn `lag` draws before, and not again since; sums over used draws."""

    seen: np.ndarray  # [LAGS]
    expected: np.ndarray  # [LAGS]
    covariance: np.ndarray  # [LAGS, LAGS]


# --- the reference ---


def distributions(logits: np.ndarray, sampling: Sampling, tokens: np.ndarray, eos: int) -> Distributions:
    """The distribution of each of a request's tokens [T] after those before it; `logits` [V] are constant."""
    num_tokens, vocab = len(tokens), len(logits)
    drawn = np.eye(vocab)[tokens]  # [T, V]
    counts = drawn.cumsum(0) - drawn  # of the output before each draw
    x = np.tile(logits.astype(np.float64), (num_tokens, 1))
    x -= counts * sampling.get("frequency_penalty", 0.0)
    x -= (counts > 0) * sampling.get("presence_penalty", 0.0)
    stops = [eos, *sampling.get("stop_token_ids", ())]
    x[: sampling.get("min_new_tokens", 0), stops] = -np.inf
    factor = sampling.get("repetition_penalty", 1.0)
    x = np.where(counts > 0, np.where(x < 0, x * factor, x / factor), x)
    for token, bias in sampling.get("logit_bias", {}).items():
        x[:, int(token)] += bias
    weights = np.exp((x - x.max(1, keepdims=True)) / sampling["temperature"])
    return cut(weights / weights.sum(1, keepdims=True), sampling)


def cut(probs: np.ndarray, sampling: Sampling) -> Distributions:
    """What top-k, top-p and min-p leave of `probs` [T, V], each of the whole distribution."""
    order = np.argsort(-probs, axis=1, kind="stable")
    ordered = np.take_along_axis(probs, order, 1)
    before = ordered.cumsum(1) - ordered
    is_near = np.zeros(len(probs), bool)
    stays = np.ones(probs.shape, bool)
    top_k, top_p, min_p = (sampling.get(name) for name in ("top_k", "top_p", "min_p"))
    if top_k is not None:
        stays[:, top_k:] = False
        is_near |= ordered[:, top_k - 1] <= ordered[:, top_k] * (1 + NEAR)
    if top_p is not None:
        stays &= before <= top_p
        is_near |= (abs(before - top_p) < NEAR).any(1)
    if min_p is not None:
        limits = ordered[:, :1] * min_p
        stays &= ordered >= limits
        is_near |= (abs(ordered - limits) < NEAR * limits).any(1)
    kept = np.zeros_like(probs)
    np.put_along_axis(kept, order, np.where(stays, ordered, 0.0), 1)
    return Distributions(kept / kept.sum(1, keepdims=True), is_near)


def transform(
    logits: np.ndarray, sampling: Sampling, tokens: np.ndarray, eos: int, generator: np.random.Generator
) -> Uniforms:
    """A request's tokens [T] as uniforms; impossible and undecided ones are to be left out."""
    reference = distributions(logits, sampling, tokens, eos)
    probs = reference.probs
    likely = uniforms(probs, -probs, tokens, generator.random(len(tokens)))
    recent = uniforms(probs, -last_places(tokens, len(logits)), tokens, generator.random(len(tokens)))
    is_impossible = (probs[np.arange(len(tokens)), tokens] == 0) & ~reference.is_near
    is_used = ~reference.is_near & ~is_impossible
    return Uniforms(likely, recent, is_used, int(is_impossible.sum()), repeats(probs, tokens, is_used))


def uniforms(probs: np.ndarray, keys: np.ndarray, tokens: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """u [T] of `tokens` [T], F running in ascending order of `keys` [T, V], then of token ids."""
    rows = np.arange(len(tokens))
    own = keys[rows, tokens][:, None]
    is_before = (keys < own) | ((keys == own) & (np.arange(probs.shape[1]) < tokens[:, None]))
    return (probs * is_before).sum(1) + inner * probs[rows, tokens]


def repeats(probs: np.ndarray, tokens: np.ndarray, is_used: np.ndarray) -> Repeats:
    """Repeats among the `is_used` [T] of `tokens` [T], whose distributions are `probs` [T, V]."""
    vocab = probs.shape[1]
    places = last_places(tokens, vocab)
    lags = np.where(places < 0, 0, np.arange(len(tokens))[:, None] - places)  # [T, V]
    of_lag = np.stack([(probs * (lags == lag)).sum(1) for lag in range(1, LAGS + 1)], 1)[is_used]
    own = lags[np.arange(len(tokens)), tokens][is_used]
    seen = np.bincount(own, minlength=LAGS + 1)[1 : LAGS + 1]
    expected = of_lag.sum(0)
    return Repeats(seen, expected, np.diag(expected) - of_lag.T @ of_lag)


def last_places(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """Where each token was drawn last before each draw, [T, V], -1 for never."""
    places = np.where(np.eye(vocab, dtype=bool)[tokens], np.arange(len(tokens))[:, None], -1)
    until = np.maximum.accumulate(places, 0)
    return np.vstack((np.full((1, vocab), -1), until[:-1]))


def draw_places(num_tokens: int, accept_lens: Sequence[int]) -> np.ndarray:
    """Where each of a request's tokens was drawn, [T]: 0 at the prefill's end, 1 at a root, 2 below it.

    Raises:
        ValueError: the rounds do not commit that many tokens.
    """
    places = [0, *(place for length in accept_lens for place in range(1, length + 1))]
    if len(places) < num_tokens:
        raise ValueError(f"{num_tokens} tokens, but the rounds commit {len(places)}")
    return np.array(places[:num_tokens])


# --- G-tests ---


def g_test(counts: np.ndarray, probs: np.ndarray) -> float | None:
    """p-value of counts [rows, cells] against `probs` [cells], given row sums; None for too few draws."""
    statistic, dof = 0.0, 0
    for row in np.atleast_2d(counts):
        expected = probs * row.sum()
        is_rare = expected < RARE
        observed = np.append(row[~is_rare], row[is_rare].sum())
        expected = np.append(expected[~is_rare], expected[is_rare].sum())
        seen = observed > 0
        statistic += 2 * float((observed[seen] * np.log(observed[seen] / expected[seen])).sum())
        dof += max(int((expected > 0).sum()) - 1, 0)
    return chi_squared_tail(statistic, dof) if dof else None


def repeat_test(repeats: Repeats) -> float | None:
    """p-value of the repeats of all lags that are expected often enough; None without any."""
    often = repeats.expected >= RARE_REPEATS
    if not often.any():
        return None
    excess = (repeats.seen - repeats.expected)[often]
    covariance = repeats.covariance[np.ix_(often, often)]
    solution, _, rank, _ = np.linalg.lstsq(covariance, excess, rcond=None)
    return chi_squared_tail(float(excess @ solution), int(rank)) if rank else None


def chi_squared_tail(statistic: float, dof: int) -> float:
    """The chance that a chi-squared number of `dof` degrees of freedom exceeds `statistic`."""
    half = torch.tensor([dof / 2, max(statistic, 0.0) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def binned(values: np.ndarray, bins: int) -> np.ndarray:
    """Bin [n] int64 of each value in [0, 1)."""
    return np.minimum((values * bins).astype(np.int64), bins - 1)


class Tally:
    """The draws of one case, and their tests.

    Args:
        constant: the distribution [V] of all draws, None where it depends on what was drawn before.
    """

    def __init__(self, constant: np.ndarray | None) -> None:
        self.constant = constant
        self.num_draws = self.num_near = self.num_impossible = 0
        self.likely = np.zeros(BINS, np.int64)
        self.recent = np.zeros(BINS, np.int64)
        self.pairs = np.zeros(PAIR_BINS**2, np.int64)
        self.places = np.zeros((0, PLACE_BINS), np.int64)
        self.indices = np.zeros((0, INDEX_BINS), np.int64)
        self.repeats = Repeats(np.zeros(LAGS), np.zeros(LAGS), np.zeros((LAGS, LAGS)))
        self.tokens = None if constant is None else np.zeros(len(constant), np.int64)

    def add(self, tokens: np.ndarray, drawn: Uniforms, places: np.ndarray | None, first_pair: int) -> None:
        """Count a request's tokens [T]; neighbours are paired from `first_pair` on, none of them twice."""
        used = drawn.is_used
        self.num_draws += len(tokens)
        self.num_impossible += drawn.num_impossible
        self.num_near += len(tokens) - int(used.sum()) - drawn.num_impossible
        self.likely += np.bincount(binned(drawn.likely[used], BINS), minlength=BINS)
        self.recent += np.bincount(binned(drawn.recent[used], BINS), minlength=BINS)
        self.repeats = Repeats(*(a + b for a, b in zip(self.repeats, drawn.repeats, strict=True)))
        cells = binned(drawn.likely, PAIR_BINS)
        ends = len(tokens) - 1
        left, right = np.arange(first_pair, ends, 2), np.arange(first_pair + 1, ends + 1, 2)
        both = used[left] & used[right]
        flat = (cells[left] * PAIR_BINS + cells[right])[both]
        self.pairs += np.bincount(flat, minlength=len(self.pairs))
        if self.tokens is not None:
            self.tokens += np.bincount(tokens, minlength=len(self.tokens))
        self.indices = with_rows(self.indices, np.arange(len(tokens))[used], drawn.likely[used])
        if places is not None:
            self.places = with_rows(self.places, places[used], drawn.likely[used])

    def p_values(self) -> dict[str, float]:
        """p-value of each test that has draws enough."""
        found = {
            "likely": g_test(self.likely, even(BINS)),
            "recent": g_test(self.recent, even(BINS)),
            "pairs": g_test(self.pairs, even(PAIR_BINS**2)),
            "repeats": repeat_test(self.repeats),
            "places": g_test(self.places, even(PLACE_BINS)),
            "indices": g_test(self.indices[self.indices.sum(1) >= RARE_INDEX], even(INDEX_BINS)),
        }
        if self.tokens is not None and self.num_impossible == 0:
            found["tokens"] = g_test(self.tokens, self.constant)
        return {name: value for name, value in found.items() if value is not None}

    def smallest_p(self) -> float:
        """The smallest p-value; 0 where something impossible was drawn."""
        return 0.0 if self.num_impossible else min(self.p_values().values())


def with_rows(table: np.ndarray, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """`table` [rows, bins], longer where needed, with each of `values` [n] in its row of `rows` [n]."""
    missing = max(int(rows.max(initial=-1)) + 1 - len(table), 0)
    grown = np.pad(table, ((0, missing), (0, 0)))
    np.add.at(grown, (rows, binned(values, table.shape[1])), 1)
    return grown


def even(cells: int) -> np.ndarray:
    return np.full(cells, 1 / cells)


def tally(
    logits: np.ndarray, eos: int, requests: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]],
    rounds: Mapping[str, Sequence[int]] | None,
) -> Tally:  # fmt: skip
    """Count every token of `answers`; `rounds` has accept lengths by a request's seed, None without trees.

    Raises:
        ValueError: a request has an error, or fewer tokens than it asked for.
    """
    kinds = [request["sampling"] for request in requests]
    constant = None
    if all(kind_of(kind) == kind_of(kinds[0]) for kind in kinds) and not set(HISTORY) & set(kinds[0]):
        constant = distributions(logits, kinds[0], np.array([0]), eos).probs[0]
    counted = Tally(constant)
    for number, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        sampling, tokens = request["sampling"], np.array(answer.get("tokens", []), np.int64)
        if "error" in answer or len(tokens) != sampling["max_new_tokens"]:
            wanted = sampling["max_new_tokens"]
            raise ValueError(f"{len(tokens)} of {wanted} tokens: {answer.get('error', answer.get('finish'))}")
        seed = sampling["sampling_seed"]
        places = None if rounds is None else draw_places(len(tokens), rounds[str(seed)])
        drawn = transform(logits, sampling, tokens, eos, np.random.default_rng([seed, 1]))
        counted.add(tokens, drawn, places, number % 2)
    return counted


def kind_of(sampling: Sampling) -> dict[str, Any]:
    """Sampling parameters without what differs from request to request of one kind."""
    return {k: v for k, v in sampling.items() if k not in ("sampling_seed", "max_new_tokens")}
