"""Plain numpy versions of everything in this folder, one request at a time, for tests and readers."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ReferenceNode:
    """A node below the root: `ranks` are the candidate ranks along its path, `parent` its parent's column."""

    ranks: tuple[int, ...]
    parent: int
    log_prob: float

    @property
    def depth(self) -> int:
        return len(self.ranks)


def build_draft_tree(log_probs: Floats, node_budget: int) -> list[ReferenceNode]:
    """The best-first heap of the paper (arXiv 2604.12989, Algorithm 1), sums in float64.

    `log_probs` [draft_depth, K] descend along each row. The node at index j of the result is column
    j + 1 of the tree. NaN counts as -inf, and a prefix of -inf is never a node.
    """
    steps = np.minimum(np.where(np.isnan(log_probs), -np.inf, log_probs), 0.0).astype(np.float64)
    draft_depth, topk = steps.shape
    nodes: list[ReferenceNode] = []
    # (-score, ranks, parent's column, parent's score); the ranks break ties
    heap: list[tuple[float, tuple[int, ...], int, float]] = [(-steps[0, 0], (0,), 0, 0.0)]
    while heap and len(nodes) < node_budget:
        negative_score, ranks, parent, parent_score = heapq.heappop(heap)
        if negative_score == np.inf:
            break
        nodes.append(ReferenceNode(ranks, parent, -negative_score))
        depth, rank = len(ranks), ranks[-1]
        if rank + 1 < topk:
            sibling_score = parent_score + steps[depth - 1, rank + 1]
            heapq.heappush(heap, (-sibling_score, (*ranks[:-1], rank + 1), parent, parent_score))
        if depth < draft_depth:
            child_score = -negative_score + steps[depth, 0]
            heapq.heappush(heap, (-child_score, (*ranks, 0), len(nodes), -negative_score))
    return nodes


def build_level_tree(log_probs: Floats, node_budget: int) -> list[ReferenceNode]:
    """The same tree level by level in float32, with the exact tie rules of `build_torch`, unpruned.

    `log_probs` is as for `build_draft_tree`. A level is ordered (score descending, parent's index
    ascending, rank ascending), the union (score descending, depth ascending, index ascending).
    """
    steps = np.minimum(np.where(np.isnan(log_probs), -np.inf, log_probs), 0.0).astype(np.float32)
    level: list[tuple[tuple[int, ...], np.float32]] = [((), np.float32(0.0))]
    union: list[tuple[float, int, int, tuple[int, ...]]] = []
    for depth, step in enumerate(steps, start=1):
        scores = np.array([score for _, score in level])[:, None] + step[None, :]  # [parents, K] float32
        parents, ranks = np.divmod(np.arange(scores.size), step.size)
        order = np.lexsort((ranks, parents, -scores.ravel()))[:node_budget]
        order = order[scores.ravel()[order] > -np.inf]
        level = [((*level[parents[c]][0], int(ranks[c])), scores.ravel()[c]) for c in order]
        union += [(-float(score), depth, index, path) for index, (path, score) in enumerate(level)]
    chosen = sorted(union)[:node_budget]
    columns = {(): 0} | {path: column for column, (_, _, _, path) in enumerate(chosen, start=1)}
    return [ReferenceNode(path, columns[path[:-1]], -score) for score, _, _, path in chosen]


def reference_links(parents: Ints) -> tuple[Ints, Ints]:
    """First child and next sibling of each column of `parents` [W], -1 for none."""
    next_token, next_sibling = np.full_like(parents, -1), np.full_like(parents, -1)
    for column in range(len(parents) - 1, 0, -1):
        parent = parents[column]
        if parent >= 0:
            next_sibling[column], next_token[parent] = next_token[parent], column
    return next_token, next_sibling


def reference_ancestor_mask(parents: Ints) -> Bools:
    """[W, W]: row i is true at i and at its ancestors, for `parents` [W]."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for column, parent in enumerate(parents):
        if parent >= 0:
            mask[column] |= mask[parent]
    return mask


def reference_walk(tokens: Ints, parents: Ints, target_tokens: Ints) -> tuple[list[int], list[int]]:
    """Columns of the accept path, the root first, and the tokens committed, the bonus token last.

    All three are [W]; the step from a column goes to its child that carries the target's choice.
    """
    children = {(int(p), int(t)): c for c, (p, t) in enumerate(zip(parents, tokens, strict=True)) if p >= 0}
    path, accept_tokens = [0], [int(target_tokens[0])]
    while (path[-1], accept_tokens[-1]) in children:
        path.append(children[path[-1], accept_tokens[-1]])
        accept_tokens.append(int(target_tokens[path[-1]]))
    return path, accept_tokens
