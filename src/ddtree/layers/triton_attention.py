"""Triton kernel of attention for small windows over a static cache: grouped heads, key splits.

The window's own keys and values are in the cache already. A program's warps each take their own
keys and meet only once, at its end; of the programs that share a block of rows the last to arrive
merges their parts, in the order of the splits, so attention stays one kernel and repeats exactly.
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
    end,
    prefix_len,
    num_tokens,
    HAS_MASK: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
):
    """Which of the cache's `slots` [groups, keys] each of `tokens` [rows] sees, [groups, rows, keys].

    The prefix, and the window by its mask; no slot from `end` on.
    """
    tokens, slots = tokens[None, :, None], slots[:, None, :]
    inside = slots - prefix_len  # index in the window, negative in the prefix
    in_window = (inside >= 0) & (slots < end)
    if HAS_MASK:
        seen = tl.load(mask_ptr + tokens * num_tokens + inside, mask=in_window, other=0)
        visible = (inside < 0) | (seen != 0)
    else:
        visible = inside <= tokens
    if SLIDING_WINDOW > 0:
        key_positions = tl.load(positions_ptr + inside, mask=in_window, other=0)
        key_positions = tl.where(inside < 0, slots, key_positions)
        visible = visible & (tl.abs(tl.load(positions_ptr + tokens) - key_positions) < SLIDING_WINDOW)
    return visible & (slots < end)


@triton.jit
def merge_parts(
    parts_ptr,
    lse_ptr,
    offsets,
    lse_offsets,
    num_parts,
    part_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Parts [BLOCK_M, HEAD_DIM] of a softmax over disjoint keys as one, float32; part i weighs exp2(lse_i).

    Unrolled, so that all parts are on their way at once.
    """
    lses = ()
    parts = ()
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for i in tl.static_range(NUM_SPLITS):
        is_part = tl.full([BLOCK_M], i, tl.int32) < num_parts
        pointers = lse_ptr + i * part_stride + lse_offsets
        lse = tl.load(pointers, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        pointers = parts_ptr + i * part_stride * HEAD_DIM + offsets
        part = tl.load(pointers, mask=is_part[:, None], other=0.0, cache_modifier=".cg")
        # Tuples that grow in an unrolled loop: Triton compiles them, mypy sees the length change.
        lses = lses + (lse,)  # type: ignore[assignment]  # noqa: RUF005 (Triton unpacks no tuples)
        parts = parts + (part,)  # type: ignore[assignment]  # noqa: RUF005
    for i in tl.static_range(NUM_SPLITS):
        top = tl.maximum(top, lses[i])
    total = tl.zeros([BLOCK_M], tl.float32)
    merged = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for i in tl.static_range(NUM_SPLITS):
        share = tl.exp2(lses[i] - top)
        total += share
        merged += parts[i].to(tl.float32) * share[:, None]
    return merged / total[:, None]


@triton.jit
def attend(
    query,
    key_ptr,
    value_ptr,
    mask_ptr,
    positions_ptr,
    tokens,
    begin,
    end,
    prefix_len,
    num_tokens,
    scale,
    HEAD_DIM: tl.constexpr,
    HAS_MASK: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    KEY_GROUPS: tl.constexpr,
):
    """Attention of query rows [BLOCK_M, HEAD_DIM] over slots [begin, end): out float32, and lse base 2."""
    width: tl.constexpr = BLOCK_S // KEY_GROUPS
    ds = tl.arange(0, HEAD_DIM)[None, None, :]
    lanes = (tl.arange(0, KEY_GROUPS) * width)[:, None] + tl.arange(0, width)[None, :]
    queries = tl.broadcast_to(query[None, :, :], [KEY_GROUPS, BLOCK_M, HEAD_DIM])
    top = tl.full([KEY_GROUPS, BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([KEY_GROUPS, BLOCK_M], tl.float32)
    acc = tl.zeros([KEY_GROUPS, BLOCK_M, HEAD_DIM], tl.float32)
    for s in range(begin, end, BLOCK_S):
        slots = s + lanes
        offsets = slots[:, :, None] * HEAD_DIM + ds
        key = tl.load(key_ptr + offsets, mask=slots[:, :, None] < end, other=0.0)
        value = tl.load(value_ptr + offsets, mask=slots[:, :, None] < end, other=0.0)
        visible = visible_keys(
            mask_ptr, positions_ptr, tokens, slots, end, prefix_len, num_tokens, HAS_MASK, SLIDING_WINDOW
        )
        scores = tl.dot(queries, key.permute(0, 2, 1), input_precision="ieee") * scale
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 2))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key seen yet: keep exp2 finite
        shares = tl.exp2(scores - base[:, :, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(shares, 2)
        acc = tl.dot(shares.to(value.dtype), value, acc * decay[:, :, None], input_precision="ieee")
        top = new_top
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    decay = tl.exp2(top - base[None, :])
    total = tl.sum(total * decay, 0)
    total = tl.where(total == 0.0, 1.0, total)  # no key at all: out is 0, lse -inf
    return tl.sum(acc * decay[:, :, None], 0) / total[:, None], highest + tl.log2(total)


@triton.jit
def prefetch_keys(key_ptr, value_ptr, begin, end, HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr):
    """Ask for slots [begin, end) to come to L2, of rows up to a line; wider ones bring their first line."""
    for s in range(begin, end, BLOCK_S):
        slots = tl.minimum(s + tl.arange(0, BLOCK_S), end - 1)
        prefetch_lines(key_ptr + slots * HEAD_DIM)
        prefetch_lines(value_ptr + slots * HEAD_DIM)


@triton.jit(do_not_specialize=["num_tokens"])  # one binary for every width
def attention_kernel(
    query_ptr,  # [num_tokens, NUM_HEADS * HEAD_DIM]
    kv_ptr,  # [2, NUM_KV_HEADS, capacity, HEAD_DIM]
    mask_ptr,  # [num_tokens, num_tokens] uint8 where HAS_MASK, else causal
    positions_ptr,  # [num_tokens] int64
    prefix_len_ptr,  # [1] int64
    out_ptr,  # [num_tokens, NUM_HEADS * HEAD_DIM], written
    parts_ptr,  # [NUM_SPLITS, num_tokens, NUM_HEADS * HEAD_DIM], scratch
    lse_ptr,  # [NUM_SPLITS, num_tokens, NUM_HEADS] float32 base 2, scratch
    arrivals_ptr,  # [NUM_KV_HEADS * num_programs(0)] int32, zero before and after
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
    PREFETCH: tl.constexpr,  # not in Triton's interpreter, which has no inline assembly
    LAUNCH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    KEY_GROUPS: tl.constexpr,
):
    """Attention of a block of (token, head of the group) rows over one split of the keys."""
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    if LAUNCH == "early":
        gdc_launch_dependents()
    kv_head, split = tl.program_id(1), tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = (rows < num_tokens * group)[:, None]
    inside = tl.minimum(rows, num_tokens * group - 1)
    tokens, heads = inside // group, kv_head * group + inside % group
    prefix_len = tl.load(prefix_len_ptr).to(tl.int32)
    extent = prefix_len + num_tokens
    per_split = tl.cdiv(tl.cdiv(extent, BLOCK_S), NUM_SPLITS) * BLOCK_S
    num_parts = tl.cdiv(extent, per_split)
    begin = split * per_split
    end = tl.minimum(begin + per_split, extent)
    key_ptr = kv_ptr + kv_head * head_stride
    value_ptr = key_ptr + kv_stride
    if PREFETCH:
        prefetch_keys(key_ptr, value_ptr, begin, end, HEAD_DIM, BLOCK_S)  # while the queries are loaded
    if LAUNCH != "plain":
        gdc_wait()
    if split < num_parts:
        lse_offsets = tokens * NUM_HEADS + heads
        offsets = lse_offsets[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        out, lse = attend(
            tl.load(query_ptr + offsets), key_ptr, value_ptr, mask_ptr, positions_ptr, tokens,
            begin, end, prefix_len, num_tokens, scale,
            HEAD_DIM, HAS_MASK, SLIDING_WINDOW, BLOCK_M, BLOCK_S, KEY_GROUPS,
        )  # fmt: skip
        if LAUNCH == "late":
            gdc_launch_dependents()
        if NUM_SPLITS == 1 or num_parts == 1:
            tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=row_mask)
        else:
            part_stride = num_tokens * NUM_HEADS
            part_ptrs = parts_ptr + split * part_stride * HEAD_DIM + offsets
            tl.store(part_ptrs, out.to(parts_ptr.dtype.element_ty), mask=row_mask)
            tl.store(lse_ptr + split * part_stride + lse_offsets, lse, mask=rows < num_tokens * group)
            tl.debug_barrier()  # the whole part is written before its arrival is counted
            arrivals = arrivals_ptr + kv_head * tl.num_programs(0) + tl.program_id(0)
            if tl.atomic_add(arrivals, 1, sem="acq_rel") == num_parts - 1:
                tl.store(arrivals, 0)
                merged = merge_parts(
                    parts_ptr, lse_ptr, offsets, lse_offsets, num_parts, part_stride,
                    HEAD_DIM, BLOCK_M, NUM_SPLITS,
                )  # fmt: skip
                tl.store(out_ptr + offsets, merged.to(out_ptr.dtype.element_ty), mask=row_mask)
