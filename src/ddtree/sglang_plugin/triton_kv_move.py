# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped"
"""The Triton kernel behind `kv_move`. Import it only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def kv_move_kernel(
    pointers_ptr,  # [num_buffers] int64 addresses
    window_ptr,  # [bs, W] int64 slots
    path_ptr,  # [bs, NUM_SLOTS] int64 columns, -1 beyond the path
    window_stride,
    words,  # int32 words of a row
    NUM_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Words `program_id(2)` of the rows of request `program_id(0)` in buffer `program_id(1)`.

    A thread holds the same words of every row, so its own order, the path's, is all the order needed.
    """
    request = tl.program_id(0).to(tl.int64)
    buffer_ptr = tl.load(pointers_ptr + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_word = word < words
    for column in range(1, NUM_SLOTS):
        source = tl.load(path_ptr + request * NUM_SLOTS + column)
        # A chain's path is in place already, and beyond the path there is nothing to move.
        if source > column:
            from_slot = tl.load(window_ptr + request * window_stride + source)
            to_slot = tl.load(window_ptr + request * window_stride + column)
            row = tl.load(buffer_ptr + from_slot * words + word, mask=is_word)
            tl.store(buffer_ptr + to_slot * words + word, row, mask=is_word)
