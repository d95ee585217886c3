"""Triton kernels of a decoder layer's projections for small windows.

Together with `ddtree.layers.triton_attention` a layer is five kernels: norm + qkv + head norms +
rope + cache write; attention; output projection + residual; norm + gate and up + SwiGLU; down
projection + residual. At these sizes a layer's weights pass in two microseconds, so what counts is
the number of kernels and the latency inside each. Products accumulate in float32. Against
`ddtree.layers.decoder` only this rounds differently: a norm's scale factor comes after the product
(`round(x * weight) @ w * rstd`), rope rounds once, and each key split of attention is rounded to
the model's dtype before the splits merge.

With `PDL` the kernels take part in programmatic dependent launch: a kernel may start before the
one before it has ended. The first kernel of a pass is launched without it, so until `gdc_wait`
a kernel may read weights and what was there before the pass, and nothing that the pass writes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def prefetch_lines(pointers):
    """Ask for the cache lines of pointers [rows, lines] to come to L2."""
    tl.inline_asm_elementwise(
        "{ .reg .u64 a; cvta.to.global.u64 a, $1; prefetch.global.L2 [a]; mov.u32 $0, 0; }",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_first_weights(
    weight_ptr,
    cols,
    IN: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """What `project` needs first of weight rows `cols`, asked for before the kernel before has ended.

    For one row the first tile itself, [BLOCK_N, BLOCK_K]; for more, lines of 64 elements to L2.
    """
    if PDL:
        gdc_launch_dependents()
    if BLOCK_M == 1:
        ks = tl.arange(0, BLOCK_K)
        first = tl.load(weight_ptr + cols[:, None] * IN + ks[None, :], mask=ks[None, :] < IN, other=0.0)
    else:
        first = cols
        if PDL:
            lines: tl.constexpr = triton.next_power_of_2((IN + 63) // 64)
            starts = tl.minimum(tl.arange(0, lines) * 64, IN - 1)
            prefetch_lines(weight_ptr + cols[:, None] * IN + starts[None, :])
    return first


@triton.jit
def load_rows(
    x_ptr,
    lse_ptr,
    rows,
    k,
    num_tokens,
    x_stride,
    IN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x [rows, k .. k + BLOCK_K); with several splits, the parts of attention merged.

    Part i weighs exp2(lse_i); parts are [NUM_SPLITS, num_tokens, IN], lse [NUM_SPLITS, num_tokens, heads].
    All parts are loaded at once: one after another, each would wait for the one before.
    """
    if NUM_SPLITS == 1:
        ks = k + tl.arange(0, BLOCK_K)
        mask = (rows[:, None] < num_tokens) & (ks[None, :] < IN)
        x = tl.load(x_ptr + rows[:, None] * x_stride + ks[None, :], mask=mask, other=0.0)
    else:
        num_heads: tl.constexpr = IN // HEAD_DIM
        heads = (k // HEAD_DIM + tl.arange(0, BLOCK_K // HEAD_DIM))[None, None, :]
        part_rows = tl.arange(0, NUM_SPLITS)[:, None, None] * num_tokens + rows[None, :, None]
        mask = (rows[None, :, None] < num_tokens) & (heads < num_heads)
        offsets = part_rows * num_heads + heads  # [NUM_SPLITS, BLOCK_M, heads]
        lse = tl.load(lse_ptr + offsets, mask=mask, other=0.0)
        pointers = x_ptr + offsets[:, :, :, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, None, None, :]
        parts = tl.load(pointers, mask=mask[:, :, :, None], other=0.0)
        shares = tl.exp2(lse - tl.max(lse, 0)[None, :, :])
        shares = shares / tl.sum(shares, 0)[None, :, :]
        merged = tl.sum(parts.to(tl.float32) * shares[:, :, :, None], 0)
        x = merged.to(x_ptr.dtype.element_ty).reshape(BLOCK_M, BLOCK_K)
    return x


@triton.jit
def scale_rows(x, norm_ptr, ks, IN: tl.constexpr):
    """x * norm weight in x's dtype, and the sum of x's squares in each row."""
    wide = x.to(tl.float32)
    scale = tl.load(norm_ptr + ks, mask=ks < IN, other=0.0).to(tl.float32)
    return (wide * scale[None, :]).to(x.dtype), tl.sum(wide * wide, 1)


@triton.jit
def project(
    first,
    x_ptr,
    lse_ptr,
    norm_ptr,
    weight_ptr,
    rows,
    cols,
    num_tokens,
    x_stride,
    eps,
    IN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """norm(x)[rows] @ weight[cols].T as float32 [BLOCK_M, BLOCK_N]; weight is [out, IN].

    One row is a sum of products, which needs no padding; more rows go through the tensor cores.
    """
    ks = tl.arange(0, BLOCK_K)
    weight_ptrs = weight_ptr + cols[:, None] * IN + ks[None, :]
    squares = tl.zeros([BLOCK_M], tl.float32)
    if BLOCK_M == 1:
        w = first
        products = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for k in tl.static_range(0, IN, BLOCK_K):
            x = load_rows(
                x_ptr, lse_ptr, rows, k, num_tokens, x_stride, IN, HEAD_DIM, NUM_SPLITS, BLOCK_M, BLOCK_K
            )
            if HAS_NORM:
                x, more = scale_rows(x, norm_ptr, k + ks, IN)
                squares += more
            products += w.to(tl.float32) * x.to(tl.float32)
            if k + BLOCK_K < IN:
                w = tl.load(weight_ptrs + k + BLOCK_K, mask=k + BLOCK_K + ks[None, :] < IN, other=0.0)
        acc = tl.sum(products, 1)[None, :]
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, IN, BLOCK_K):
            w = tl.load(weight_ptrs + k, mask=k + ks[None, :] < IN, other=0.0)
            x = load_rows(
                x_ptr, lse_ptr, rows, k, num_tokens, x_stride, IN, HEAD_DIM, NUM_SPLITS, BLOCK_M, BLOCK_K
            )
            if HAS_NORM:
                x, more = scale_rows(x, norm_ptr, k + ks, IN)
                squares += more
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
    if HAS_NORM:
        acc = acc * tl.rsqrt(squares / IN + eps)[:, None]
    return acc


@triton.jit
def norm_head_halves(
    lo, hi, q_norm_ptr, k_norm_ptr, head, eps, dtype, NUM_HEADS: tl.constexpr, HALF: tl.constexpr
):
    """Root-mean-square norm over a query or key head given as its halves [BLOCK_M, HALF]."""
    ds = tl.arange(0, HALF)
    scale_ptr = q_norm_ptr
    if head >= NUM_HEADS:
        scale_ptr = k_norm_ptr
    rstd = tl.rsqrt(tl.sum(lo * lo + hi * hi, 1) / (2 * HALF) + eps)[:, None]
    lo = lo * rstd * tl.load(scale_ptr + ds).to(tl.float32)[None, :]
    hi = hi * rstd * tl.load(scale_ptr + HALF + ds).to(tl.float32)[None, :]
    return lo.to(dtype).to(tl.float32), hi.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["num_tokens"])  # one binary for every width
def norm_qkv_rope_kernel(
    hidden_ptr,  # [num_tokens, IN], rows hidden_stride apart
    norm_ptr,  # [IN]
    weight_ptr,  # [(NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, IN]
    bias_ptr,  # [out] where HAS_BIAS
    q_norm_ptr,  # [HEAD_DIM] where HAS_HEAD_NORM
    k_norm_ptr,
    cos_ptr,  # [max_positions, HEAD_DIM]
    signed_sin_ptr,
    positions_ptr,  # [num_tokens] int64
    prefix_len_ptr,  # [1] int64
    query_ptr,  # [num_tokens, NUM_HEADS * HEAD_DIM], written
    kv_ptr,  # [2, NUM_KV_HEADS, capacity, HEAD_DIM], written at the window's slots
    num_tokens,
    hidden_stride,
    kv_stride,
    head_stride,
    eps,
    IN: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_HEAD_NORM: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Heads of the window's tokens, rotated; queries to their buffer, keys and values to the cache.

    A tile holds BLOCK_N / 2 columns of a head's first half, each beside its partner in the second half.
    """
    half: tl.constexpr = HEAD_DIM // 2
    pairs: tl.constexpr = BLOCK_N // 2
    tiles: tl.constexpr = HEAD_DIM // BLOCK_N
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    head = tl.program_id(0) // tiles
    ds = (tl.program_id(0) % tiles) * pairs + tl.arange(0, pairs)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (rows < num_tokens)[:, None]
    js = tl.arange(0, BLOCK_N)
    cols = head * HEAD_DIM + (tl.program_id(0) % tiles) * pairs + js // 2 + (js % 2) * half
    first = load_first_weights(weight_ptr, cols, IN, PDL, BLOCK_M, BLOCK_K)
    slots = (tl.load(prefix_len_ptr) + rows)[:, None]
    turns = tl.load(positions_ptr + rows, mask=rows < num_tokens, other=0)[:, None] * HEAD_DIM + ds[None, :]
    cos = tl.load(cos_ptr + turns, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(signed_sin_ptr + turns + half, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    acc = project(
        first, hidden_ptr, hidden_ptr, norm_ptr, weight_ptr, rows, cols, num_tokens, hidden_stride, eps,
        IN, HEAD_DIM, 1, True, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias_ptr + cols).to(tl.float32)[None, :]
    lo, hi = tl.split(acc.to(dtype).to(tl.float32).reshape(BLOCK_M, pairs, 2))
    if head < NUM_HEADS + NUM_KV_HEADS:
        if HAS_HEAD_NORM:
            lo, hi = norm_head_halves(lo, hi, q_norm_ptr, k_norm_ptr, head, eps, dtype, NUM_HEADS, half)
        rotated = lo * cos - hi * sin
        hi = hi * cos + lo * sin
        lo = rotated
    if head < NUM_HEADS:
        out = query_ptr + (rows[:, None] * NUM_HEADS + head) * HEAD_DIM + ds[None, :]
        tl.store(out, lo.to(dtype), mask=mask)
        tl.store(out + half, hi.to(dtype), mask=mask)
    else:
        kind, kv_head = (head - NUM_HEADS) // NUM_KV_HEADS, (head - NUM_HEADS) % NUM_KV_HEADS
        out = kv_ptr + kind * kv_stride + kv_head * head_stride + slots * HEAD_DIM + ds[None, :]
        tl.store(out, lo.to(dtype), mask=mask)
        tl.store(out + half, hi.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])  # one binary for every width
def project_add_kernel(
    x_ptr,  # [NUM_SPLITS, num_tokens, IN]
    lse_ptr,  # [NUM_SPLITS, num_tokens, IN / HEAD_DIM] float32 where NUM_SPLITS > 1
    weight_ptr,  # [out, IN]
    residual_ptr,  # [num_tokens, out], rows residual_stride apart
    out_ptr,  # [num_tokens, out], rows out_stride apart, written; may be the residual itself
    num_tokens,
    num_cols,
    residual_stride,
    out_stride,
    IN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """residual + x @ weight.T, the splits of attention merged on the way in."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    js = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.minimum(js, num_cols - 1)
    mask = (rows[:, None] < num_tokens) & (js[None, :] < num_cols)
    first = load_first_weights(weight_ptr, cols, IN, PDL, BLOCK_M, BLOCK_K)
    if PDL:
        gdc_wait()
    residual = tl.load(residual_ptr + rows[:, None] * residual_stride + js[None, :], mask=mask, other=0.0)
    acc = project(
        first, x_ptr, lse_ptr, x_ptr, weight_ptr, rows, cols, num_tokens, IN, 0.0,
        IN, HEAD_DIM, NUM_SPLITS, False, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    out = residual.to(tl.float32) + acc.to(dtype).to(tl.float32)
    tl.store(out_ptr + rows[:, None] * out_stride + js[None, :], out.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])  # one binary for every width
def norm_swiglu_kernel(
    hidden_ptr,  # [num_tokens, IN], rows hidden_stride apart
    norm_ptr,  # [IN]
    weight_ptr,  # [2 * intermediate, IN], gate first
    out_ptr,  # [num_tokens, intermediate], written
    num_tokens,
    intermediate,
    hidden_stride,
    eps,
    IN: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """silu(gate) * up of the normed rows; a tile holds BLOCK_N / 2 gate columns beside their up columns."""
    pairs: tl.constexpr = BLOCK_N // 2
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    ds = tl.program_id(0) * pairs + tl.arange(0, pairs)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    js = tl.arange(0, BLOCK_N)
    cols = tl.minimum(tl.program_id(0) * pairs + js // 2, intermediate - 1) + (js % 2) * intermediate
    first = load_first_weights(weight_ptr, cols, IN, PDL, BLOCK_M, BLOCK_K)
    if PDL:
        gdc_wait()
    acc = project(
        first, hidden_ptr, hidden_ptr, norm_ptr, weight_ptr, rows, cols, num_tokens, hidden_stride, eps,
        IN, 1, 1, True, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    gate, up = tl.split(acc.to(dtype).to(tl.float32).reshape(BLOCK_M, pairs, 2))
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    mask = (rows[:, None] < num_tokens) & (ds[None, :] < intermediate)
    tl.store(out_ptr + rows[:, None] * intermediate + ds[None, :], (silu * up).to(dtype), mask=mask)
