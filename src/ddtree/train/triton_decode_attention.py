# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped"
"""Triton kernel of attention for one new token in each of many slots, over their static cache.

A program serves one slot and one kv head: it reads that head's keys and values once, up to the slot's
own length, for all query heads of the group. Import it only where Triton is installed.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_ROWS = 16  # the smallest tile that `tl.dot` takes
BLOCK_KEYS = 64
NUM_WARPS = 4
NUM_STAGES = 3
HEAD_DIMS = (16, 32, 64, 128, 256)


@triton.jit
def decode_attention_kernel(
    query_ptr,  # [slots, NUM_KV_HEADS * GROUP, HEAD_DIM]
    key_ptr,  # [slots, NUM_KV_HEADS, max_tokens, HEAD_DIM], and its values
    value_ptr,
    positions_ptr,  # [slots] int64, of the new tokens, whose keys are in the cache already
    out_ptr,  # [slots, NUM_KV_HEADS * GROUP, HEAD_DIM], written
    scale,  # softmax scale * log2(e)
    slot_stride,
    head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Attention of the query heads of kv head `program_id(1)` in slot `program_id(0)`."""
    slot, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(positions_ptr + slot).to(tl.int32) + 1
    rows, ds = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    offsets = ((slot * NUM_KV_HEADS + kv_head) * GROUP + rows[:, None]) * HEAD_DIM + ds[None, :]
    is_row = rows[:, None] < GROUP
    query = tl.load(query_ptr + offsets, mask=is_row, other=0.0)  # [ROWS, HEAD_DIM]
    base = slot * slot_stride + kv_head * head_stride
    lanes = tl.arange(0, BLOCK_KEYS)
    cell = lanes[:, None] * HEAD_DIM + ds[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for start in range(0, length, BLOCK_KEYS):
        is_key = start + lanes < length
        place = base + start * HEAD_DIM + cell
        key = tl.load(key_ptr + place, mask=is_key[:, None], other=0.0)  # [BLOCK_KEYS, HEAD_DIM]
        value = tl.load(value_ptr + place, mask=is_key[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # [ROWS, BLOCK_KEYS]
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))  # finite: every block has a key
        shares = tl.exp2(scores - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(shares, 1)
        acc = tl.dot(shares.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
        top = new_top
    out = acc / total[:, None]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=is_row)


def triton_decode_attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """What `batch_decoder.decode_attention` gives, in one launch.

    Args:
        query: [slots, num_heads, head_dim], head_dim one of `HEAD_DIMS`.
        key, value: [slots, kv_heads, max_tokens, head_dim], equally strided, each head's rows contiguous.
        positions: [slots] int64; slot b attends to keys 0..positions[b].
        scale: of the scores.

    Returns:
        [slots, num_heads, head_dim] in the query's dtype.
    """
    slots, num_heads, head_dim = query.shape
    kv_heads = key.shape[1]
    query = query.contiguous()
    out = torch.empty_like(query)
    group = num_heads // kv_heads
    with torch.cuda.device_of(query):
        decode_attention_kernel[(slots, kv_heads)](
            query, key, value, positions, out, scale * math.log2(math.e), key.stride(0), key.stride(1),
            NUM_KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim,
            ROWS=max(MIN_ROWS, triton.next_power_of_2(group)), BLOCK_KEYS=BLOCK_KEYS,
            num_warps=NUM_WARPS, num_stages=NUM_STAGES,
        )  # fmt: skip
    return out
