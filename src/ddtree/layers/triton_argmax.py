"""Argmax over a vocabulary in two Triton kernels, for a few rows of logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns a program reads: 24 programs a row at a vocabulary of 49,152, one 16-byte load a thread.
PART_COLUMNS = 2048


@triton.jit
def argmax_part_kernel(logits_ptr, best_ptr, index_ptr, num_cols, logits_stride, BLOCK: tl.constexpr):
    """Largest logit and its lowest index in one run of BLOCK columns of a row."""
    part, row, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    cols = part * BLOCK + tl.arange(0, BLOCK)
    pointers = logits_ptr + row * logits_stride + cols
    logits = tl.load(pointers, mask=cols < num_cols, other=float("-inf")).to(tl.float32)
    best, index = tl.max(logits, 0, return_indices=True)
    tl.store(best_ptr + row * num_parts + part, best)
    tl.store(index_ptr + row * num_parts + part, part * BLOCK + index)


@triton.jit
def argmax_merge_kernel(best_ptr, index_ptr, out_ptr, num_parts, BLOCK: tl.constexpr):
    """Index of the largest of a row's parts, the first of equals."""
    row = tl.program_id(0)
    parts = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
    _, part = tl.max(best, 0, return_indices=True)
    tl.store(out_ptr + row, tl.load(index_ptr + row * num_parts + part).to(tl.int64))


def argmax_rows(logits: Tensor) -> Tensor:
    """Index of each row's largest logit, the lowest among equals.

    Args:
        logits: [n, vocab] without NaN, rows contiguous.

    Returns: [n] int64.
    """
    n, num_cols = logits.shape
    num_parts = triton.cdiv(num_cols, PART_COLUMNS)
    best = torch.empty((n, num_parts), dtype=torch.float32, device=logits.device)
    index = torch.empty((n, num_parts), dtype=torch.int32, device=logits.device)
    out = torch.empty(n, dtype=torch.int64, device=logits.device)
    argmax_part_kernel[(num_parts, n)](logits, best, index, num_cols, logits.stride(0), PART_COLUMNS)
    argmax_merge_kernel[(n,)](best, index, out, num_parts, triton.next_power_of_2(num_parts), num_warps=1)
    return out
