"""Penalties at the nodes of a draft tree, each counting the tokens on its own path.

At a node a token's count is that of the committed output, the root included, plus its occurrences on the
path from below the root down to the node. As in SGLang's `penaltylib` the prompt does not count, frequency
and presence penalties are subtracted together, and the repetition penalty scales what comes of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.sglang_plugin.batch_sampling import BatchSampling, MinNewTokensRows, PenaltyRows
from ddtree.sglang_plugin.token_counts import TokenCounts
from ddtree.tree.draft_tree import DraftTree
from ddtree.tree.triton_choice import prefers_triton

NEG_INF = float("-inf")
MAX_PATH_CELLS = 1 << 22  # pairs of columns handled at once: about 100 MB


def penalise_(
    logits: Tensor,  # [bs, W, V], changed in place
    sampling: BatchSampling,
    tree: DraftTree | None,
    ancestor_mask: Tensor | None,  # [bs, W, W] bool, with a tree
    counts: TokenCounts,
) -> None:
    """Apply each request's penalties to the logits of its nodes; other requests' are not touched.

    No host sync, and no [bs, W, V] of counts: all nodes of a request get the penalties of its committed
    output, then those few tokens that are in the tree get at each node what their own count there asks for.
    """
    if sampling.penalties is not None:
        _penalise_rows_(logits, sampling.penalties, tree, ancestor_mask, counts)
    if sampling.min_new_tokens is not None:
        _forbid_stopping_(logits, sampling.min_new_tokens, tree, counts)


def apply_counts_(
    logits: Tensor,  # [...], changed in place
    counts: Tensor,  # broadcast to it, integers
    frequency: Tensor,  # these three broadcast to it, float32
    presence: Tensor,
    repetition: Tensor | None,
) -> Tensor:
    """Penalise `logits` of tokens that occur `counts` times; rounded as SGLang's in-place steps round."""
    is_seen = counts > 0
    logits.add_((counts * frequency).neg_().sub_(torch.where(is_seen, presence, 0.0)))
    if repetition is not None:
        scaling = torch.where(is_seen, repetition, 1.0)
        logits.copy_(torch.where(logits < 0, logits * scaling, logits / scaling))
    return logits


def _penalise_rows_(
    logits: Tensor,  # [bs, W, V]
    penalties: PenaltyRows,
    tree: DraftTree | None,
    ancestor_mask: Tensor | None,
    counts: TokenCounts,
) -> None:
    num_rows, width = len(penalties.rows.numbers), logits.shape[1]
    if tree is None or ancestor_mask is None:
        _penalise_committed_(logits, penalties, 0, num_rows, counts)
        return
    chunk = max(1, MAX_PATH_CELLS // width**2)
    for start in range(0, num_rows, chunk):
        stop = min(start + chunk, num_rows)
        rows = penalties.rows.indices[start:stop]
        columns = torch.arange(width, device=logits.device).unsqueeze(1)  # [W, 1]
        tokens = tree.tokens[rows]  # [n, W]
        at_tokens = (rows.view(-1, 1, 1), columns, tokens.unsqueeze(1))  # [n, W, W]: node, token
        values = logits[at_tokens]
        _penalise_committed_(logits, penalties, start, stop, counts)
        own = counts.counts[penalties.slots[start:stop].unsqueeze(1), tokens]  # [n, W]
        total = own.unsqueeze(1) + _path_counts(tokens, ancestor_mask[rows])
        strengths = (penalties.frequency, penalties.presence, penalties.repetition)
        frequency, presence, repetition = (s[start:stop].view(-1, 1, 1) for s in strengths)
        apply_counts_(values, total, frequency, presence, repetition if penalties.has_repetition else None)
        # A token twice in a tree is written twice with equal values, one that is not on the node's path
        # with the value it had.
        logits[at_tokens] = values


def _path_counts(tokens: Tensor, ancestor_mask: Tensor) -> Tensor:
    """How often the token of each column is on the path to each node, [n, W (node), W (token)] int32.

    `tokens` is [n, W], `ancestor_mask` [n, W, W]. The root is left out: it is committed.
    """
    is_equal = tokens.unsqueeze(2) == tokens.unsqueeze(1)
    # 0 and 1 and their sums are exact in every float format that a product of matrices may use.
    return (ancestor_mask[:, :, 1:].float() @ is_equal[:, 1:].float()).to(torch.int32)


def _penalise_committed_(
    logits: Tensor,  # [bs, W, V]
    penalties: PenaltyRows,
    start: int,
    stop: int,
    counts: TokenCounts,
) -> None:
    """The penalties of the committed output, for the penalised requests `start` to `stop`."""
    if prefers_triton(logits):
        from ddtree.sglang_plugin.triton_sampling import penalise_committed_triton_

        penalise_committed_triton_(logits, penalties, start, stop, counts.counts)
        return
    for place in range(start, stop):
        apply_counts_(
            logits[penalties.rows.numbers[place]],
            counts.counts[penalties.host_slots[place]],
            penalties.frequency[place],
            penalties.presence[place],
            penalties.repetition[place] if penalties.has_repetition else None,
        )


def _forbid_stopping_(
    logits: Tensor,  # [bs, W, V]
    limits: MinNewTokensRows,
    tree: DraftTree | None,
    counts: TokenCounts,
) -> None:
    """-inf for the stop tokens at nodes where the output is still too short."""
    rows, vocab = limits.rows.indices, logits.shape[2]
    output_lens = counts.output_lens[limits.slots].unsqueeze(1)  # [n, 1]
    if tree is not None:
        output_lens = output_lens + tree.depths[rows]  # [n, W]
    is_short = (output_lens < limits.min_new_tokens.unsqueeze(1)).unsqueeze(2)  # [n, W or 1, 1]
    # A stop token outside the vocabulary counts as the request's first, which is its lowest.
    lowest = limits.stop_tokens[:, :1]
    stops = torch.where(limits.stop_tokens < vocab, limits.stop_tokens, lowest)  # [n, S]
    is_forbidden = is_short & (lowest < vocab).unsqueeze(1)
    columns = torch.arange(logits.shape[1], device=logits.device).unsqueeze(1)
    at_stops = (rows.view(-1, 1, 1), columns, stops.clamp(max=vocab - 1).unsqueeze(1))  # [n, W, S]
    logits[at_stops] = torch.where(is_forbidden, NEG_INF, logits[at_stops])
