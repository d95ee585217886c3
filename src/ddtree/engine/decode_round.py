"""One round: draft, build, verify, accept, commit (arXiv 2604.12989, section 3)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ddtree.config import Mode
from ddtree.engine.logprobs import path_logprobs
from ddtree.engine.protocols import TargetOutput
from ddtree.engine.sampling import TokenChooser, choose_along_path, count_paths
from ddtree.engine.sequence import ModelPair, Sequence
from ddtree.engine.stages import NO_CLOCK, StageClock
from ddtree.layers.window import Window
from ddtree.tree.budget import DraftPlan
from ddtree.tree.build_torch import build_chain
from ddtree.tree.build_triton import build_trees_with_layout
from ddtree.tree.draft_tree import DraftTree
from ddtree.tree.layout import TreeLayout, tree_layout
from ddtree.tree.marginals import DraftMarginals
from ddtree.tree.verify import VerifyResult, follow, verify_sampled


class Built(NamedTuple):
    """A tree and how it is laid out for the verify pass; `top1_tokens` [draft_depth] is the chain."""

    tree: DraftTree
    layout: TreeLayout
    top1_tokens: Tensor | None


class VerifyPass(NamedTuple):
    """What the target said about a tree, and the window it said it in."""

    output: TargetOutput
    window: Window


class Round(NamedTuple):
    """A finished round: the tree, its accept path and, where asked for, its tokens' packed logprobs."""

    built: Built
    result: VerifyResult
    logprobs: Tensor | None = None

    @property
    def logprobs_shape(self) -> tuple[int, int]:
        """Rows and columns of the packed logprobs, none where there are none."""
        return (0, 0) if self.logprobs is None else (self.logprobs.shape[0], self.logprobs.shape[1])


def decode_round(
    pair: ModelPair,
    sequence: Sequence,
    plan: DraftPlan,
    chooser: TokenChooser,
    top_logprobs: int | None = None,
    clock: StageClock = NO_CLOCK,
) -> Round:
    """Draft a tree after the root, verify it in one target pass and commit the accept path."""
    marginals = draft(pair, sequence, plan)
    clock.mark("draft")
    built = build(marginals, sequence, plan)
    clock.mark("build")
    verified = verify(pair, sequence, built)
    clock.mark("verify")
    result = accept(built, verified, chooser, pair.block_size - 1)
    logprobs = path_logprobs(verified.output.logits, result, top_logprobs)
    clock.mark("accept")
    commit(pair, sequence, verified, result)
    clock.mark("commit")
    return Round(built, result, logprobs)


def draft(pair: ModelPair, sequence: Sequence, plan: DraftPlan) -> DraftMarginals | None:
    """One drafter pass over a whole block; None when the plan is plain decoding."""
    if plan.mode == Mode.AR or pair.drafter is None or pair.draft_context is None:
        return None
    depths, everything = block_window(pair.drafter.block_size, sequence.root_token.device)
    window = sequence.window(sequence.prefix_len + depths, everything)
    logits = pair.drafter.draft_logits(sequence.root_token, pair.draft_context, window)
    return DraftMarginals.from_logits(logits[None], pair.topk(plan))  # [1, draft_depth, K]


@cache
def block_window(block_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Depths [block_size] and mask [block_size, block_size] of a drafter's block, in which all see all."""
    depths = torch.arange(block_size, device=device)
    return depths, torch.ones(block_size, block_size, dtype=torch.bool, device=device)


def build(marginals: DraftMarginals | None, sequence: Sequence, plan: DraftPlan) -> Built:
    """The tree of the most probable prefixes, the chain, or the root alone."""
    if marginals is None:
        tree = root_only(sequence.root_token)
        return Built(tree, tree_layout(tree, sequence.prefix_len), None)
    top1_tokens = marginals.tokens[0, :, 0]
    if plan.mode == Mode.CHAIN:
        tree = build_chain(marginals, sequence.root_token)
        return Built(tree, tree_layout(tree, sequence.prefix_len), top1_tokens)
    tree, layout, _ = build_trees_with_layout(
        marginals, sequence.root_token, sequence.prefix_len, plan.node_budget
    )
    return Built(tree, layout, top1_tokens)


def root_only(root_token: Tensor) -> DraftTree:
    """The tree of plain decoding: root_token [1] and nothing below it."""
    root = root_token[None].clone()  # [1, 1], since the commit overwrites the root in place
    zero = torch.zeros_like(root)
    return DraftTree(root, zero - 1, zero, zero.float())


def verify(pair: ModelPair, sequence: Sequence, built: Built) -> VerifyPass:
    """One target pass over all nodes; each sees the prefix and its own ancestors."""
    window = sequence.window(built.layout.positions[0], built.layout.ancestor_mask[0])
    output = pair.target.forward(built.tree.tokens[0], window, pair.kv_cache, pair.tap_layer_ids)
    return VerifyPass(output, window)


def accept(built: Built, verified: VerifyPass, chooser: TokenChooser, draft_depth: int) -> VerifyResult:
    """Follow the target's own choice from the root while a child carries it."""
    tree, mask, logits = built.tree, built.layout.ancestor_mask, verified.output.logits
    if logits.is_cpu:
        target_tokens = choose_along_path(chooser, logits, tree, built.layout)
        return follow(tree, mask, target_tokens[None], draft_depth)
    path_counts = None
    if chooser.params.counts_tokens:
        path_counts = count_paths(tree.tokens[0], mask[0], logits.shape[-1])
    if chooser.params.is_greedy:
        return follow(tree, mask, chooser.most_likely(logits, path_counts)[None], draft_depth)
    log_probs = chooser.node_log_probs(logits, path_counts)[None]
    return verify_sampled(tree, mask, log_probs, chooser.seeds, built.layout.positions, draft_depth)


def commit(pair: ModelPair, sequence: Sequence, verified: VerifyPass, result: VerifyResult) -> None:
    """Move the accept path's KV to the front, give its features to the drafter, advance the root."""
    pair.kv_cache.compact(sequence.prefix_len, result)
    if pair.drafter is not None and pair.draft_context is not None and verified.output.taps is not None:
        path = result.accept_indices[0].clamp(min=0)  # [block_size], junk rows past the path do no harm
        if path.is_cpu:
            path = path[: int(result.num_correct_drafts) + 1]
        depths = block_window(pair.block_size, path.device)[0][: path.shape[0]]
        committed = sequence.window(sequence.prefix_len + depths, None)
        pair.drafter.append(pair.draft_context, verified.output.taps[path], committed)
    sequence.advance(result.bonus_tokens, result.num_correct_drafts + 1)
