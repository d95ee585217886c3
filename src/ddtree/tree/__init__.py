"""Draft trees as pure tensors: marginals -> tree -> layout -> accept walk."""

from ddtree.tree.build_torch import build_chain, build_draft_trees
from ddtree.tree.build_triton import build_trees_with_layout
from ddtree.tree.draft_tree import DraftTree
from ddtree.tree.layout import RetrieveLinks, TreeLayout, ancestor_mask, retrieve_links, tree_layout
from ddtree.tree.marginals import DraftMarginals
from ddtree.tree.noise import draw, keyed_gumbel
from ddtree.tree.verify import (
    VerifyResult,
    compaction_indices,
    follow,
    verify_greedy,
    verify_sampled,
)

__all__ = [
    "DraftMarginals",
    "DraftTree",
    "RetrieveLinks",
    "TreeLayout",
    "VerifyResult",
    "ancestor_mask",
    "build_chain",
    "build_draft_trees",
    "build_trees_with_layout",
    "compaction_indices",
    "draw",
    "follow",
    "keyed_gumbel",
    "retrieve_links",
    "tree_layout",
    "verify_greedy",
    "verify_sampled",
]
