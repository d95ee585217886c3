"""The state of the one sequence that an engine decodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.config import Mode
from ddtree.draft.context import DraftContext
from ddtree.engine.kv_cache import KVCache
from ddtree.engine.protocols import Drafter, TargetModel
from ddtree.layers.window import Window
from ddtree.tree.budget import DraftPlan


@dataclass(frozen=True, slots=True)
class ModelPair:
    """A target with its cache and, for drafted modes, a drafter with its context."""

    target: TargetModel
    kv_cache: KVCache
    drafter: Drafter | None
    draft_context: DraftContext | None
    candidate_topk: int = 0  # 0: as many as the node budget

    def topk(self, plan: DraftPlan) -> int:
        """Candidates kept a position: one for a chain; a tree of B nodes can use no more than B."""
        if plan.mode == Mode.CHAIN:
            return 1
        return min(self.candidate_topk or plan.node_budget, plan.node_budget)

    @property
    def tap_layer_ids(self) -> tuple[int, ...]:
        return self.drafter.target_layer_ids if self.drafter is not None else ()

    @property
    def block_size(self) -> int:
        return self.drafter.block_size if self.drafter is not None else 1


class Sequence:
    """Where a sequence stands, on the device, in tensors whose addresses never change.

    Attributes:
        root_token: [1] int64, committed but without KV.
        prefix_len: [1] int64, committed tokens with KV.
        start: `prefix_len` where the host knows it; None while a CUDA graph is captured or replayed.
    """

    def __init__(self, device: torch.device) -> None:
        self.root_token = torch.zeros(1, dtype=torch.int64, device=device)
        self.prefix_len = torch.zeros(1, dtype=torch.int64, device=device)
        self.start: int | None = 0
        self.kv_extent = 0  # key slots read by a captured graph; set while capturing

    def begin(self, root_token: int, prefix_len: int) -> None:
        """Stand after a prompt of `prefix_len` tokens, with its first new token as root."""
        self.root_token.fill_(root_token)
        self.prefix_len.fill_(prefix_len)
        self.start = prefix_len

    def window(self, positions: Tensor, tree_mask: Tensor | None) -> Window:
        """The window that begins at the root, for tokens at positions [n]."""
        if self.start is None:
            return Window(positions, self.prefix_len, self.kv_extent, tree_mask, None)
        extent = self.start + positions.shape[0]
        return Window(positions, self.prefix_len, extent, tree_mask, self.start)

    def advance(self, root_token: Tensor, num_accept_tokens: Tensor) -> None:
        """Move past committed tokens; root_token [1] and num_accept_tokens [1] stay on the device."""
        self.root_token.copy_(root_token)
        self.prefix_len.add_(num_accept_tokens)
