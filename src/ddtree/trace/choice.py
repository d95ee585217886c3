"""What the target's logits say of an emitted token: processing step by step, and the gap to the best one.

Written apart from the engines' own choice on purpose, in the order of their plain decoding:

    embedded   bias, repetition (prompt and output), presence and frequency, temperature, top-k, top-p of
               what top-k left, min-p, draw
    sglang     frequency and presence, minimum length, repetition (output), grammar, bias, temperature,
               joint top-k and top-p, min-p, draw
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ddtree.trace.outputs import Order, Sampling

# Gap of a token that no logits within eps could have given: masked, or far outside top-k, top-p or min-p.
EXCLUDED = 1e6

Noise = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From int64 seeds [n], positions [n] and tokens [V] to the noise of a draw, [n, V] float64."""


def token_counts(tokens: Sequence[int], begin: int, end: int, vocab_size: int, device: Any) -> Tensor:
    """How often each token is among those before place i, for i in begin..end; [end - begin, V] float32."""
    counts = torch.zeros(end - begin, vocab_size, device=device)
    rows = torch.arange(1 - begin, end - begin, device=device).clamp(min=0)  # first row that counts a token
    columns = torch.tensor(tokens[: end - 1], dtype=torch.int64, device=device)
    return counts.index_put_((rows, columns), counts.new_ones(()), accumulate=True).cumsum(0)


def process(
    logits: Tensor,  # [n, V] float32, of places begin..begin + n of the output
    prompt: Sequence[int],
    tokens: Sequence[int],
    begin: int,
    sampling: Sampling,
    stop_tokens: Sequence[int],
    order: Order,
    allowed: Tensor | None = None,  # [n, V] bool
) -> Tensor:
    """Logits [n, V] after penalties, grammar and bias, before the temperature."""
    logits, counts = logits.clone(), None
    if sampling.counts_tokens:
        counts = token_counts(tokens, begin, begin + logits.shape[0], logits.shape[-1], logits.device)
    if order == "embedded":
        logits = _add_bias(logits, sampling)
        if counts is not None:
            seen = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
            seen[torch.tensor(prompt, device=logits.device)] = True
            logits = _repeat(logits, (counts > 0) | seen, sampling) - _subtracted(counts, sampling)
        return logits
    if counts is not None:
        logits -= _subtracted(counts, sampling)
    if sampling.min_new_tokens > begin:
        held_back = [*stop_tokens, *sampling.stop_token_ids]
        logits[: sampling.min_new_tokens - begin, held_back] = -math.inf
    if counts is not None:
        logits = _repeat(logits, counts > 0, sampling)
    if allowed is not None:
        logits.masked_fill_(~allowed, -math.inf)
    return _add_bias(logits, sampling)


def _subtracted(counts: Tensor, sampling: Sampling) -> Tensor:
    return sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)


def _repeat(logits: Tensor, is_seen: Tensor, sampling: Sampling) -> Tensor:
    penalty = sampling.repetition_penalty
    return torch.where(is_seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def _add_bias(logits: Tensor, sampling: Sampling) -> Tensor:
    for token, bias in sampling.logit_bias.items():
        logits[:, token] += bias
    return logits


def kept_sets(
    scaled: Tensor, sampling: Sampling, eps: float, order: Order = "sglang"
) -> tuple[Tensor, Tensor]:
    """Tokens that top-k, top-p and min-p keep for some, and for all, logits within eps of `scaled` [n, V].

    `scaled` are logits over the temperature, and `eps` is in their units. Both results are [n, V] bool.
    """
    ordered, indices = scaled.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(-1)
    mass = torch.cat([torch.zeros_like(probs[:, :1]), probs.cumsum(-1)], -1)  # of the first j, j = 0..V
    # How many could at most, and must at least, come before a token. `-ordered` ascends.
    could_precede = torch.searchsorted(-ordered, eps - ordered, right=True)  # itself included
    must_precede = torch.searchsorted(-ordered, -ordered - eps, right=False)
    top_k = sampling.top_k if sampling.top_k > 0 else ordered.shape[-1]
    maybe, surely = must_precede < top_k, could_precede <= top_k
    if sampling.top_p < 1:
        most = least = mass[:, -1:]  # what shares are of: all tokens, or what top-k keeps
        if order == "embedded":
            most = mass.gather(-1, maybe.sum(-1, keepdim=True))
            least = mass.gather(-1, surely.sum(-1, keepdim=True))
        maybe &= math.exp(-eps) * mass.gather(-1, must_precede) <= sampling.top_p * most
        surely &= math.exp(eps) * (mass.gather(-1, could_precede) - probs) <= sampling.top_p * least
    if sampling.min_p > 0:
        least_kept = ordered[:, :1] + math.log(sampling.min_p)
        maybe &= ordered >= least_kept - eps
        surely &= ordered >= least_kept + eps
    # Whatever its neighbours, a row keeps its first token.
    maybe[:, 0] = True
    by_token = torch.zeros_like(maybe)
    return by_token.scatter(-1, indices, maybe), by_token.scatter(-1, indices, surely)


def gaps(
    logits: Tensor,  # [n, V] float32, processed
    tokens: Tensor,  # [n] int64, emitted
    positions: Tensor,  # [n] int64, of the emitted tokens
    sampling: Sampling,
    eps: float,
    noise: Noise | None = None,
    order: Order = "sglang",
) -> tuple[Tensor, Tensor]:
    """Gap of each emitted token [n] float64, at least 0, and the best token [n] int64.

    Raises:
        ValueError: a sampled output without `noise` or without a seed.
    """
    if sampling.is_greedy(order):
        values, maybe, surely, temperature = logits.double(), None, None, 1.0
    else:
        if noise is None or sampling.seed is None:
            raise ValueError("a sampled output needs noise and a seed")
        temperature = sampling.temperature
        vocabulary = torch.arange(logits.shape[-1], device=logits.device)
        seeds = torch.full_like(positions, sampling.seed)
        values = logits / temperature
        maybe, surely = kept_sets(values, sampling, eps * sampling.scale / temperature, order)
        values = values + noise(seeds, positions, vocabulary)
    emitted = values.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if maybe is not None and surely is not None:
        emitted = torch.where(maybe.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), emitted, -math.inf)
        values = values.masked_fill(~surely, -math.inf)
    largest, best = values.max(-1)
    # A row without any sure token says nothing about one that may be kept.
    gap = torch.where(largest == -math.inf, torch.zeros_like(largest), (largest - emitted) * temperature)
    gap = torch.where(emitted == -math.inf, torch.full_like(gap, EXCLUDED), gap)
    return gap.div(sampling.scale).clamp(0.0, EXCLUDED), best
