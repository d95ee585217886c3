"""How a draft tree is laid out for the verify pass: positions, ancestor mask, child links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ddtree.tree.draft_tree import DraftTree


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """Where the columns of a tree stand and what they see, besides the committed prefix."""

    positions: Tensor  # [bs, W] int64: root position + depth; padding stands at the root's position
    ancestor_mask: Tensor  # [bs, W, W] bool: row i sees column i and its ancestors; padding sees itself


class RetrieveLinks(NamedTuple):
    """First-child and next-sibling links, -1 for none; SGLang's `retrieve_next_token` and `_sibling`."""

    next_token: Tensor  # [bs, W] int64
    next_sibling: Tensor  # [bs, W] int64


def tree_layout(tree: DraftTree, prefix_lens: Tensor) -> TreeLayout:
    """Positions and ancestor mask of `tree`; `prefix_lens` [bs] counts the committed tokens with KV,
    which is the position of the root (the depth positions and tree attention of arXiv 2604.12989)."""
    return TreeLayout(prefix_lens.unsqueeze(1) + tree.depths, ancestor_mask(tree))


def ancestor_mask(tree: DraftTree) -> Tensor:
    """Row i is true at column i, at its ancestors and at the root, [bs, W, W] bool.

    Pointers to ancestors double their reach each step, so a tree of any shape needs log2(W) steps.
    """
    bs, width = tree.parents.shape
    columns = torch.arange(width, device=tree.parents.device)
    jumps = torch.where(tree.parents < 0, columns, tree.parents)  # [bs, W]; root and padding stay
    mask = torch.eye(width, dtype=torch.bool, device=columns.device).expand(bs, -1, -1)
    for _ in range((width - 1).bit_length()):
        mask = mask | mask.gather(1, jumps.unsqueeze(2).expand(-1, -1, width))
        jumps = jumps.gather(1, jumps)
    return mask


def retrieve_links(tree: DraftTree) -> RetrieveLinks:
    """The links that SGLang's tree verify walks; children in column order, best first."""
    width = tree.num_verify_tokens
    parents, order = tree.parents.sort(dim=1, stable=True)  # [bs, W]: siblings side by side, in column order
    columns = torch.arange(width, device=order.device).expand_as(order)
    first = torch.searchsorted(parents, columns.contiguous()).clamp_(max=width - 1)
    next_token = torch.where(parents.gather(1, first) == columns, order.gather(1, first), -1)
    is_sibling = (parents[:, 1:] == parents[:, :-1]) & (parents[:, 1:] >= 0)
    following = torch.where(is_sibling, order[:, 1:], -1)
    following = torch.nn.functional.pad(following, (0, 1), value=-1)
    return RetrieveLinks(next_token, torch.empty_like(order).scatter_(1, order, following))
