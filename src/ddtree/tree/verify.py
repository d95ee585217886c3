"""The accept walk: follow the target's own choices down the tree, then say which KV to keep."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ddtree.tree.draft_tree import DraftTree
from ddtree.tree.noise import draw
from ddtree.tree.triton_choice import power_of_two, prefers_triton

MAX_TRITON_COLUMNS = 512


class VerifyResult(NamedTuple):
    """What one verify pass commits; -1 fills the columns beyond the path."""

    accept_indices: Tensor  # [bs, draft_depth + 1] int64: tree columns along the path, the root first
    accept_tokens: Tensor  # [bs, draft_depth + 1] int64: the correct drafts, then the bonus token
    bonus_tokens: Tensor  # [bs] int64
    num_correct_drafts: Tensor  # [bs] int64, the bonus token not counted


def follow(tree: DraftTree, ancestor_mask: Tensor, target_tokens: Tensor, draft_depth: int) -> VerifyResult:
    """The path on which every node carries the target's choice after its parent.

    `ancestor_mask` is [bs, W, W] bool, `target_tokens` [bs, W] int64 the target's choice after each
    column, `draft_depth` the deepest level a tree may have. No host sync; one Triton launch on CUDA for
    W <= 512 (the lossless walk of arXiv 2604.12989).
    """
    if tree.num_verify_tokens <= MAX_TRITON_COLUMNS and prefers_triton(tree.tokens):
        return follow_triton(tree, target_tokens, draft_depth)
    return follow_torch(tree, ancestor_mask, target_tokens, draft_depth)


def follow_torch(
    tree: DraftTree, ancestor_mask: Tensor, target_tokens: Tensor, draft_depth: int
) -> VerifyResult:
    """`follow` without a loop: a node is on the path if it and all its ancestors match."""
    bs, width = tree.tokens.shape
    expected = target_tokens.gather(1, tree.parents.clamp(min=0))  # [bs, W]
    matches = (tree.tokens == expected) & (tree.parents >= 0)
    matches[:, 0] = True
    on_path = ~(ancestor_mask & ~matches.unsqueeze(1)).any(2)  # [bs, W]
    columns = torch.arange(width, device=on_path.device).expand(bs, -1)
    # Nodes off the path land in a spare last column, which is cut off.
    slots = torch.where(on_path, tree.depths, draft_depth + 1)
    accept_indices = columns.new_full((bs, draft_depth + 2), -1).scatter_(1, slots, columns)[:, :-1]
    num_correct_drafts = on_path.sum(1) - 1
    # A node's token is the target's choice after its parent, so these are the path's tokens and the bonus.
    accept_tokens = target_tokens.gather(1, accept_indices.clamp(min=0))
    accept_tokens = torch.where(accept_indices >= 0, accept_tokens, -1)
    bonus_tokens = accept_tokens.gather(1, num_correct_drafts.unsqueeze(1)).squeeze(1)
    return VerifyResult(accept_indices, accept_tokens, bonus_tokens, num_correct_drafts)


def follow_triton(tree: DraftTree, target_tokens: Tensor, draft_depth: int) -> VerifyResult:
    """`follow` as a walk from node to node, one program a request; parents say all that the mask does."""
    from ddtree.tree.triton_kernels import walk_kernel

    bs, width = tree.tokens.shape
    tokens, parents, targets = (
        t if t.stride(1) == 1 else t.contiguous() for t in (tree.tokens, tree.parents, target_tokens)
    )
    paths = tokens.new_empty(2, bs, draft_depth + 1, dtype=torch.int64)
    ends = tokens.new_empty(2, bs, dtype=torch.int64)
    with torch.cuda.device_of(tokens):
        walk_kernel[(bs,)](
            tokens, parents, targets, paths, ends, tokens.stride(0), parents.stride(0), targets.stride(0),
            W=width, W_PAD=power_of_two(width, at_least=32),
            SLOTS=draft_depth + 1, SLOTS_PAD=power_of_two(draft_depth + 1, at_least=32), num_warps=1,
        )  # fmt: skip
    return VerifyResult(paths[0], paths[1], ends[0], ends[1])


def verify_greedy(
    tree: DraftTree, ancestor_mask: Tensor, target_logits: Tensor, draft_depth: int
) -> VerifyResult:
    """Follow the target's argmax after each column; `target_logits` is [bs, W, V].

    Of equal logits the lowest id wins.
    """
    return follow(tree, ancestor_mask, target_logits.argmax(-1), draft_depth)


def verify_sampled(
    tree: DraftTree,
    ancestor_mask: Tensor,
    target_log_probs: Tensor,
    seeds: Tensor,
    positions: Tensor,
    draft_depth: int,
) -> VerifyResult:
    """Sample after each column and follow the sample (sample-and-match).

    `target_log_probs` [bs, W, V] are processed already (temperature, top-k, penalties ...), `seeds`
    is [bs] int64, `positions` [bs, W] the columns' own positions: a token drawn after a column
    stands, and takes its noise, one further on.
    """
    if target_log_probs.is_cpu:
        target_tokens = _draw_along_path(tree, target_log_probs, seeds, positions)
    else:
        target_tokens = draw(target_log_probs, seeds.unsqueeze(1), positions + 1)
    return follow(tree, ancestor_mask, target_tokens, draft_depth)


def _draw_along_path(tree: DraftTree, target_log_probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The samples of the columns on the path, -1 elsewhere, [bs, W].

    Noise for a whole vocabulary is dear on a CPU, and there looking at the sample costs nothing.
    """
    rows = torch.arange(tree.tokens.shape[0])
    columns = torch.zeros_like(rows)
    target_tokens = torch.full_like(tree.tokens, -1)
    while True:
        tokens = draw(target_log_probs[rows, columns], seeds[rows], positions[rows, columns] + 1)
        target_tokens[rows, columns] = tokens
        is_next = (tree.parents[rows] == columns.unsqueeze(1)) & (tree.tokens[rows] == tokens.unsqueeze(1))
        going_on = is_next.any(1)
        if not going_on.any():
            return target_tokens
        rows, columns = rows[going_on], is_next[going_on].int().argmax(1)


def compaction_indices(result: VerifyResult, prefix_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Cache slots (src, dst), each [bs, draft_depth + 1], that bring the path's KV to the window's front.

    `prefix_lens` is [bs]; column j of the tree has its KV in slot prefix + j. Beyond the path src = dst.
    Gather all of src before writing dst: a slot may be both.
    """
    columns = torch.arange(result.accept_indices.shape[1], device=result.accept_indices.device)
    starts = prefix_lens.unsqueeze(1)
    kept = torch.where(result.accept_indices >= 0, result.accept_indices, columns)
    return starts + kept, starts + columns
