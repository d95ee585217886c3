"""Does the fast tree builder find the paper's tree? Random cases against the best-first heap.

Each case draws a depth (1 to 31), a budget (1 to 1024), a K and log-probabilities of one kind: continuous,
heavily quantised, many exact zeros, with -inf, or the top K of bf16 logits. It checks that the sorted
float64 re-scores equal those of the heap within 1e-4 (node sets may differ in ties), that the order
rules hold exactly (small cases, against a plain sort), and that the tree is prefix-closed, has its
parents first and holds every smaller budget as a prefix. Writes counts and the worst difference.

    PYTHONPATH=src python benchmarks/check_tree_oracle.py --output results/tree_oracle.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from ddtree.provenance import provenance
from ddtree.tree import DraftMarginals, DraftTree, build_draft_trees
from ddtree.tree.build_reference import build_draft_tree, build_level_tree

KINDS = ("continuous", "ties", "zeros", "neg_inf", "bf16_logits")
TOLERANCE = 1e-4
MAX_EXACT_BUDGET = 64
ROOT = torch.zeros(1, dtype=torch.int64)


def random_marginals(rng: np.random.Generator, kind: str, draft_depth: int, topk: int) -> DraftMarginals:
    """Marginals [1, draft_depth, topk] of the kind named."""
    spread = rng.choice([0.1, 1.0, 5.0], size=(draft_depth, 1))
    if kind == "bf16_logits":
        logits = torch.from_numpy(rng.standard_normal((1, draft_depth, 2 * topk + 8)) * spread).bfloat16()
        return DraftMarginals.from_logits(logits, topk)
    rows = -np.abs(rng.standard_normal((draft_depth, topk))) * spread
    if kind == "ties":
        rows = np.round(rows * 2) / 2
    elif kind == "zeros":
        rows = np.where(rng.random(rows.shape) < 0.5, 0.0, np.round(rows))
    elif kind == "neg_inf":
        rows[rng.random(rows.shape) < 0.4] = -np.inf
    log_probs = torch.from_numpy(-np.sort(-rows, axis=1).astype(np.float32))[None]
    return DraftMarginals(torch.arange(topk).expand(1, draft_depth, -1).contiguous(), log_probs)


def rank_paths(tree: DraftTree, marginals: DraftMarginals) -> list[tuple[int, ...]] | None:
    """The rank path of each node in column order, or None if a parent does not stand before its child."""
    rank_of = [{token: rank for rank, token in enumerate(row)} for row in marginals.tokens[0].tolist()]
    paths: list[tuple[int, ...]] = [()]
    num_nodes = int(tree.num_nodes[0])
    columns = (values[0, 1 : num_nodes + 1].tolist() for values in (tree.tokens, tree.parents, tree.depths))
    for token, parent, depth in zip(*columns, strict=True):
        if not 0 <= parent < len(paths) or len(paths[parent]) != depth - 1:
            return None
        paths.append((*paths[parent], rank_of[depth - 1][token]))
    return paths[1:]


def is_prefix_closed(paths: list[tuple[int, ...]]) -> bool:
    """Whether each node's parent and better sibling are nodes too, and none stands twice."""
    nodes = {(), *paths}
    return len(nodes) == len(paths) + 1 and all(
        path[:-1] in nodes and (path[-1] == 0 or (*path[:-1], path[-1] - 1) in nodes) for path in paths
    )


def is_nested(tree: DraftTree, marginals: DraftMarginals, budgets: set[int]) -> bool:
    names = ("tokens", "parents", "depths", "log_probs")
    pairs = [(tree.prefix(budget), build_draft_trees(marginals, ROOT, budget)) for budget in budgets]
    return all(torch.equal(getattr(a, name), getattr(b, name)) for a, b in pairs for name in names)


def score_difference(paths: list[tuple[int, ...]], log_probs: np.ndarray, node_budget: int) -> float:
    """Largest difference of sorted float64 scores from the heap's; inf if they differ in number."""
    rows = log_probs.astype(np.float64)
    scores = sorted(float(rows[np.arange(len(path)), path].sum()) for path in paths)
    heap_scores = sorted(node.log_prob for node in build_draft_tree(log_probs, node_budget))
    if len(scores) != len(heap_scores):
        return float("inf")
    return float(np.abs(np.subtract(scores, heap_scores)).max(initial=0))


def check_case(rng: np.random.Generator, kind: str, counts: Counter[str]) -> float:
    """Check one case, count what holds, and return the largest difference of sorted re-scores."""
    draft_depth = int(rng.integers(1, 32))
    node_budget = int(np.exp(rng.uniform(0, np.log(1025))))
    topk = node_budget if rng.random() < 0.5 else int(rng.integers(1, node_budget + 1))
    marginals = random_marginals(rng, kind, draft_depth, topk)
    log_probs = marginals.log_probs[0].numpy()
    counts["cases"] += 1
    counts[f"cases_{kind}"] += 1
    counts["cases_budget_above_512"] += node_budget > 512
    counts["cases_depth_above_15"] += draft_depth > 15

    tree = build_draft_trees(marginals, ROOT, node_budget)
    paths = rank_paths(tree, marginals)
    if paths is None:
        return float("inf")
    counts["parents_first"] += 1
    difference = score_difference(paths, log_probs, node_budget)
    counts["same_scores"] += difference <= TOLERANCE
    counts["prefix_closed"] += is_prefix_closed(paths)
    smaller_budgets = {int(rng.integers(1, node_budget + 1)), max(1, node_budget - 1)}
    counts["nested"] += is_nested(tree, marginals, smaller_budgets)
    if node_budget <= MAX_EXACT_BUDGET:
        counts["cases_exact_order"] += 1
        counts["exact_order"] += paths == [node.ranks for node in build_level_tree(log_probs, node_budget)]
    return difference


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng, counts, start_s = np.random.default_rng(arguments.seed), Counter[str](), time.perf_counter()
    worst = max(check_case(rng, KINDS[i % len(KINDS)], counts) for i in range(arguments.cases))
    properties = ("same_scores", "parents_first", "prefix_closed", "nested")
    passed = all(counts[name] == counts["cases"] for name in properties)
    passed &= counts["exact_order"] == counts["cases_exact_order"]
    result = {
        "passed": passed,
        "seed": arguments.seed,
        "counts": dict(sorted(counts.items())),
        "tolerance": TOLERANCE,
        "worst_score_difference": worst,
        "wall_s": round(time.perf_counter() - start_s, 1),
        "provenance": provenance(),
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
