"""The target's own choice after every node of a batch of draft trees: one token a node.

The order is that of stock plain decoding, for each request by itself: frequency and presence penalties and
min_new_tokens, repetition penalty, grammar, logit bias; then, for greedy requests, the best token, the
lowest id among equals; for sampled ones temperature, top-k with top-p, min-p, and one draw with noise keyed
by (seed, position, token id). A NaN logit counts as -inf; of a row of nothing else token 0 is chosen.

What differs from SGLang's sampler, for the sake of one text a seed: nothing depends on the other requests
(there one request's min-p changes how all others are cut), top_p 1 drops nothing (there float32 sums just
above 1 do), and ties at a cut are decided (`TiesAtCut`; SGLang's torch sort leaves them open).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ddtree.config import check
from ddtree.sglang_plugin.batch_sampling import BatchSampling, RequestSampling, Rows
from ddtree.sglang_plugin.penalties import penalise_
from ddtree.sglang_plugin.sampling_filters import TiesAtCut, drop_unlikely_
from ddtree.sglang_plugin.token_counts import TokenCounts
from ddtree.tree.draft_tree import DraftTree
from ddtree.tree.noise import draw
from ddtree.tree.triton_choice import prefers_triton

__all__ = [
    "BatchSampling",
    "RequestSampling",
    "TiesAtCut",
    "choose_processed",
    "choose_target_tokens",
    "process_logits_",
]

CHUNK_BYTES = 256 << 20
BYTES_PER_LOGIT = 48  # of sorting, summing or noise, the widest of which are int64 and float64
NEG_INF = float("-inf")


def choose_target_tokens(
    logits: Tensor,  # [bs * W, V] float32, bf16 or fp16; may be changed in place
    *,
    sampling: BatchSampling,
    positions: Tensor,  # [bs, W] int64, of the nodes
    tree: DraftTree | None,
    ancestor_mask: Tensor | None,  # [bs, W, W] bool
    counts: TokenCounts | None,
    logit_bias: Tensor | None,  # [bs, V]
    apply_grammar: Callable[[Tensor], object] | None,
    sequential_top_k_top_p: bool = False,
    ties: TiesAtCut = "lowest_id",
) -> Tensor:
    """The target's choice after each node, [bs, W] int64; no host sync.

    Args:
        logits: of the verify pass, row by row as SGLang lays them out.
        sampling: the batch's requests.
        positions: a token drawn after a node takes the noise of the position after it.
        tree: the draft trees; None for W = 1 without one, as after prefill.
        ancestor_mask: of the tree, as `TreeLayout` has it.
        counts: the output so far, the root included; needed if `sampling.needs_counts`.
        logit_bias: added after the grammar.
        apply_grammar: masks logits [bs * W, V] in place.
        sequential_top_k_top_p: for requests with min-p, take top-p of what top-k has left, as SGLang does
            on its flashinfer sampling backend.
        ties: which of several equally likely tokens at a cut stay; "all" on that backend.
    """
    process_logits_(
        logits, sampling=sampling, positions=positions, tree=tree, ancestor_mask=ancestor_mask,
        counts=counts, logit_bias=logit_bias, apply_grammar=apply_grammar,
    )  # fmt: skip
    return choose_processed(
        logits, sampling, positions, sequential_top_k_top_p=sequential_top_k_top_p, ties=ties
    )


def process_logits_(
    logits: Tensor,  # [bs * W, V], changed in place
    *,
    sampling: BatchSampling,
    positions: Tensor,  # [bs, W] int64
    tree: DraftTree | None,
    ancestor_mask: Tensor | None,  # [bs, W, W] bool
    counts: TokenCounts | None,
    logit_bias: Tensor | None,  # [bs, V]
    apply_grammar: Callable[[Tensor], object] | None,
) -> None:
    """What comes before the temperature: penalties, grammar, bias; arguments as of `choose_target_tokens`."""
    bs, width = positions.shape
    check(
        logits.shape[0] == bs * width and sampling.batch_size == bs, "rows of logits", logits.shape[0],
        f"{bs} requests of {width} nodes, with the sampling parameters of {sampling.batch_size} requests",
    )  # fmt: skip
    by_node = logits.unflatten(0, (bs, width))  # [bs, W, V], a view
    if sampling.needs_counts:
        check(counts is not None, "counts", None, "a TokenCounts, since requests have penalties")
        assert counts is not None
        check(
            counts.vocab_size == logits.shape[1], "vocab_size of counts", counts.vocab_size,
            f"the width of the logits, {logits.shape[1]}",
        )  # fmt: skip
        penalise_(by_node, sampling, tree, ancestor_mask, counts)
    if apply_grammar is not None:
        apply_grammar(logits)
    if logit_bias is not None:
        by_node.add_(logit_bias.unsqueeze(1))


def choose_processed(
    logits: Tensor,  # [bs * W, V], after `process_logits_`; not changed
    sampling: BatchSampling,
    positions: Tensor,  # [bs, W] int64
    *,
    sequential_top_k_top_p: bool = False,
    ties: TiesAtCut = "lowest_id",
) -> Tensor:
    """The tokens of processed logits, [bs, W] int64; on CUDA in three Triton launches at most."""
    if prefers_triton(logits):
        from ddtree.sglang_plugin.triton_sampling import choose_triton

        return choose_triton(logits, sampling, positions, sequential_top_k_top_p, ties)
    return choose_torch(logits, sampling, positions, sequential_top_k_top_p, ties)


def choose_torch(
    logits: Tensor,  # [bs * W, V]
    sampling: BatchSampling,
    positions: Tensor,  # [bs, W] int64
    is_sequential: bool,
    ties: TiesAtCut,
) -> Tensor:
    """`choose_processed` in torch, a bounded number of nodes at a time."""
    width = positions.shape[1]
    drawn_at = positions.flatten() + 1
    tokens = torch.empty_like(drawn_at)
    size = max(1, CHUNK_BYTES // (BYTES_PER_LOGIT * logits.shape[1]))
    for nodes in _node_chunks(sampling.greedy, width, size):
        tokens[nodes] = _without_nan(logits[nodes]).argmax(1)
    for rows in (sampling.plain, sampling.filtered):
        for nodes in _node_chunks(rows, width, size):
            requests = nodes // width
            scaled = _without_nan(logits[nodes]).div_(sampling.temperatures[requests].unsqueeze(1))
            scaled.clamp_(max=torch.finfo(torch.float32).max)
            if rows is sampling.filtered:
                max_gaps = sampling.max_gaps[requests]
                drop_unlikely_(
                    scaled, sampling.top_ks[requests], sampling.top_ps[requests], max_gaps,
                    max_gaps.isfinite() & is_sequential, ties,
                )  # fmt: skip
            tokens[nodes] = draw(scaled, sampling.seeds[requests], drawn_at[nodes])
    return tokens.view_as(positions)


def _node_chunks(rows: Rows, width: int, size: int) -> Iterator[Tensor]:
    """The rows of logits of some requests, [n] int64, `size` at a time."""
    if rows.numbers:
        columns = torch.arange(width, device=rows.indices.device)
        yield from (rows.indices.unsqueeze(1) * width + columns).flatten().split(size)


def _without_nan(logits: Tensor) -> Tensor:
    """`logits` [n, V], which are ours, in float32 with -inf for NaN."""
    return logits.float().nan_to_num_(nan=NEG_INF, posinf=torch.inf, neginf=NEG_INF)
