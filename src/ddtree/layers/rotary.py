"""Rotary position embedding from precomputed tables."""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryTable:
    """Cosines and sines of every position up to a limit, in the half-split layout of Llama and Qwen.

    Args:
        inv_freq: [head_dim / 2] float32 inverse frequencies, scaling rules already applied.
        max_positions: positions 0 .. max_positions - 1 can be looked up.
        dtype: dtype of the tables, that of the tensors they rotate.
        scaling: factor on cosine and sine (YaRN's attention factor).
    """

    def __init__(
        self, inv_freq: Tensor, max_positions: int, dtype: torch.dtype, scaling: float = 1.0
    ) -> None:
        positions = torch.arange(max_positions, device=inv_freq.device, dtype=torch.float32)
        angles = positions[:, None] * inv_freq.float()[None, :]  # [max_positions, head_dim / 2]
        cos, sin = angles.cos() * scaling, angles.sin() * scaling
        self.half = inv_freq.shape[0]
        self.cos = torch.cat((cos, cos), -1).to(dtype)  # [max_positions, head_dim]
        # The sign of the rotated half sits in the table, so that rotating is one roll.
        self.signed_sin = torch.cat((-sin, sin), -1).to(dtype)  # [max_positions, head_dim]

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [n, 1, head_dim] of positions [n]."""
        return self.cos[positions].unsqueeze(1), self.signed_sin[positions].unsqueeze(1)

    def rotate(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        """Rotate heads x [n, heads, head_dim]."""
        return torch.addcmul(x * cos, x.roll(self.half, -1), signed_sin)
