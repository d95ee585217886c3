# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped"
"""The Triton kernel behind `verify_mask`: one program a row. Import it only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def verify_mask_kernel(
    mask_ptr,  # flat uint8
    ancestor_mask_ptr,  # [bs, W, W] uint8
    prefix_lens_ptr,  # [bs] int64
    bs,
    W: tl.constexpr,
    W_PAD: tl.constexpr,
    BS_PAD: tl.constexpr,
    FILL_PREFIX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row `program_id(1)` of request `program_id(0)`."""
    request, row = tl.program_id(0), tl.program_id(1)
    requests = tl.arange(0, BS_PAD)
    lens_before = tl.load(prefix_lens_ptr + requests, mask=(requests < bs) & (requests < request), other=0)
    prefix_len = tl.load(prefix_lens_ptr + request)
    # In int64: a batch of long contexts has more than 2**31 cells.
    start = W * (tl.sum(lens_before, 0) + request.to(tl.int64) * W) + row * (prefix_len + W)
    columns = tl.arange(0, W_PAD)
    cells = tl.load(
        ancestor_mask_ptr + (request.to(tl.int64) * W + row) * W + columns, mask=columns < W, other=0
    )
    tl.store(mask_ptr + start + prefix_len + columns, cells, mask=columns < W)
    if FILL_PREFIX:
        ones = tl.full([BLOCK], 1, dtype=tl.uint8)
        block = tl.arange(0, BLOCK)
        done = prefix_len * 0
        while done < prefix_len:
            tl.store(mask_ptr + start + done + block, ones, mask=done + block < prefix_len)
            done += BLOCK
