# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped"
"""Sampling with keyed noise on a GPU in two Triton launches: what `noise.draw` draws.

The recipe is that of `noise`, in registers: no noise for a whole vocabulary is ever stored. Import it
only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddtree.tree.noise import GOLDEN, MULTIPLIERS

PART_TOKENS = 1024
STEP = tl.constexpr(GOLDEN)
FIRST_MULTIPLIER = tl.constexpr(MULTIPLIERS[0])
SECOND_MULTIPLIER = tl.constexpr(MULTIPLIERS[1])
ONE_BITS = tl.constexpr(0x3FF0000000000000)  # of the float64 1.0


@triton.jit
def _mix(words):
    """SplitMix64's finaliser on uint64, which wraps around."""
    words = (words ^ (words >> 30)) * FIRST_MULTIPLIER
    words = (words ^ (words >> 27)) * SECOND_MULTIPLIER
    return words ^ (words >> 31)


@triton.jit
def uniforms_of(seed, position, tokens):
    """`noise.keyed_uniform` of one seed and position, bit for bit."""
    key = _mix(_mix(seed.to(tl.uint64) + STEP) ^ position.to(tl.uint64))
    words = _mix(key + (tokens + 1).to(tl.uint64) * STEP)
    # Both steps are exact: a float64 in [1, 2), then the middle of its step in (0, 1).
    return ((words >> 12) | ONE_BITS).to(tl.float64, bitcast=True) - 1.0 + 1.1102230246251565e-16


@triton.jit
def draw_part_kernel(
    log_probs_ptr,  # [num_rows, V]
    seeds_ptr,
    positions_ptr,
    best_ptr,  # [num_rows, num_parts] float64
    tokens_ptr,  # [num_rows, num_parts] int32
    vocab,
    row_stride,
    num_columns,  # rows are [num_rows / num_columns, num_columns], by the strides below
    seed_stride,
    seed_column_stride,
    position_stride,
    position_column_stride,
    BLOCK: tl.constexpr,
):
    """The best of BLOCK tokens of row `program_id(1)`, by log-probability plus noise."""
    part, num_parts = tl.program_id(0), tl.num_programs(0)
    line, column = tl.program_id(1) // num_columns, tl.program_id(1) % num_columns
    row = tl.program_id(1).to(tl.int64)
    tokens = part * BLOCK + tl.arange(0, BLOCK)
    log_probs = tl.load(log_probs_ptr + row * row_stride + tokens, mask=tokens < vocab, other=float("-inf"))
    log_probs = log_probs.to(tl.float64)
    best, token = tl.max(log_probs, 0), part * BLOCK
    # Where top-k or top-p has left nothing there is nothing to draw, and noise is dear.
    if best > float("-inf"):
        seed = tl.load(seeds_ptr + line * seed_stride + column * seed_column_stride)
        position = tl.load(positions_ptr + line * position_stride + column * position_column_stride)
        noise = 0.0 - tl.log(0.0 - tl.log(uniforms_of(seed, position, tokens)))
        totals = noise + log_probs
        best, place = tl.max(totals, 0, return_indices=True)
        token += place
    tl.store(best_ptr + row * num_parts + part, best)
    tl.store(tokens_ptr + row * num_parts + part, token)


@triton.jit
def draw_merge_kernel(best_ptr, tokens_ptr, out_ptr, num_parts, PARTS_PAD: tl.constexpr):
    """The token of the best part of row `program_id(0)`, the first of equals."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS_PAD)
    best = tl.load(best_ptr + row * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
    _, part = tl.max(best, 0, return_indices=True)
    tl.store(out_ptr + row, tl.load(tokens_ptr + row * num_parts + part).to(tl.int64))


def draw_triton(log_probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """What `noise.draw` draws: the same arguments, tokens [...] int64.

    The logarithm may differ from torch's in its last bit, so where the two best totals of a row are a few
    float64 steps apart either may be drawn; the bits and uniforms are the same.
    """
    shape = torch.broadcast_shapes(log_probs.shape[:-1], seeds.shape, positions.shape)
    vocab = log_probs.shape[-1]
    rows = log_probs.expand(*shape, vocab).reshape(-1, vocab)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    seeds, positions = _as_table(seeds.expand(shape)), _as_table(positions.expand(shape))
    num_rows, num_parts = rows.shape[0], triton.cdiv(vocab, PART_TOKENS)
    best = rows.new_empty(num_rows, num_parts, dtype=torch.float64)
    tokens = rows.new_empty(num_rows, num_parts, dtype=torch.int32)
    out = rows.new_empty(shape, dtype=torch.int64)
    with torch.cuda.device_of(rows):
        draw_part_kernel[(num_parts, num_rows)](
            rows, seeds, positions, best, tokens, vocab, rows.stride(0), seeds.shape[1],
            *seeds.stride(), *positions.stride(), BLOCK=PART_TOKENS, num_warps=4,
        )  # fmt: skip
        draw_merge_kernel[(num_rows,)](
            best, tokens, out, num_parts, PARTS_PAD=triton.next_power_of_2(num_parts), num_warps=1
        )
    return out


def _as_table(keys: Tensor) -> Tensor:
    """`keys` [...] as [lines, columns], without a copy up to two dimensions."""
    return keys if keys.dim() == 2 else keys.reshape(1, -1)
