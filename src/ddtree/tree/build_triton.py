"""Tree building on a GPU in one Triton launch, and the choice between it and the torch builder."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.config import check
from ddtree.tree.build_torch import build_draft_trees, check_inputs
from ddtree.tree.draft_tree import DraftTree
from ddtree.tree.layout import RetrieveLinks, TreeLayout, retrieve_links, tree_layout
from ddtree.tree.marginals import DraftMarginals
from ddtree.tree.triton_choice import power_of_two, prefers_triton, require_triton

MAX_TRITON_DEPTH = 31
MAX_TRITON_WIDTH = 256  # of a kernel that has columns and ranks to 510: beyond, one warp has too much to hold
MASK_BLOCK = 1024


def triton_refusal(draft_depth: int, candidate_topk: int, node_budget: int) -> str | None:
    """Why the Triton builder cannot build such trees, or None if it can."""
    if draft_depth > MAX_TRITON_DEPTH:
        return f"draft_depth={draft_depth} is above {MAX_TRITON_DEPTH}"
    if max(candidate_topk, node_budget) > MAX_TRITON_WIDTH:
        return f"candidate_topk={candidate_topk} or node_budget={node_budget} is above {MAX_TRITON_WIDTH}"
    return None


def build_trees_with_layout(
    marginals: DraftMarginals, root_tokens: Tensor, prefix_lens: Tensor, node_budget: int
) -> tuple[DraftTree, TreeLayout, RetrieveLinks]:
    """Trees with layout and links: one Triton launch on CUDA within its limits, else the torch functions."""
    if _fits_triton(marginals, node_budget):
        return build_draft_trees_with_layout(marginals, root_tokens, prefix_lens, node_budget)
    tree = build_draft_trees(marginals, root_tokens, node_budget)
    return tree, tree_layout(tree, prefix_lens), retrieve_links(tree)


def build_draft_trees_triton(marginals: DraftMarginals, root_tokens: Tensor, node_budget: int) -> DraftTree:
    """What `build_draft_trees` builds, bit for bit, in one launch.

    Raises `ConfigError` beyond a depth of 31 or a budget or K of 256, `MissingExtraError` without Triton.
    """
    return build_draft_trees_with_layout(marginals, root_tokens, root_tokens, node_budget)[0]


def build_draft_trees_with_layout(
    marginals: DraftMarginals, root_tokens: Tensor, prefix_lens: Tensor, node_budget: int
) -> tuple[DraftTree, TreeLayout, RetrieveLinks]:
    """Tree, layout and links of each request in one launch, one program a request.

    `marginals` is [bs, draft_depth, K], `root_tokens` and `prefix_lens` are [bs]. Results and errors as
    of `build_draft_trees`, `tree_layout` and `retrieve_links`, and those of `build_draft_trees_triton`.
    """
    check_inputs(marginals, root_tokens, node_budget)
    bs, draft_depth, topk = marginals.log_probs.shape
    refusal = triton_refusal(draft_depth, topk, node_budget)
    check(refusal is None, "node_budget", node_budget, f"{refusal}", "use build_draft_trees")
    require_triton()
    from ddtree.tree.triton_kernels import build_tree_kernel

    device, width = marginals.log_probs.device, node_budget + 1
    trees, layouts = torch.empty(2, 3, bs, width, dtype=torch.int64, device=device)
    tree_log_probs = torch.empty(bs, width, dtype=torch.float32, device=device)
    mask = torch.empty(bs, width, width, dtype=torch.uint8, device=device)
    with torch.cuda.device_of(marginals.log_probs):
        build_tree_kernel[(bs,)](
            marginals.tokens.contiguous(), marginals.log_probs.contiguous(),
            root_tokens.contiguous(), prefix_lens.contiguous(),
            trees, tree_log_probs, layouts, mask,
            L=draft_depth, K=topk, B=node_budget,
            STEPS_PAD=power_of_two(draft_depth * topk), W_PAD=power_of_two(width, at_least=32),
            MASK_BLOCK=MASK_BLOCK, num_warps=1,
        )  # fmt: skip
    tree = DraftTree(trees[0], trees[1], trees[2], tree_log_probs)
    return tree, TreeLayout(layouts[0], mask.view(torch.bool)), RetrieveLinks(layouts[1], layouts[2])


def _fits_triton(marginals: DraftMarginals, node_budget: int) -> bool:
    _, draft_depth, topk = marginals.log_probs.shape
    is_within_limits = triton_refusal(draft_depth, topk, node_budget) is None
    return is_within_limits and prefers_triton(marginals.log_probs)
