"""Top-k, top-p and min-p over whole rows, as SGLang's sampler applies them, in torch.

A row's tokens are ordered (logit descending, token id ascending). With w the tokens' weights relative to
the best one and M the mass of the row, a token stays if fewer than k tokens are before it, the mass before
it is at most top_p * M, and its own weight is at least min_p. In sequence, M is the mass of the top k alone
and not of the row. `triton_sampling` does the same on a GPU without sorting.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

NEG_INF = float("-inf")
# What becomes of tokens exactly as likely as the last one that stays: those of the lowest ids stay, as far
# as k and p go, or all of them, which is what flashinfer's thresholds do.
TiesAtCut = Literal["lowest_id", "all"]


def drop_unlikely_(
    scaled: Tensor,  # [n, V] float32, logits over temperature, neither NaN nor +inf; changed in place
    top_ks: Tensor,  # [n] int64, 1 or more
    top_ps: Tensor,  # [n] float32, beyond 0
    max_gaps: Tensor,  # [n] float32: -log(min_p)
    is_sequential: Tensor,  # [n] bool: top-p of what top-k has left
    ties: TiesAtCut,
) -> Tensor:
    """-inf for every token that top-k, top-p or min-p drops; returns `scaled`, the best token always in it.

    A top_p of 1 drops nothing. Weights are float32 and are summed in float64, row by row, so that a row's
    result does not depend on the others. Memory: about 40 bytes for each of the n * V logits.
    """
    peaks = scaled.amax(1, keepdim=True)
    gaps = torch.where(peaks == NEG_INF, 0.0, peaks) - scaled  # [n, V], at least 0
    gaps, order = gaps.sort(dim=1, stable=True)
    weights = gaps.neg().exp_().double()
    cumulated = weights.cumsum(1)
    before = cumulated - weights
    # A token's place: how many tokens come before it, or before the first of its equals.
    places = torch.arange(scaled.shape[1], device=scaled.device).expand_as(order)
    if ties == "all":
        places = torch.searchsorted(gaps, gaps)
        before = before.gather(1, places)
    in_top_k = places < top_ks.unsqueeze(1)
    last = torch.where(is_sequential, in_top_k.sum(1), scaled.shape[1]) - 1
    mass = cumulated.gather(1, last.unsqueeze(1))
    limits = torch.where(top_ps < 1, top_ps.double(), torch.inf).unsqueeze(1) * mass
    stays = in_top_k & (before <= limits) & (gaps <= max_gaps.unsqueeze(1))
    return scaled.masked_fill_(torch.zeros_like(stays).scatter_(1, order, ~stays), NEG_INF)
