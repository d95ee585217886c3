"""The target's static key-value cache for one sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.tree.triton_choice import prefers_triton
from ddtree.tree.verify import VerifyResult, compaction_indices


class KVCache:
    """Keys and values of every layer, slot = position in the sequence.

    Attributes:
        data: [num_layers, 2, num_kv_heads, capacity, head_dim].
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        capacity_tokens: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_kv_heads, capacity_tokens, head_dim)
        # A CUDA graph reads (and masks) slots that nothing wrote, where NaN times 0 would spread;
        # on the CPU only written slots are read, and untouched pages cost no memory.
        make = torch.empty if device.type == "cpu" else torch.zeros
        self.data: Tensor = make(shape, dtype=dtype, device=device)

    @property
    def capacity_tokens(self) -> int:
        return self.data.shape[3]

    def compact(self, prefix_len: Tensor, result: VerifyResult) -> None:
        """Move the accept path's keys and values to the front of the verify window, on every layer.

        Gather then scatter: a slot may be a path node's own and another's destination.

        Args:
            prefix_len: [1] int64, where the window begins.
            result: the accept walk of one request.
        """
        if prefers_triton(self.data):
            from ddtree.layers.triton_commit import move_rows

            move_rows(self.data, prefix_len, result.accept_indices[0])
            return
        source, destination = compaction_indices(result, prefix_len)  # [1, block_size]
        if source.is_cpu and torch.equal(source, destination):
            return  # a chain's path, or a tree's first branch, stands at the front already
        self.data.index_copy_(3, destination[0], self.data.index_select(3, source[0]))
