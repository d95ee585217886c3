"""The tokens of one forward pass and what each of them may see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Window:
    """A run of n tokens that follows `prefix_len` cached tokens.

    Their keys and values go to slots prefix_len .. prefix_len + n - 1 of the cache. A token sees
    the whole prefix and, inside the window, what `tree_mask` says.

    Attributes:
        positions: [n] int64 rotary positions (root position + depth in a tree).
        prefix_len: [1] int64 on the device: cached tokens before the window.
        kv_extent: key slots that attention reads, at least prefix_len + n.
        tree_mask: [n, n] bool, row i = what token i sees of the window; None is causal.
        start: `prefix_len` where the host knows it; None inside a captured CUDA graph.
    """

    positions: Tensor
    prefix_len: Tensor
    kv_extent: int
    tree_mask: Tensor | None
    start: int | None

    @classmethod
    def at(cls, start: int, positions: Tensor, tree_mask: Tensor | None) -> Window:
        """The window that begins at a slot the host knows."""
        prefix_len = torch.tensor([start], device=positions.device)
        return cls(positions, prefix_len, start + positions.shape[0], tree_mask, start)

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    def slots(self) -> Tensor:
        """Cache slots of the window's tokens, [n] int64."""
        return self.prefix_len + torch.arange(self.num_tokens, device=self.positions.device)

    def visible(self, sliding_window: int | None = None) -> Tensor:
        """What each token sees, [n, kv_extent] bool; with a sliding window only keys nearer than it."""
        n, device = self.num_tokens, self.positions.device
        keys = torch.arange(self.kv_extent, device=device)
        inside = self.tree_mask
        if inside is None:
            inside = torch.ones(n, n, dtype=torch.bool, device=device).tril()
        visible = (keys < self.prefix_len).expand(n, -1)
        if self.start is not None:
            visible = torch.cat((visible[:, : self.start], inside), 1)
        else:
            visible = visible.scatter(1, self.slots().expand(n, n), inside)
        if sliding_window is not None:
            key_positions = keys.index_copy(0, self.slots(), self.positions)
            distance = self.positions[:, None] - key_positions[None, :]
            visible = visible & (distance.abs() < sliding_window)
        return visible

    def additive_mask(self, dtype: torch.dtype, sliding_window: int | None = None) -> Tensor:
        """`visible` as 0 and -inf in the dtype of the scores, [n, kv_extent]."""
        visible = self.visible(sliding_window)
        mask = torch.full(visible.shape, float("-inf"), dtype=dtype, device=visible.device)
        return mask.masked_fill_(visible, 0.0)

    def write(self, cache: Tensor, rows: Tensor) -> None:
        """Write rows [..., n, head_dim] to the window's slots of cache [..., capacity, head_dim]."""
        if self.start is not None:
            cache.narrow(cache.dim() - 2, self.start, self.num_tokens).copy_(rows)
        else:
            cache.index_copy_(cache.dim() - 2, self.slots(), rows)
