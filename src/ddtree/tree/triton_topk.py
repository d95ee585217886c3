# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped"
"""Top-K log-probabilities on a GPU in two Triton launches: what `DraftMarginals.from_logits` keeps.

As in the torch path, the K chunks with the best first tokens hold the K best tokens. One kernel takes
each chunk's maximum and its part of the sum; another, one program a row, finds the K-th best chunk and
then the K-th best token by bisecting the bits of |log-probability| (log-probabilities are at most 0),
and orders the K tokens by counting how many come before each. Import it only where Triton is installed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK_TOKENS = 64
PART_CHUNKS = 32
NOTHING = tl.constexpr(0x7FFFFFFE)  # bits of a place behind the last chunk or token: beyond those of |-inf|
NO_KEY = tl.constexpr(0x7FFFFFFFFFFFFFFF)


class TopTokens(NamedTuple):
    """The K best tokens of each row and what their log-probabilities were made with."""

    tokens: Tensor  # [num_rows, K] int64
    log_probs: Tensor  # [num_rows, K] float32
    log_sums: Tensor  # [num_rows] float32: log of the sum of exp(logit - largest logit)


@triton.jit
def chunk_kernel(
    logits_ptr,  # [num_rows, V]
    chunk_max_ptr,  # [num_rows, num_chunks] float32
    part_max_ptr,  # [num_rows, num_parts] float32
    part_sum_ptr,  # [num_rows, num_parts] float32: sum of exp(logit - part_max)
    vocab,
    row_stride,
    num_chunks,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
):
    """Maxima and sums of the PART chunks `program_id(0)` of row `program_id(1)`."""
    part, row, num_parts = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    chunks = part * PART + tl.arange(0, PART)
    tokens = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    logits = tl.load(logits_ptr + row * row_stride + tokens, mask=tokens < vocab, other=float("-inf"))
    logits = logits.to(tl.float32)
    logits = tl.where(logits != logits, float("-inf"), logits)
    chunk_max = tl.max(logits, 1)
    part_max = tl.max(chunk_max, 0)
    # A part of -inf alone weighs nothing: its sum is 0, not NaN.
    weights = tl.exp(logits - tl.where(part_max == float("-inf"), 0.0, part_max))
    tl.store(chunk_max_ptr + row * num_chunks + chunks, chunk_max, mask=chunks < num_chunks)
    tl.store(part_max_ptr + row * num_parts + part, part_max)
    tl.store(part_sum_ptr + row * num_parts + part, tl.sum(tl.sum(weights, 1), 0))


@triton.jit
def _log_sum(part_max_ptr, part_sum_ptr, num_parts, PARTS_PAD: tl.constexpr):
    """A row's largest logit and the log of its sum, as float32; the parts are added in float64."""
    parts = tl.arange(0, PARTS_PAD)
    is_part = parts < num_parts
    part_max = tl.load(part_max_ptr + parts, mask=is_part, other=float("-inf"))
    row_max = tl.max(part_max, 0)
    part_sum = tl.load(part_sum_ptr + parts, mask=is_part, other=0.0).to(tl.float64)
    row_sum = tl.sum(part_sum * tl.exp(part_max - row_max).to(tl.float64), 0)
    return row_max, tl.log(row_sum).to(tl.float32)


@triton.jit
def _bits(logits, row_max, log_sum):
    """Bits of |log-probability|, as `DraftMarginals` rounds it: they ascend as it descends."""
    log_probs = (logits - row_max) - log_sum
    log_probs = tl.where(log_probs != log_probs, float("-inf"), tl.minimum(log_probs, 0.0))
    return log_probs.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _find_cut(bits, high, COUNT: tl.constexpr):
    """(cut, how many are below it): the COUNT smallest of `bits` are these and some at the cut.

    At least COUNT are below `high`. It ends early where exactly COUNT are below the cut.
    """
    low = tl.min(bits, 0)
    num_below = 0
    while (num_below < COUNT) & (high - low > 1):
        middle = low + (high - low) // 2
        num = tl.sum((bits < middle).to(tl.int32), 0)
        fits = num <= COUNT
        low, high = tl.where(fits, middle, low), tl.where(fits, high, middle)
        num_below = tl.where(fits, num, num_below)
    return low, num_below


@triton.jit
def _keep_places(bits, cut, num_below, COUNT: tl.constexpr):
    """Which of `bits` are the COUNT smallest, the first of equals, and each one's place among the kept."""
    is_below, is_at = (bits < cut).to(tl.int32), (bits == cut).to(tl.int32)
    counts = tl.cumsum(is_below + is_at * 65536, 0)
    num_below_before, num_at_before = (counts & 65535) - is_below, (counts >> 16) - is_at
    num_wanted = COUNT - num_below
    is_kept = (is_below > 0) | ((is_at > 0) & (num_at_before < num_wanted))
    return is_kept, num_below_before + tl.minimum(num_at_before, num_wanted)


@triton.jit
def _write_in_order(keys_ptr, tokens_ptr, log_probs_ptr, K: tl.constexpr, K_PAD: tl.constexpr):
    """The tokens of K distinct keys, bits << 32 | token, each at the place of its rank."""
    places = tl.arange(0, K_PAD)
    keys = tl.load(keys_ptr + places, mask=places < K, other=NO_KEY)
    others = tl.load(keys_ptr + places, mask=places < K, other=NO_KEY)
    ranks = tl.sum((others[None, :] < keys[:, None]).to(tl.int32), 1)
    log_probs = 0.0 - (keys >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(tokens_ptr + ranks, keys & 0xFFFFFFFF, mask=places < K)
    tl.store(log_probs_ptr + ranks, log_probs, mask=places < K)


@triton.jit
def select_kernel(
    logits_ptr,
    chunk_max_ptr,
    part_max_ptr,
    part_sum_ptr,
    chunks_ptr,  # [num_rows, KC] int32 scratch: the best chunks, in ascending order
    keys_ptr,  # [num_rows, K] int64 scratch
    tokens_ptr,  # [num_rows, K] int64
    log_probs_ptr,  # [num_rows, K] float32
    log_sums_ptr,  # [num_rows] float32
    vocab,
    row_stride,
    num_chunks,
    num_parts,
    K: tl.constexpr,
    KC: tl.constexpr,  # min(K, num_chunks)
    CHUNK: tl.constexpr,
    K_PAD: tl.constexpr,
    KC_PAD: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    PARTS_PAD: tl.constexpr,
):
    """The K best tokens of row `program_id(0)`, in order."""
    row = tl.program_id(0).to(tl.int64)
    row_max, log_sum = _log_sum(
        part_max_ptr + row * num_parts, part_sum_ptr + row * num_parts, num_parts, PARTS_PAD
    )
    tl.store(log_sums_ptr + row, log_sum)
    chunks = tl.arange(0, CHUNKS_PAD)
    is_chunk = chunks < num_chunks
    chunk_max = tl.load(chunk_max_ptr + row * num_chunks + chunks, mask=is_chunk, other=0.0)
    bits = tl.where(is_chunk, _bits(chunk_max, row_max, log_sum), NOTHING)
    cut, num_below = _find_cut(bits, tl.max(tl.where(is_chunk, bits, 0), 0) + 1, KC)
    is_kept, places = _keep_places(bits, cut, num_below, KC)
    tl.store(chunks_ptr + row * KC + places, chunks, mask=is_kept)
    tl.debug_barrier()
    best = tl.arange(0, KC_PAD)
    best = tl.load(chunks_ptr + row * KC + best, mask=best < KC, other=num_chunks)
    # In ascending order of the token id, so that the first of equals is the one with the lowest id.
    tokens = best[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    logits = tl.load(logits_ptr + row * row_stride + tokens, mask=tokens < vocab, other=0.0).to(tl.float32)
    bits = tl.where(tokens < vocab, _bits(logits, row_max, log_sum), NOTHING)
    bits, tokens = tl.reshape(bits, [KC_PAD * CHUNK]), tl.reshape(tokens, [KC_PAD * CHUNK])
    # K chunks have K tokens at the chunks' cut or below. With fewer chunks all of the vocabulary is here.
    high = cut + 1 if KC == K else tl.max(tl.where(tokens < vocab, bits, 0), 0) + 1
    cut, num_below = _find_cut(bits, high, K)
    is_kept, places = _keep_places(bits, cut, num_below, K)
    keys = (bits.to(tl.int64) << 32) | tokens.to(tl.int64)
    tl.store(keys_ptr + row * K + places, keys, mask=is_kept)
    tl.debug_barrier()
    _write_in_order(keys_ptr + row * K, tokens_ptr + row * K, log_probs_ptr + row * K, K, K_PAD)


def top_tokens(logits: Tensor, topk: int) -> TopTokens:
    """The `topk` best tokens of each row of `logits` [num_rows, V] bf16, fp16 or fp32, topk <= V.

    Order, cut, ties, NaN and rounding are those of `DraftMarginals.from_logits`, for the log-sum given
    back: that sum alone is added in another order than torch adds it.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, CHUNK_TOKENS)
    num_parts = triton.cdiv(num_chunks, PART_CHUNKS)
    num_best = min(topk, num_chunks)
    chunk_max = logits.new_empty(num_rows, num_chunks, dtype=torch.float32)
    part_max, part_sum = logits.new_empty(2, num_rows, num_parts, dtype=torch.float32)
    chunks = logits.new_empty(num_rows, num_best, dtype=torch.int32)
    keys, tokens = logits.new_empty(2, num_rows, topk, dtype=torch.int64)
    log_probs = logits.new_empty(num_rows, topk, dtype=torch.float32)
    log_sums = logits.new_empty(num_rows, dtype=torch.float32)
    with torch.cuda.device_of(logits):
        chunk_kernel[(num_parts, num_rows)](
            logits, chunk_max, part_max, part_sum, vocab, logits.stride(0), num_chunks,
            CHUNK=CHUNK_TOKENS, PART=PART_CHUNKS, num_warps=4,
        )  # fmt: skip
        select_kernel[(num_rows,)](
            logits, chunk_max, part_max, part_sum, chunks, keys, tokens, log_probs, log_sums,
            vocab, logits.stride(0), num_chunks, num_parts, K=topk, KC=num_best, CHUNK=CHUNK_TOKENS,
            K_PAD=triton.next_power_of_2(topk), KC_PAD=triton.next_power_of_2(num_best),
            CHUNKS_PAD=triton.next_power_of_2(num_chunks), PARTS_PAD=triton.next_power_of_2(num_parts),
            num_warps=8 if num_best <= 64 else 16,
        )  # fmt: skip
    return TopTokens(tokens, log_probs, log_sums)
