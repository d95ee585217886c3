"""The target's static key-value cache for one sequence."""

from __future__ import annotations

import torch
from torch import Tensor


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

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy slots `source` [m] to `destination` [m] on every layer.

        Gather then scatter: a slot may be both. Slots that nothing committed may be among them.
        """
        self.data.index_copy_(3, destination, self.data.index_select(3, source))
