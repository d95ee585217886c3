"""Triton kernel of attention for small windows over a static cache: grouped heads, key splits.

The window's own keys and values are in the cache already. The splits are merged by the output
projection (`ddtree.layers.triton_kernels.load_rows`), so attention stays one kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ddtree.layers.triton_kernels import prefetch_lines


@triton.jit
def visible_keys(
    mask_ptr,
    positions_ptr,
    tokens,
    slots,
    slot_mask,
    prefix_len,
    num_tokens,
    HAS_MASK: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
):
    """Which of the cache's `slots` each of `tokens` sees: the prefix, and the window by its mask."""
    inside = slots - prefix_len  # index in the window, negative in the prefix
    in_window = (inside >= 0) & slot_mask
    row_mask = tokens < num_tokens
    if HAS_MASK:
        pointers = mask_ptr + tokens[:, None] * num_tokens + inside[None, :]
        seen = tl.load(pointers, mask=row_mask[:, None] & in_window[None, :], other=0)
        visible = (inside < 0)[None, :] | (seen != 0)
    else:
        visible = inside[None, :] <= tokens[:, None]
    if SLIDING_WINDOW > 0:
        positions = tl.load(positions_ptr + tokens, mask=row_mask, other=0)
        key_positions = tl.load(positions_ptr + inside, mask=in_window, other=0)
        key_positions = tl.where(inside < 0, slots, key_positions)
        visible = visible & (tl.abs(positions[:, None] - key_positions[None, :]) < SLIDING_WINDOW)
    return visible & slot_mask[None, :]


@triton.jit(do_not_specialize=["num_tokens"])  # one binary for every width
def attention_kernel(
    query_ptr,  # [num_tokens, NUM_HEADS * HEAD_DIM]
    kv_ptr,  # [2, NUM_KV_HEADS, capacity, HEAD_DIM]
    mask_ptr,  # [num_tokens, num_tokens] uint8 where HAS_MASK, else causal
    positions_ptr,  # [num_tokens] int64
    prefix_len_ptr,  # [1] int64
    out_ptr,  # [NUM_SPLITS, num_tokens, NUM_HEADS * HEAD_DIM], written
    lse_ptr,  # [NUM_SPLITS, num_tokens, NUM_HEADS] float32 base 2, written where NUM_SPLITS > 1
    num_tokens,
    kv_stride,
    head_stride,
    scale,  # head_dim ** -0.5 * log2(e)
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_MASK: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,  # 0 for full attention
    NUM_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Attention of a block of (token, head of the group) rows over one split of the keys."""
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    kv_head, split = tl.program_id(1), tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens, heads = rows // group, kv_head * group + rows % group
    ds = tl.arange(0, HEAD_DIM)
    row_mask = tokens < num_tokens
    prefix_len = tl.load(prefix_len_ptr).to(tl.int32)
    extent = prefix_len + num_tokens
    per_split = tl.cdiv(tl.cdiv(extent, BLOCK_S), NUM_SPLITS) * BLOCK_S
    begin = split * per_split
    end = tl.minimum(begin + per_split, extent)
    key_ptr = kv_ptr + kv_head * head_stride
    value_ptr = key_ptr + kv_stride
    if PDL:
        gdc_launch_dependents()
        for s in range(begin, end, BLOCK_S):
            slots = tl.minimum(s + tl.arange(0, BLOCK_S), end - 1)
            prefetch_lines(key_ptr + slots * HEAD_DIM)
            prefetch_lines(value_ptr + slots * HEAD_DIM)
        gdc_wait()
    offsets = (tokens * NUM_HEADS + heads)[:, None] * HEAD_DIM + ds[None, :]
    query = tl.load(query_ptr + offsets, mask=row_mask[:, None], other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for s in range(begin, end, BLOCK_S):
        slots = s + tl.arange(0, BLOCK_S)
        slot_mask = slots < end
        kv_offsets = slots[:, None] * HEAD_DIM + ds[None, :]
        key = tl.load(key_ptr + kv_offsets, mask=slot_mask[:, None], other=0.0)
        value = tl.load(value_ptr + kv_offsets, mask=slot_mask[:, None], other=0.0)
        scores = tl.dot(query, key.T, input_precision="ieee") * scale
        visible = visible_keys(
            mask_ptr,
            positions_ptr,
            tokens,
            slots,
            slot_mask,
            prefix_len,
            num_tokens,
            HAS_MASK,
            SLIDING_WINDOW,
        )
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key seen yet: keep exp2 finite
        shares = tl.exp2(scores - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(shares, 1)
        acc = tl.dot(shares.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
        top = new_top
    total = tl.where(total == 0.0, 1.0, total)  # a split without keys: out is 0, lse -inf
    out = acc / total[:, None]
    out_ptrs = out_ptr + split * num_tokens * (NUM_HEADS * HEAD_DIM) + offsets
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=row_mask[:, None])
    if NUM_SPLITS > 1:
        lse_ptrs = lse_ptr + (split * num_tokens + tokens) * NUM_HEADS + heads
        tl.store(lse_ptrs, top + tl.log2(total), mask=row_mask)
