"""Triton kernels of a decoder layer's projections for small windows.

Together with `ddtree.layers.triton_attention` a layer is five kernels: qkv + head norms + rope +
cache write; attention; output projection + residual; gate and up + SwiGLU; down projection +
residual. At these sizes a layer's weights pass in two microseconds, so what counts is the number of
kernels and the latency inside each. A norm costs no pass of its own: the kernel that writes the
residual stream also writes it times the next norm's weight, and each column block's sum of squares
of a row, from which the next projection scales its product. Products accumulate in float32. Against
`ddtree.layers.decoder` only this rounds differently: a norm's scale factor comes after the product
(`round(x * weight) @ w * rstd`), rope rounds once, and each key split of attention is rounded to
the model's dtype before the splits merge.

`LAUNCH` other than "plain" takes part in programmatic dependent launch: a kernel may start before
the one before it has ended ("late": when that one's product is done; "early": at once). Until
`gdc_wait` a kernel may read weights and what was there before the pass, and nothing that the pass
writes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Tiles of its weights that the one-row form keeps in registers.
MAX_HELD_TILES = tl.constexpr(16)


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
def load_tile(ptr, rows, k, IN: tl.constexpr, BLOCK_K: tl.constexpr):
    """[rows, BLOCK_K] of a matrix with IN columns, from column k."""
    ks = k + tl.arange(0, BLOCK_K)
    pointers = ptr + rows[:, None] * IN + ks[None, :]
    if IN % BLOCK_K == 0:
        return tl.load(pointers)
    return tl.load(pointers, mask=ks[None, :] < IN, other=0.0)


@triton.jit
def load_groups(ptr, rows, k, IN: tl.constexpr, K_GROUPS: tl.constexpr, BLOCK_K: tl.constexpr):
    """The tile of `load_tile` as [K_GROUPS, rows, BLOCK_K / K_GROUPS], neighbouring columns together."""
    width: tl.constexpr = BLOCK_K // K_GROUPS
    ks = k + (tl.arange(0, K_GROUPS) * width)[:, None, None] + tl.arange(0, width)[None, None, :]
    pointers = ptr + rows[None, :, None] * IN + ks
    if IN % BLOCK_K == 0:
        return tl.load(pointers)
    return tl.load(pointers, mask=ks < IN, other=0.0)


@triton.jit
def start_weights(
    weight_ptr,
    cols,
    IN: tl.constexpr,
    LAUNCH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """What `project` needs of weight rows `cols`, asked for before the kernel before has ended.

    For one row the first tiles [BLOCK_N, BLOCK_K] themselves; for more, lines of 64 elements to L2.
    """
    held = ()
    if BLOCK_M == 1:
        for i in tl.static_range(min((IN + BLOCK_K - 1) // BLOCK_K, MAX_HELD_TILES)):
            tile = load_tile(weight_ptr, cols, i * BLOCK_K, IN, BLOCK_K)
            # Grows in an unrolled loop: Triton compiles that, mypy sees the length change.
            held = held + (tile,)  # type: ignore[assignment]  # noqa: RUF005 (Triton unpacks no tuples)
    elif LAUNCH != "plain":
        lines: tl.constexpr = triton.next_power_of_2((IN + 63) // 64)
        starts = tl.minimum(tl.arange(0, lines) * 64, IN - 1)
        prefetch_lines(weight_ptr + cols[:, None] * IN + starts[None, :])
    return held


@triton.jit
def project(
    held,
    x_ptr,
    weight_ptr,
    rows,
    cols,
    IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_GROUPS: tl.constexpr,
):
    """x[rows] @ weight[cols].T as float32 [BLOCK_M, BLOCK_N]; x is [n, IN], weight [out, IN].

    One row is a sum of products, which needs no padding; more rows go through the tensor cores. With
    K_GROUPS warps each multiplies its own columns, so a warp's chain of products is that much shorter.
    """
    if BLOCK_M == 1:
        products = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        same_row = tl.broadcast_to(rows, [BLOCK_N])  # x in the layout of the weights
        for i in tl.static_range(min((IN + BLOCK_K - 1) // BLOCK_K, MAX_HELD_TILES)):
            x = load_tile(x_ptr, same_row, i * BLOCK_K, IN, BLOCK_K)
            products += held[i].to(tl.float32) * x.to(tl.float32)
        for k in range(MAX_HELD_TILES * BLOCK_K, IN, BLOCK_K):
            w = load_tile(weight_ptr, cols, k, IN, BLOCK_K)
            products += w.to(tl.float32) * load_tile(x_ptr, same_row, k, IN, BLOCK_K).to(tl.float32)
        acc = tl.sum(products, 1)[None, :]
    elif K_GROUPS == 1:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, IN, BLOCK_K):
            x = load_tile(x_ptr, rows, k, IN, BLOCK_K)
            w = load_tile(weight_ptr, cols, k, IN, BLOCK_K)
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
    else:
        sums = tl.zeros([K_GROUPS, BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, IN, BLOCK_K):
            x = load_groups(x_ptr, rows, k, IN, K_GROUPS, BLOCK_K)
            w = load_groups(weight_ptr, cols, k, IN, K_GROUPS, BLOCK_K)
            sums = tl.dot(x, w.permute(0, 2, 1), sums, input_precision="ieee")
        acc = tl.sum(sums, 0)
    return acc


@triton.jit
def load_square_parts(squares_ptr, rows, num_tokens, num_parts, MAX_PARTS: tl.constexpr):
    """Sums of squares of `rows` [MAX_PARTS, BLOCK_M], a row for each column block of the writer."""
    parts = tl.arange(0, MAX_PARTS)
    pointers = squares_ptr + parts[:, None] * num_tokens + rows[None, :]
    return tl.load(pointers, mask=(parts < num_parts)[:, None], other=0.0)


@triton.jit
def root_scale(square_parts, eps, IN: tl.constexpr):
    """1 / root mean square of each row, [BLOCK_M, 1]."""
    return tl.rsqrt(tl.sum(square_parts, 0) / IN + eps)[:, None]


@triton.jit(do_not_specialize=["num_tokens"])  # one binary for every width
def start_window_kernel(
    hidden_ptr,  # [num_tokens, IN]
    norm_ptr,  # [IN]
    cos_ptr,  # [max_positions, HEAD_DIM]
    signed_sin_ptr,
    positions_ptr,  # [num_tokens] int64
    scaled_ptr,  # [num_tokens, IN], written
    squares_ptr,  # [num_parts, num_tokens] float32, part 0 written
    rope_ptr,  # [num_tokens, HEAD_DIM], written: cosines, then sines, of half the dimensions
    IN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What every layer or the first one reads of a window: its rotations, its first norm's input."""
    row, half = tl.program_id(0), HEAD_DIM // 2
    ks = tl.arange(0, BLOCK)
    x = tl.load(hidden_ptr + row * IN + ks, mask=ks < IN, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + ks, mask=ks < IN, other=0.0).to(tl.float32)
    ds = tl.arange(0, HEAD_DIM)
    turn = tl.load(positions_ptr + row) * HEAD_DIM + ds
    cos = tl.load(cos_ptr + turn)
    sin = tl.load(signed_sin_ptr + turn)
    rope = rope_ptr + row * HEAD_DIM
    tl.store(rope + ds, cos, mask=ds < half)
    tl.store(rope + ds, sin, mask=ds >= half)
    tl.store(scaled_ptr + row * IN + ks, (x * norm).to(scaled_ptr.dtype.element_ty), mask=ks < IN)
    tl.store(squares_ptr + row, tl.sum(x * x, 0))


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


@triton.jit(do_not_specialize=["num_tokens", "num_parts"])  # one binary for every width
def qkv_rope_kernel(
    scaled_ptr,  # [num_tokens, IN], residual stream times norm weight
    squares_ptr,  # [num_parts, num_tokens] float32
    weight_ptr,  # [(NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, IN]
    bias_ptr,  # [out] where HAS_BIAS
    q_norm_ptr,  # [HEAD_DIM] where HAS_HEAD_NORM
    k_norm_ptr,
    rope_ptr,  # [num_tokens, HEAD_DIM]
    prefix_len_ptr,  # [1] int64
    query_ptr,  # [num_tokens, NUM_HEADS * HEAD_DIM], written
    kv_ptr,  # [2, NUM_KV_HEADS, capacity, HEAD_DIM], written at the window's slots
    num_tokens,
    num_parts,
    kv_stride,
    head_stride,
    eps,
    IN: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_HEAD_NORM: tl.constexpr,
    LAUNCH: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_GROUPS: tl.constexpr,
):
    """Heads of the window's tokens, rotated; queries to their buffer, keys and values to the cache.

    A tile holds BLOCK_N / 2 columns of a head's first half, each beside its partner in the second half.
    """
    half: tl.constexpr = HEAD_DIM // 2
    pairs: tl.constexpr = BLOCK_N // 2
    tiles: tl.constexpr = HEAD_DIM // BLOCK_N
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    if LAUNCH == "early":
        gdc_launch_dependents()
    head = tl.program_id(0) // tiles
    ds = (tl.program_id(0) % tiles) * pairs + tl.arange(0, pairs)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (rows < num_tokens)[:, None]
    inside = tl.minimum(rows, num_tokens - 1)
    js = tl.arange(0, BLOCK_N)
    cols = head * HEAD_DIM + (tl.program_id(0) % tiles) * pairs + js // 2 + (js % 2) * half
    held = start_weights(weight_ptr, cols, IN, LAUNCH, BLOCK_M, BLOCK_K)
    slots = (tl.load(prefix_len_ptr) + rows)[:, None]
    if LAUNCH != "plain":
        gdc_wait()
    square_parts = load_square_parts(squares_ptr, inside, num_tokens, num_parts, MAX_PARTS)
    turns = rope_ptr + inside[:, None] * HEAD_DIM + ds[None, :]
    cos, sin = tl.load(turns).to(tl.float32), tl.load(turns + half).to(tl.float32)
    acc = project(held, scaled_ptr, weight_ptr, inside, cols, IN, BLOCK_M, BLOCK_N, BLOCK_K, K_GROUPS)
    if LAUNCH == "late":
        gdc_launch_dependents()
    acc = acc * root_scale(square_parts, eps, IN)
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
    x_ptr,  # [num_tokens, IN]
    weight_ptr,  # [out, IN]
    residual_ptr,  # [num_tokens, out], rows residual_stride apart
    norm_ptr,  # [out], the next norm's weight
    out_ptr,  # [num_tokens, out], rows out_stride apart, written; may be the residual itself
    scaled_ptr,  # [num_tokens, out], written: out times the norm's weight
    squares_ptr,  # [num_programs(0), num_tokens] float32, written: sums of out's squares
    num_tokens,
    num_cols,
    residual_stride,
    out_stride,
    IN: tl.constexpr,
    LAUNCH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_GROUPS: tl.constexpr,
):
    """residual + x @ weight.T, and what the next norm needs of it."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if LAUNCH == "early":
        gdc_launch_dependents()
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = tl.minimum(rows, num_tokens - 1)
    js = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.minimum(js, num_cols - 1)
    mask = (rows[:, None] < num_tokens) & (js[None, :] < num_cols)
    held = start_weights(weight_ptr, cols, IN, LAUNCH, BLOCK_M, BLOCK_K)
    norm = tl.load(norm_ptr + cols).to(tl.float32)
    if LAUNCH != "plain":
        gdc_wait()
    residual = tl.load(residual_ptr + rows[:, None] * residual_stride + js[None, :], mask=mask, other=0.0)
    acc = project(held, x_ptr, weight_ptr, inside, cols, IN, BLOCK_M, BLOCK_N, BLOCK_K, K_GROUPS)
    if LAUNCH == "late":
        gdc_launch_dependents()
    out = (residual.to(tl.float32) + acc.to(dtype).to(tl.float32)).to(dtype)
    tl.store(out_ptr + rows[:, None] * out_stride + js[None, :], out, mask=mask)
    wide = tl.where(mask, out.to(tl.float32), 0.0)
    scaled_ptrs = scaled_ptr + rows[:, None] * num_cols + js[None, :]
    tl.store(scaled_ptrs, (wide * norm[None, :]).to(dtype), mask=mask)
    squares_ptrs = squares_ptr + tl.program_id(0) * num_tokens + rows
    tl.store(squares_ptrs, tl.sum(wide * wide, 1), mask=rows < num_tokens)


@triton.jit(do_not_specialize=["num_tokens", "num_parts"])  # one binary for every width
def swiglu_kernel(
    scaled_ptr,  # [num_tokens, IN], residual stream times norm weight
    squares_ptr,  # [num_parts, num_tokens] float32
    weight_ptr,  # [2 * intermediate, IN], gate first
    out_ptr,  # [num_tokens, intermediate], written
    num_tokens,
    num_parts,
    intermediate,
    eps,
    IN: tl.constexpr,
    LAUNCH: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_GROUPS: tl.constexpr,
):
    """silu(gate) * up of the normed rows; a tile holds BLOCK_N / 2 gate columns beside their up columns."""
    pairs: tl.constexpr = BLOCK_N // 2
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if LAUNCH == "early":
        gdc_launch_dependents()
    ds = tl.program_id(0) * pairs + tl.arange(0, pairs)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = tl.minimum(rows, num_tokens - 1)
    js = tl.arange(0, BLOCK_N)
    cols = tl.minimum(tl.program_id(0) * pairs + js // 2, intermediate - 1) + (js % 2) * intermediate
    held = start_weights(weight_ptr, cols, IN, LAUNCH, BLOCK_M, BLOCK_K)
    if LAUNCH != "plain":
        gdc_wait()
    square_parts = load_square_parts(squares_ptr, inside, num_tokens, num_parts, MAX_PARTS)
    acc = project(held, scaled_ptr, weight_ptr, inside, cols, IN, BLOCK_M, BLOCK_N, BLOCK_K, K_GROUPS)
    if LAUNCH == "late":
        gdc_launch_dependents()
    acc = acc * root_scale(square_parts, eps, IN)
    gate, up = tl.split(acc.to(dtype).to(tl.float32).reshape(BLOCK_M, pairs, 2))
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    mask = (rows[:, None] < num_tokens) & (ds[None, :] < intermediate)
    tl.store(out_ptr + rows[:, None] * intermediate + ds[None, :], (silu * up).to(dtype), mask=mask)
