"""The target's static key-value cache for one sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.layers.window import Window


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

    def compact(self, window: Window, accept_indices: Tensor) -> None:
        """Move the KV of the accept path to the front of the verify window, on every layer.

        Gather then scatter: an accepted node's slot may be another's destination.

        Args:
            window: the verify window.
            accept_indices: [m] node indices in path order; trailing entries beyond the path may hold
                any index, since what they write lies past the committed tokens.
        """
        if window.start is not None:
            moved = self.data[:, :, :, accept_indices + window.start]
            self.data[:, :, :, window.start : window.start + accept_indices.shape[0]] = moved
            return
        moved = self.data.index_select(3, window.prefix_len + accept_indices)
        slots = window.prefix_len + torch.arange(accept_indices.shape[0], device=self.data.device)
        self.data.index_copy_(3, slots, moved)
