"""What a round commits: the path that the target's own tokens take through each tree."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ddtree.sglang_plugin.draft_sampler import DraftedTrees
from ddtree.tree import follow


class AcceptPath(NamedTuple):
    """The paths of a batch; a row of a request that commits nothing has length 0."""

    indices: Tensor  # [bs, block] int64 columns along the path, the root first, -1 beyond its end
    tokens: Tensor  # [bs, block] int64: correct drafts, then the bonus token; 0 beyond
    lens: Tensor  # [bs] int32, the bonus token counted
    bonus_tokens: Tensor  # [bs] int64

    def where(self, is_committed: Tensor) -> AcceptPath:
        """The paths of requests with `is_committed` [bs] bool, nothing for the others."""
        return AcceptPath(
            torch.where(is_committed.unsqueeze(1), self.indices, -1),
            self.tokens,
            torch.where(is_committed, self.lens, 0),
            self.bonus_tokens,
        )

    def rows(self, num_verify_tokens: int) -> Tensor:
        """The path's rows in tensors of [bs * W] rows, [bs, block] int64, -1 beyond its end."""
        bs = self.indices.shape[0]
        first = torch.arange(bs, device=self.indices.device).unsqueeze(1) * num_verify_tokens
        return torch.where(self.indices >= 0, first + self.indices, -1)


def accept_path(
    trees: DraftedTrees, target_tokens: Tensor, block_size: int, max_accept_tokens: int
) -> AcceptPath:
    """Follow `target_tokens` [bs, W], the target's own token after each column, down the trees.

    At most `max_accept_tokens` tokens are accepted, 0 meaning the whole path. No device wait.
    """
    walk = follow(trees.tree, trees.ancestor_mask, target_tokens, block_size - 1)
    indices, num_correct_drafts, bonus_tokens = (
        walk.accept_indices,
        walk.num_correct_drafts,
        walk.bonus_tokens,
    )
    if 0 < max_accept_tokens < block_size:
        # A node's token is the target's choice after its parent: any prefix of a path may be committed.
        num_correct_drafts = num_correct_drafts.clamp(max=max_accept_tokens - 1)
        columns = torch.arange(block_size, device=indices.device)
        indices = indices.masked_fill(columns > num_correct_drafts.unsqueeze(1), -1)
        bonus_tokens = walk.accept_tokens.gather(1, num_correct_drafts.unsqueeze(1)).squeeze(1)
    return AcceptPath(
        indices, walk.accept_tokens.clamp(min=0), (num_correct_drafts + 1).to(torch.int32), bonus_tokens
    )
