"""Draft trees as pure tensors: marginals -> tree -> layout -> accept walk.

Names are loaded at first use: costs, budgets and the recommendation need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = {
    "build_torch": ("build_chain", "build_draft_trees"),
    "build_triton": ("build_trees_with_layout",),
    "draft_tree": ("DraftTree",),
    "layout": ("RetrieveLinks", "TreeLayout", "ancestor_mask", "retrieve_links", "tree_layout"),
    "marginals": ("DraftMarginals",),
    "noise": ("draw", "keyed_gumbel"),
    "verify": ("VerifyResult", "compaction_indices", "follow", "verify_greedy", "verify_sampled"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
