"""The draft tree of a batch of requests, as four tensors of one static width."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ddtree.config import check, is_int


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Trees of one node budget B, W = B + 1 columns: node 0 is the root, parents come first.

    Nodes stand in best-first order, so the first B' + 1 columns are the tree of the smaller budget
    B'. Columns without a node are padding: token 0, parent -1, depth 0 and log-probability -inf.
    Only the last of these tells padding from a node, since token id 0 is a token.
    """

    tokens: Tensor  # [bs, W] int64
    parents: Tensor  # [bs, W] int64, column of the parent; -1 for the root and for padding
    depths: Tensor  # [bs, W] int64, 0 for the root and for padding
    log_probs: Tensor  # [bs, W] float32, summed along the path; 0 for the root

    @property
    def node_budget(self) -> int:
        """Most nodes a tree can have, the root not counted (B)."""
        return self.num_verify_tokens - 1

    @property
    def num_verify_tokens(self) -> int:
        """Width of the verify pass, the root counted (W)."""
        return self.tokens.shape[1]

    @property
    def is_node(self) -> Tensor:
        """Which columns hold the root or a node, [bs, W] bool."""
        return self.log_probs > float("-inf")

    @property
    def num_nodes(self) -> Tensor:
        """Nodes of each tree, neither root nor padding counted, [bs] int64."""
        return self.is_node.sum(1) - 1

    def prefix(self, node_budget: int) -> DraftTree:
        """The trees of a smaller budget, as views of these tensors (`ConfigError` if it is larger)."""
        allowed = f"a whole number from 1 to {self.node_budget}, this tree's own budget"
        is_allowed = is_int(node_budget) and 1 <= node_budget <= self.node_budget
        check(is_allowed, "node_budget", node_budget, allowed, "build a larger tree")
        width = node_budget + 1
        return DraftTree(
            self.tokens[:, :width], self.parents[:, :width], self.depths[:, :width], self.log_probs[:, :width]
        )
