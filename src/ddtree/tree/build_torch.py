"""The exact level-wise tree builder: batched, static shapes, no host sync.

The paper's heap (arXiv 2604.12989, Algorithm 1) pops the B most probable prefixes. Since a prefix
never outscores its parent nor its better sibling, the same prefixes are found level by level: a
level's B best come from the B best of the level above, and the tree is the best B of all levels.
With parents and candidates sorted, the r-th token under the i-th parent (both from 0) has at
least (i + 1)(r + 1) - 1 better ones in its level, so only candidates with (i + 1)(r + 1) <= B count.

Ties: a level is ordered (score descending, parent's index ascending, rank ascending), the union
(score descending, depth ascending, index in its level ascending). Candidates are enumerated in
the order of the tie rule, so a stable sort by score alone applies it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from ddtree.config import check, is_int
from ddtree.tree.draft_tree import DraftTree
from ddtree.tree.marginals import NEG_INF, DraftMarginals


@dataclass(frozen=True, slots=True)
class _Plan:
    """What depends on shapes alone. A candidate is a place in the levels' tables, laid end to end."""

    level_parents: tuple[Tensor, ...]  # of level d: [num_candidates[d]] parent's index in its level
    level_widths: tuple[int, ...]  # nodes each level keeps
    num_candidates: tuple[int, ...]
    entries: Tensor  # [all candidates] depth index * K + rank: a place in the flat marginals
    parents: Tensor  # [all candidates] parent's place among all levels' nodes, the root's being 0
    depths: Tensor  # [all candidates] from 1
    starts: Tensor  # [all nodes but the root] first candidate of the node's level


def candidate_pairs(num_parents: int, node_budget: int, candidate_topk: int) -> tuple[Tensor, Tensor]:
    """Parent index and rank, each [num_candidates] int64, of what can enter a level; in the tie rule's order.

    `num_parents` is at most `node_budget`.
    """
    parents = torch.arange(num_parents)
    num_ranks = (node_budget // (parents + 1)).clamp(max=candidate_topk)  # [num_parents]
    first = (num_ranks.cumsum(0) - num_ranks).repeat_interleave(num_ranks)  # [num_candidates]
    return parents.repeat_interleave(num_ranks), torch.arange(first.shape[0]) - first


def _make_plan(draft_depth: int, node_budget: int, candidate_topk: int, device: torch.device) -> _Plan:
    level_parents: list[Tensor] = []
    entries, parents, depths, starts = [], [], [], []
    first_node, first_candidate, width = 0, 0, 1  # of the level above, of this level, of the level above
    for level in range(draft_depth):
        level_parent, rank = candidate_pairs(width, node_budget, candidate_topk)
        level_parents.append(level_parent.to(device))
        entries.append(rank + level * candidate_topk)
        parents.append(level_parent + first_node)
        depths.append(torch.full_like(rank, level + 1))
        first_node, width = first_node + width, min(node_budget, len(rank))
        starts.append(torch.full((width,), first_candidate))
        first_candidate += len(rank)
    return _Plan(
        level_parents=tuple(level_parents),
        level_widths=tuple(map(len, starts)),
        num_candidates=tuple(map(len, level_parents)),
        entries=torch.cat(entries).to(device),
        parents=torch.cat(parents).to(device),
        depths=torch.cat(depths).to(device),
        starts=torch.cat(starts).to(device),
    )


# Captured CUDA graphs hold the addresses of these tables, so on CUDA none may ever be dropped.
_kept_plan = cache(_make_plan)
_recent_plan = lru_cache(maxsize=64)(_make_plan)


def _sort(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` best of `scores` [bs, n] and their places; of equal ones the first comes first."""
    values, places = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :width], places[:, :width]


def check_inputs(marginals: DraftMarginals, root_tokens: Tensor, node_budget: int) -> None:
    """Raise `ConfigError` for a budget below 1 or shapes that do not fit each other."""
    check(is_int(node_budget) and node_budget >= 1, "node_budget", node_budget, "a whole number from 1")
    shape = tuple(marginals.log_probs.shape)
    check(
        len(shape) == 3 and min(shape[1:]) >= 1 and marginals.tokens.shape == marginals.log_probs.shape,
        "marginals", shape, "tokens and log_probs of one shape [bs, draft_depth, K], depth and K from 1",
    )  # fmt: skip
    root_shape = tuple(root_tokens.shape)
    check(root_shape == shape[:1], "root_tokens", root_shape, f"shape [bs] = {shape[:1]}")


def build_draft_trees(marginals: DraftMarginals, root_tokens: Tensor, node_budget: int) -> DraftTree:
    """The trees of the `node_budget` most probable prefixes (arXiv 2604.12989, section 3).

    `marginals` [bs, draft_depth, K] are ordered as `DraftMarginals` says, `root_tokens` is [bs].
    Scores are float32 sums from the root down; a NaN log-probability counts as -inf, and a prefix of
    -inf is never a node. To capture it in a CUDA graph, call it once before with the same shapes.
    Raises `ConfigError` for a budget below 1 or shapes that do not fit.
    """
    check_inputs(marginals, root_tokens, node_budget)
    bs, draft_depth, topk = marginals.log_probs.shape
    plan_of = _kept_plan if marginals.log_probs.is_cuda else _recent_plan
    plan = plan_of(draft_depth, node_budget, topk, marginals.log_probs.device)
    log_probs = marginals.log_probs.flatten(1)  # [bs, L * K]
    log_probs = torch.where(log_probs.isnan(), NEG_INF, log_probs.clamp(max=0.0))
    steps = log_probs.index_select(1, plan.entries).split_with_sizes(plan.num_candidates, dim=1)

    scores = log_probs.new_zeros(bs, 1)  # [bs, nodes of the level]
    level_scores, level_places = [], []
    for step, parents, width in zip(steps, plan.level_parents, plan.level_widths, strict=True):
        scores, places = _sort(scores.index_select(1, parents).add_(step), width)
        level_scores.append(scores)
        level_places.append(places)

    scores, nodes = _sort(torch.cat(level_scores, dim=1), node_budget)  # [bs, B], or less when there are less
    candidates = (torch.cat(level_places, dim=1) + plan.starts).gather(1, nodes)  # [bs, B]
    return _assemble(plan, marginals.tokens, root_tokens, scores, nodes, candidates, node_budget)


def _assemble(
    plan: _Plan,
    tokens: Tensor,  # [bs, L, K]
    root_tokens: Tensor,  # [bs]
    scores: Tensor,  # [bs, n], n <= B
    nodes: Tensor,  # [bs, n] place among all levels' nodes, the root not counted
    candidates: Tensor,  # [bs, n]
    node_budget: int,
) -> DraftTree:
    """The chosen nodes as a tree: parents as columns, the rest padding, the root in front."""
    bs, num_nodes = nodes.shape
    columns = torch.arange(1, num_nodes + 1, device=nodes.device)
    column_of = nodes.new_zeros(bs, plan.starts.shape[0] + 1)  # the root's place 0 stays column 0
    column_of.scatter_(1, nodes + 1, columns.expand(bs, -1))
    is_node = scores > NEG_INF
    tree_tokens = tokens.flatten(1).gather(1, plan.entries[candidates])
    tree_parents = column_of.gather(1, plan.parents[candidates])

    def columns_from(root: Tensor, values: Tensor, padding: float) -> Tensor:
        values = torch.cat((root.unsqueeze(1), torch.where(is_node, values, padding)), dim=1)
        return torch.nn.functional.pad(values, (0, node_budget - num_nodes), value=padding)

    zeros = nodes.new_zeros(bs)
    return DraftTree(
        tokens=columns_from(root_tokens.to(torch.int64), tree_tokens, 0),
        parents=columns_from(zeros - 1, tree_parents, -1),
        depths=columns_from(zeros, plan.depths[candidates], 0),
        log_probs=columns_from(scores.new_zeros(bs), scores, NEG_INF),
    )


def build_chain(marginals: DraftMarginals, root_tokens: Tensor) -> DraftTree:
    """The tree of plain DFlash: the most likely token of each position, W = draft_depth + 1.

    `marginals` is [bs, draft_depth, K], `root_tokens` [bs]. It ends where the summed log-probability
    reaches -inf; the rest is padding. Sums are taken in float64 and rounded once.
    """
    check_inputs(marginals, root_tokens, node_budget=1)
    log_probs = marginals.log_probs[:, :, 0].double()  # [bs, L]
    log_probs = torch.where(log_probs.isnan(), NEG_INF, log_probs.clamp(max=0.0))
    scores = torch.nn.functional.pad(log_probs.cumsum(1).float(), (1, 0))  # [bs, W]
    tokens = torch.cat((root_tokens.to(torch.int64).unsqueeze(1), marginals.tokens[:, :, 0]), dim=1)
    is_node = scores > NEG_INF
    depths = torch.arange(scores.shape[1], device=scores.device).expand_as(tokens)
    return DraftTree(
        tokens=torch.where(is_node, tokens, 0),
        parents=torch.where(is_node, depths - 1, -1),
        depths=torch.where(is_node, depths, 0),
        log_probs=scores,
    )
