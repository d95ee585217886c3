"""The drafter's memory of the committed tokens."""

from __future__ import annotations

import torch
from torch import Tensor


class DraftContext:
    """Keys and values that the drafter made from the target's hidden states, one slot a committed token.

    The drafter's block borrows the slots after the committed ones; the next append covers them.

    Attributes:
        kv_data: [num_layers, 2, num_kv_heads, capacity, head_dim], keys first.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_kv_heads, capacity, head_dim)
        self.kv_data: Tensor = torch.zeros(shape, dtype=dtype, device=device)
