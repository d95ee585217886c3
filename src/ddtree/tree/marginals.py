"""The drafter's distribution at each position, cut to its most likely tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.config import check, is_int
from ddtree.tree.triton_choice import prefers_triton

CHUNK_TOKENS = 64
MAX_TRITON_TOPK = 256
MAX_TRITON_VOCAB = 1 << 18
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class DraftMarginals:
    """The K most likely tokens of each draft position, independent of each other given the prefix.

    A position's candidates are ordered (log-probability descending, token id ascending).
    Log-probabilities are normalised over the full vocabulary and at most 0.
    """

    tokens: Tensor  # [bs, draft_depth, K] int64
    log_probs: Tensor  # [bs, draft_depth, K] float32

    @staticmethod
    def from_logits(logits: Tensor, candidate_topk: int) -> DraftMarginals:
        """The `candidate_topk` most likely tokens of each row of `logits` [bs, draft_depth, V].

        K = min(candidate_topk, V). A NaN logit counts as -inf. The order holds at the cut too: of
        tokens with equal log-probabilities those with the lowest ids are kept. A log-probability is
        (x - largest x) - s in float32, s being the log of the row's sum of exponentials. On CUDA, K
        to 256 takes two Triton launches and no host sync; s may then differ in its last bits from the
        CPU's, equal inputs giving equal bits on one device. Raises `ConfigError` for a
        `candidate_topk` below 1.
        """
        check(is_int(candidate_topk) and candidate_topk >= 1, "candidate_topk", candidate_topk, "1 or more")
        topk = min(candidate_topk, logits.shape[-1])
        if _fits_triton(logits, topk):
            from ddtree.tree.triton_topk import top_tokens

            tokens, log_probs, _ = top_tokens(logits.reshape(-1, logits.shape[-1]), topk)
            shape = (*logits.shape[:-1], topk)
            return DraftMarginals(tokens.view(shape), log_probs.view(shape))
        return marginals_torch(logits, topk)


def marginals_torch(logits: Tensor, topk: int, log_sum: Tensor | None = None) -> DraftMarginals:
    """`from_logits` in torch, for 1 <= topk <= V and, where given, the rows' `log_sum` [bs, L, 1]."""
    chunks = _chunk(logits)  # [bs, L, C, CHUNK_TOKENS]
    chunk_max, row_max, own_log_sum = _sum_rows(chunks)
    return _select(chunks, chunk_max, row_max, own_log_sum if log_sum is None else log_sum, topk)


def _fits_triton(logits: Tensor, topk: int) -> bool:
    fits = topk <= MAX_TRITON_TOPK and logits.shape[-1] <= MAX_TRITON_VOCAB
    return fits and logits.dtype in TRITON_DTYPES and prefers_triton(logits)


def _chunk(logits: Tensor) -> Tensor:
    """`logits` [bs, L, V] as [bs, L, C, CHUNK_TOKENS], the last chunk filled with -inf."""
    missing = -logits.shape[-1] % CHUNK_TOKENS
    if missing:
        logits = torch.nn.functional.pad(logits, (0, missing), value=NEG_INF)
    return logits.reshape(*logits.shape[:-1], -1, CHUNK_TOKENS)


def _sum_rows(chunks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each chunk's maximum [bs, L, C], each row's, and the log of the sum of exp(x - row_max), [bs, L, 1]."""
    floats, chunk_max = _without_nan(chunks)
    row_max = chunk_max.amax(-1, keepdim=True)
    # One large buffer at most: a second one would cost the CPU more in page faults than the sum itself.
    spare = None if floats is chunks else floats
    weights = torch.sub(floats, row_max.unsqueeze(-1), out=spare).exp_()
    return chunk_max, row_max, weights.sum((-2, -1)).log_().unsqueeze(-1)


def _select(
    chunks: Tensor,  # [bs, L, C, CHUNK_TOKENS]
    chunk_max: Tensor,  # [bs, L, C]
    row_max: Tensor,  # [bs, L, 1]
    log_sum: Tensor,  # [bs, L, 1]
    topk: int,
) -> DraftMarginals:
    # x -> (x - row_max) - log_sum is monotone in float32, so a chunk's best logit is its best log-prob.
    best_chunks, _ = _top(_normalise(chunk_max, row_max, log_sum), min(topk, chunk_max.shape[-1]))
    # Ascending chunks keep the gathered tokens in ascending id order, which the tie rule needs.
    best_chunks = best_chunks.sort(-1).values
    kept = chunks.gather(2, best_chunks.unsqueeze(-1).expand(*best_chunks.shape, CHUNK_TOKENS))
    log_probs = _normalise(kept.flatten(2).float(), row_max, log_sum)  # [bs, L, kept tokens]
    places, log_probs = _top(log_probs, topk)  # [bs, L, K]
    chunk_starts = best_chunks.gather(2, places // CHUNK_TOKENS) * CHUNK_TOKENS
    return DraftMarginals(chunk_starts + places % CHUNK_TOKENS, log_probs)


def _without_nan(chunks: Tensor) -> tuple[Tensor, Tensor]:
    """`chunks` in float32 with -inf for NaN, and each chunk's maximum."""
    floats = chunks.float()
    chunk_max = floats.amax(-1)
    # On the CPU, looking costs nothing and saves a pass; on CUDA it would wait for the device.
    if chunks.is_cpu and not chunk_max.isnan().any():
        return floats, chunk_max
    floats = torch.where(floats.isnan(), NEG_INF, floats)
    return floats, floats.amax(-1)


def _normalise(logits: Tensor, row_max: Tensor, log_sum: Tensor) -> Tensor:
    """Log-probabilities, at most 0; NaN (a row of only -inf, or one with +inf) counts as -inf."""
    log_probs = (logits - row_max).sub_(log_sum).clamp_(max=0.0)
    return log_probs.masked_fill_(log_probs.isnan(), NEG_INF)


def _top(log_probs: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """Places and values of the `topk` best along the last axis, (value descending, place ascending).

    `torch.topk` leaves the order of ties open, so it gets keys without ties: for x <= 0 the bits of
    |x| ascend as x descends, and the place fills the low half.
    """
    places = torch.arange(log_probs.shape[-1], device=log_probs.device)
    keys = (log_probs.view(torch.int32) & 0x7FFFFFFF).to(torch.int64)
    keys = keys.bitwise_left_shift_(32).bitwise_or_(places)
    best = keys.topk(topk, dim=-1, largest=False, sorted=True).values & 0xFFFFFFFF
    return best, log_probs.gather(-1, best)
