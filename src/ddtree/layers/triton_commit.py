"""What a round's commit does with cached rows, as two Triton kernels; the torch paths are the references.

`move_rows` moves the keys and values of an accept path to the front of the verify window.
`write_context` finishes the drafter's new context rows: head norm, rotation, and the write to the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def move_kernel(
    data_ptr, prefix_ptr, path_ptr, num_rows, capacity,
    HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    # One program for each layer's keys or values of one head: it alone reads and writes these rows.
    rows, cols = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_DIM)
    prefix_len = tl.load(prefix_ptr)
    nodes = tl.load(path_ptr + rows, mask=rows < num_rows, other=-1)
    base = data_ptr + (tl.program_id(0).to(tl.int64) * capacity + prefix_len) * HEAD_DIM
    mask = (nodes >= 0)[:, None] & (cols < HEAD_DIM)[None, :]
    moved = tl.load(base + nodes[:, None] * HEAD_DIM + cols[None, :], mask=mask)
    tl.debug_barrier()  # every row is read before the first one is written
    tl.store(base + rows[:, None].to(tl.int64) * HEAD_DIM + cols[None, :], moved, mask=mask)


def move_rows(data: Tensor, prefix_len: Tensor, path: Tensor) -> None:
    """Copy slot prefix_len + path[j] to slot prefix_len + j, gather before scatter.

    Args:
        data: [num_layers, 2, num_kv_heads, capacity, head_dim], contiguous.
        prefix_len: [1] int64.
        path: [m] int64, window indices in ascending order, -1 beyond the path.
    """
    capacity, head_dim = data.shape[3:]
    block_rows = triton.next_power_of_2(path.shape[0])
    move_kernel[(data.shape[0] * data.shape[1] * data.shape[2],)](
        data, prefix_len, path, path.shape[0], capacity, head_dim, block_rows,
        triton.next_power_of_2(head_dim), num_warps=4,
    )  # fmt: skip


@triton.jit
def context_kernel(
    kv_ptr, norm_ptr, cos_ptr, sin_ptr, position_ptr, prefix_ptr, data_ptr,
    num_heads, capacity, eps,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    # One program a row, layer and head. kv is [n, num_layers, 2, num_heads, head_dim].
    row, layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    cols = tl.arange(0, BLOCK_DIM)
    mask = cols < HEAD_DIM
    rolled = (cols + HEAD_DIM // 2) % HEAD_DIM
    source = kv_ptr + ((row * tl.num_programs(1) + layer) * 2 * num_heads + head) * HEAD_DIM
    key = tl.load(source + cols, mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(source + rolled, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(key * key, 0) / HEAD_DIM + eps)
    norm = norm_ptr + layer * HEAD_DIM
    key = key * rstd * tl.load(norm + cols, mask=mask, other=0.0).to(tl.float32)
    partner = partner * rstd * tl.load(norm + rolled, mask=mask, other=0.0).to(tl.float32)
    position = tl.load(position_ptr + row)
    cos = tl.load(cos_ptr + position * HEAD_DIM + cols, mask=mask, other=0.0).to(tl.float32)
    signed_sin = tl.load(sin_ptr + position * HEAD_DIM + cols, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(source + num_heads * HEAD_DIM + cols, mask=mask)
    slot = tl.load(prefix_ptr) + row
    keys = data_ptr + ((layer * 2 * num_heads + head).to(tl.int64) * capacity + slot) * HEAD_DIM
    values = data_ptr + (((layer * 2 + 1) * num_heads + head).to(tl.int64) * capacity + slot) * HEAD_DIM
    tl.store(keys + cols, (key * cos + partner * signed_sin).to(data_ptr.dtype.element_ty), mask=mask)
    tl.store(values + cols, value, mask=mask)


def write_context(
    kv: Tensor,
    k_norms: Tensor,
    cos: Tensor,
    signed_sin: Tensor,
    eps: float,
    positions: Tensor,
    prefix_len: Tensor,
    data: Tensor,
) -> None:
    """Normalise and rotate new keys and write them with their values to the cache.

    Args:
        kv: [n, num_layers, 2, num_kv_heads, head_dim] raw keys and values, contiguous.
        k_norms: [num_layers, 1, head_dim] weights of the head norms.
        cos, signed_sin: [max_positions, head_dim] tables of a `RotaryTable`.
        positions: [n] int64; row i goes to slot prefix_len + i.
        prefix_len: [1] int64.
        data: [num_layers, 2, num_kv_heads, capacity, head_dim], contiguous.
    """
    n, num_layers, _, num_heads, head_dim = kv.shape
    context_kernel[(n, num_layers, num_heads)](
        kv, k_norms, cos, signed_sin, positions, prefix_len, data, num_heads, data.shape[3], eps,
        head_dim, triton.next_power_of_2(head_dim), num_warps=1,
    )  # fmt: skip
