"""KV compaction after a verify pass: the accept path's KV moves to the front of the verify window.

Node i of the path goes to column i. A column may be read by one node and written by another, so a request's
rows are moved by one worker in path order (a path's columns ascend, so column i is read before it is
overwritten), or all read before any is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddtree.tree.triton_choice import power_of_two, prefers_triton

MAX_CHUNK_BYTES = 1024


class KVMover:
    """Moves rows of the KV buffers of all layers; made once, since the buffers' addresses do not change.

    Args:
        buffers: K and V of every layer, each [num_slots, ...] with contiguous rows of one size.
    """

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self.buffers = [buffer.view(buffer.shape[0], -1).view(torch.uint8) for buffer in buffers]
        rows = {buffer.shape[1] for buffer in self.buffers}
        self.row_bytes = rows.pop() if len(rows) == 1 else 0
        device = self.buffers[0].device
        self.pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64).to(device)

    def move(self, window: Tensor, accept_indices: Tensor) -> None:
        """Move each request's path to the front of its window.

        `window` [bs, W] int64 has the slots of the verify window, `accept_indices` [bs, draft_depth + 1]
        int64 the path's columns, ascending, -1 beyond its end. No device wait; on CUDA one launch.
        """
        if self.row_bytes and self.row_bytes % 4 == 0 and prefers_triton(window):
            self._move_triton(window, accept_indices)
        else:
            self._move_torch(window, accept_indices)

    def _move_torch(self, window: Tensor, accept_indices: Tensor) -> None:
        columns = torch.arange(accept_indices.shape[1], device=window.device)
        kept = torch.where(accept_indices >= 0, accept_indices, columns)
        sources = window.gather(1, kept).flatten()  # [bs * (draft_depth + 1)]
        targets = window[:, : columns.shape[0]].flatten()
        for buffer in self.buffers:
            # The right side is a copy, complete before the first row is written.
            buffer[targets] = buffer[sources]

    def _move_triton(self, window: Tensor, accept_indices: Tensor) -> None:
        from ddtree.sglang_plugin.triton_kv_move import kv_move_kernel

        bs, num_slots = accept_indices.shape
        words = self.row_bytes // 4
        block = min(power_of_two(words, at_least=32), MAX_CHUNK_BYTES // 4)
        with torch.cuda.device_of(window):
            kv_move_kernel[(bs, self.pointers.shape[0], -(-words // block))](
                self.pointers, window, accept_indices, window.stride(0), words,
                NUM_SLOTS=num_slots, BLOCK=block, num_warps=1,
            )  # fmt: skip


def move_accept_kv(buffers: Sequence[Tensor], window: Tensor, accept_indices: Tensor) -> None:
    """`KVMover(buffers).move(window, accept_indices)`, for a single use."""
    KVMover(buffers).move(window, accept_indices)
