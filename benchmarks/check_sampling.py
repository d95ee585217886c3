"""Are sampled tokens distributed as the target says? A G-test of many draws for each sampling option.

A tiny random target is verified once over a draft tree. Then the accept walk runs with many seeds
on those logits, and the counts of the first committed token, and of the second one after each child
of the root, are compared with the target's exact distribution, worked out separately in float64
numpy. A planted biased walk (accept the likeliest child with the drafter's odds, whatever was drawn)
must fail the same test. Exits 1 if a fair option fails or the biased walk passes.

    python benchmarks/check_sampling.py --draws 200000 --output results/sampling_gtest.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import chi2
from torch import Tensor

from common import write_results
from ddtree.config import SamplingParams
from ddtree.engine.sampling import TokenChooser, count_paths
from ddtree.tree import DraftMarginals, DraftTree, build_draft_trees, tree_layout, verify_sampled

VOCAB, DEPTH, BUDGET, PREFIX_LEN = 24, 3, 12, 9
PROMPT, OUTPUT = (1, 2, 3, 3, 5), (2, 7, 7, 9)
SIGNIFICANCE = 1e-4
BATCH = 20_000
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1": {"temperature": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 6},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "repetition_penalty": {"temperature": 1.0, "repetition_penalty": 1.5},
    "presence_penalty": {"temperature": 1.0, "presence_penalty": 1.2},
    "frequency_penalty": {"temperature": 1.0, "frequency_penalty": 0.8},
    "logit_bias": {"temperature": 1.0, "logit_bias": {4: 2.0, 11: -3.0}},
    "all together": {
        "temperature": 0.8, "top_k": 15, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {4: 1.0},
    },
}  # fmt: skip


def exact_distribution(logits: np.ndarray, path: list[int], params: SamplingParams) -> np.ndarray:
    """Probabilities [vocab] after `path`, straight from the definition, in float64."""
    x = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias.items():
        x[token] += bias
    output = [*OUTPUT, *path]
    for token in {*PROMPT, *output}:
        x[token] = (
            x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        )
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    x /= params.temperature
    order = sorted(range(VOCAB), key=lambda token: -x[token])
    if params.top_k:
        x[order[params.top_k :]] = -np.inf
    probs = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    kept = [token for i, token in enumerate(order) if probs[order[:i]].sum() < params.top_p]
    probs = np.where(np.isin(np.arange(VOCAB), kept), probs, 0.0)
    probs = np.where(probs < params.min_p * probs.max(), 0.0, probs)
    return probs / probs.sum()


def g_test(counts: np.ndarray, probs: np.ndarray) -> float:
    """p-value of counts [vocab] against probabilities [vocab]; 0 where something impossible was drawn."""
    if counts[probs == 0].sum() > 0:
        return 0.0
    expected = probs * counts.sum()
    rare = expected < 5  # pooled into one cell, as the test asks for
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    used = observed > 0
    g = 2 * (observed[used] * np.log(observed[used] / expected[used])).sum()
    return float(chi2.sf(g, max(1, (expected > 0).sum() - 1)))


def make_tree(generator: torch.Generator) -> tuple[DraftTree, Tensor]:
    """One draft tree and target logits [W, vocab] at its nodes."""
    marginals = DraftMarginals.from_logits(torch.randn(1, DEPTH, VOCAB, generator=generator), BUDGET)
    tree = build_draft_trees(marginals, torch.tensor([OUTPUT[-1]]), BUDGET)
    return tree, 1.5 * torch.randn(BUDGET + 1, VOCAB, generator=generator)


def draw_tokens(tree: DraftTree, logits: Tensor, params: SamplingParams, num_draws: int) -> Tensor:
    """First two committed tokens [draws, 2] of the accept step for seeds 0, 1, 2, ...; -1 is none."""
    chooser = TokenChooser(params, PROMPT, VOCAB, logits.device)
    chooser.count(torch.tensor(OUTPUT))
    layout = tree_layout(tree, torch.tensor([PREFIX_LEN]))
    path_counts = count_paths(tree.tokens[0], layout.ancestor_mask[0], VOCAB)
    log_probs = chooser.node_log_probs(logits, path_counts)
    parts = []
    for first in range(0, num_draws, BATCH):
        bs = min(BATCH, num_draws - first)
        result = verify_sampled(
            DraftTree(
                *(field.expand(bs, -1) for field in (tree.tokens, tree.parents, tree.depths, tree.log_probs))
            ),
            layout.ancestor_mask.expand(bs, -1, -1),
            log_probs.expand(bs, -1, -1),
            torch.arange(first, first + bs),
            layout.positions.expand(bs, -1),
            DEPTH,
        )
        parts.append(result.accept_tokens[:, :2])
    return torch.cat(parts)


def biased_tokens(tree: DraftTree, tokens: Tensor) -> Tensor:
    """The planted fault: one draw in twenty takes the root's best child, whatever the target drew."""
    biased = tokens.clone()
    biased[::20, 0] = tree.tokens[0, 1]
    return biased


def p_values(tree: DraftTree, logits: Tensor, params: SamplingParams, tokens: Tensor) -> dict[str, float]:
    """p-values of the first token, and of the second after each child of the root that was drawn often."""
    draws = tokens.numpy()
    rows = {
        "first token": g_test(
            np.bincount(draws[:, 0], minlength=VOCAB), exact_distribution(logits[0].numpy(), [], params)
        )
    }
    for column in range(1, BUDGET + 1):
        child = int(tree.tokens[0, column])
        seconds = draws[(draws[:, 0] == child) & (draws[:, 1] >= 0), 1]
        if int(tree.parents[0, column]) == 0 and len(seconds) > 200:
            counts = np.bincount(seconds, minlength=VOCAB)
            rows[f"second token after {child}"] = g_test(
                counts, exact_distribution(logits[column].numpy(), [child], params)
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    tree, logits = make_tree(torch.Generator().manual_seed(args.seed))
    table, failed = {}, False
    for name, fields in OPTIONS.items():
        params = SamplingParams(**fields)
        tokens = draw_tokens(tree, logits, params, args.draws)
        fair = p_values(tree, logits, params, tokens)
        biased = p_values(tree, logits, params, biased_tokens(tree, tokens))
        limit = SIGNIFICANCE / len(fair)
        is_right = min(fair.values()) > limit > min(biased.values())
        failed |= not is_right
        smallest = f"smallest p {min(fair.values()):.4f} of {len(fair)}"
        print(f"{name:20} {smallest}, biased walk {min(biased.values()):.1e}")
        table[name] = {"p_values": fair, "biased_walk_smallest_p": min(biased.values()), "limit": limit}
    write_results(
        args.output, {"draws": args.draws, "seed": args.seed, "passed": not failed, "options": table}
    )
    sys.exit(failed)


if __name__ == "__main__":
    main()
