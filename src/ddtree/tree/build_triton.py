"""Tree building on a GPU in one Triton launch, and the choice between it and the torch builder."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ddtree.config import check
from ddtree.errors import MissingExtraError
from ddtree.tree.build_torch import build_draft_trees, candidate_pairs, check_inputs
from ddtree.tree.draft_tree import DraftTree
from ddtree.tree.layout import RetrieveLinks, TreeLayout, retrieve_links, tree_layout
from ddtree.tree.marginals import DraftMarginals

MAX_TRITON_DEPTH = 31
MAX_TRITON_WIDTH = 127
NUM_WARPS = 8


def triton_refusal(draft_depth: int, candidate_topk: int, node_budget: int) -> str | None:
    """Why the Triton builder cannot build such trees, or None if it can."""
    if draft_depth > MAX_TRITON_DEPTH:
        return f"draft_depth={draft_depth} is above {MAX_TRITON_DEPTH}"
    if max(candidate_topk, node_budget) > MAX_TRITON_WIDTH:
        return f"candidate_topk={candidate_topk} or node_budget={node_budget} is above {MAX_TRITON_WIDTH}"
    return None


def build_trees(marginals: DraftMarginals, root_tokens: Tensor, node_budget: int) -> DraftTree:
    """`build_draft_trees` by the faster builder: Triton on CUDA within its limits, else torch."""
    if _prefers_triton(marginals, node_budget):
        return build_draft_trees_triton(marginals, root_tokens, node_budget)
    return build_draft_trees(marginals, root_tokens, node_budget)


def build_trees_with_layout(
    marginals: DraftMarginals, root_tokens: Tensor, prefix_lens: Tensor, node_budget: int
) -> tuple[DraftTree, TreeLayout, RetrieveLinks]:
    """`build_trees`, `tree_layout` and `retrieve_links` by the faster builder, in one launch on CUDA."""
    if _prefers_triton(marginals, node_budget):
        return build_draft_trees_with_layout(marginals, root_tokens, prefix_lens, node_budget)
    tree = build_draft_trees(marginals, root_tokens, node_budget)
    return tree, tree_layout(tree, prefix_lens), retrieve_links(tree)


def build_draft_trees_triton(marginals: DraftMarginals, root_tokens: Tensor, node_budget: int) -> DraftTree:
    """What `build_draft_trees` builds, bit for bit, in one launch.

    Raises `ConfigError` beyond a depth of 31 or a budget or K of 127, `MissingExtraError` without Triton.
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
    device, width, num_nodes = marginals.log_probs.device, node_budget + 1, (draft_depth + 1) * node_budget
    pairs = _packed_pairs(node_budget, topk, device)
    pairs_pad = _power_of_two(pairs.shape[0], at_least=8)
    trees, layouts = torch.empty(2, 3, bs, width, dtype=torch.int64, device=device)
    tree_log_probs = torch.empty(bs, width, dtype=torch.float32, device=device)
    mask = torch.empty(bs, width, width, dtype=torch.uint8, device=device)
    with torch.cuda.device_of(marginals.log_probs):  # type: ignore[no-untyped-call]
        _kernel()[(bs,)](
            marginals.tokens.contiguous(), marginals.log_probs.contiguous(),
            root_tokens.contiguous(), prefix_lens.contiguous(), pairs,
            torch.empty(bs, pairs_pad, dtype=torch.int64, device=device),
            torch.empty(bs, num_nodes, dtype=torch.float32, device=device),
            torch.empty(bs, 2, num_nodes, dtype=torch.int32, device=device),
            trees, tree_log_probs, layouts, mask,
            L=draft_depth, K=topk, B=node_budget, B_BITS=node_budget.bit_length(),
            NUM_PAIRS=pairs.shape[0], PAIRS_PAD=pairs_pad,
            NODES_PAD=_power_of_two(draft_depth * node_budget), W_PAD=_power_of_two(width),
            BLOCK=1024, num_warps=NUM_WARPS,
        )  # fmt: skip
    tree = DraftTree(trees[0], trees[1], trees[2], tree_log_probs)
    return tree, TreeLayout(layouts[0], mask.view(torch.bool)), RetrieveLinks(layouts[1], layouts[2])


def _prefers_triton(marginals: DraftMarginals, node_budget: int) -> bool:
    _, draft_depth, topk = marginals.log_probs.shape
    fits = triton_refusal(draft_depth, topk, node_budget) is None
    return marginals.log_probs.is_cuda and fits and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _kernel() -> Any:
    if not _has_triton():
        raise MissingExtraError("triton", "engine")
    from ddtree.tree.triton_kernels import build_tree_kernel

    return build_tree_kernel


# Never evicted: captured CUDA graphs hold the addresses of these tables.
@cache
def _packed_pairs(node_budget: int, candidate_topk: int, device: torch.device) -> Tensor:
    """The candidates of a level, parent index << 8 | rank, [num_pairs] int32."""
    parents, ranks = candidate_pairs(node_budget, node_budget, candidate_topk)
    return (parents << 8 | ranks).to(device=device, dtype=torch.int32)


def _power_of_two(count: int, at_least: int = 1) -> int:
    return max(at_least, 1 << (count - 1).bit_length())
