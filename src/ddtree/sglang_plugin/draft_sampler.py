"""From the drafter's hidden states to draft trees, within the drafter's CUDA graph.

Under tensor parallelism each rank has a part of the vocabulary. A rank's K best tokens hold all of its
share of the K best of the whole, so K logits, their ids and one log-sum a rank are exchanged, and every rank
builds the same tree from the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ddtree.config import Mode, PluginConfig
from ddtree.tree import DraftMarginals, DraftTree, RetrieveLinks, build_chain, build_trees_with_layout
from ddtree.tree.layout import retrieve_links, tree_layout

HEAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Gatherer(Protocol):
    """What is needed of SGLang's `GroupCoordinator`."""

    world_size: int

    def all_gather_into_tensor(self, output: Tensor, input: Tensor) -> None:
        """Concatenate every rank's `input` [n, ...] in `output` [world_size * n, ...]."""


@dataclass(frozen=True, slots=True)
class DraftedTrees:
    """The trees of a batch, W columns each, with what the verify pass needs of them."""

    tree: DraftTree  # [bs, W]
    ancestor_mask: Tensor  # [bs, W, W] bool
    links: RetrieveLinks  # [bs, W]
    positions: Tensor  # [bs, W] int64

    def first(self, bs: int) -> DraftedTrees:
        """The trees of the first `bs` requests, as views."""
        tree, links = self.tree, self.links
        return DraftedTrees(
            DraftTree(tree.tokens[:bs], tree.parents[:bs], tree.depths[:bs], tree.log_probs[:bs]),
            self.ancestor_mask[:bs],
            RetrieveLinks(links.next_token[:bs], links.next_sibling[:bs]),
            self.positions[:bs],
        )

    def copy_(self, other: DraftedTrees) -> None:
        """Take over the contents of `other`, whose shapes are the same."""
        for mine, its in zip(self._tensors(), other._tensors(), strict=True):
            mine.copy_(its)

    def _tensors(self) -> tuple[Tensor, ...]:
        tree = self.tree
        return (
            tree.tokens, tree.parents, tree.depths, tree.log_probs, self.ancestor_mask, *self.links,
            self.positions,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The target's output head on this rank, for the tokens from `start` on."""

    weight: Tensor  # [num_tokens, hidden]
    start: int
    group: Gatherer | None  # None on one rank

    @staticmethod
    def of(lm_head: Any, group: Any) -> VocabularyShard:
        """The shard of SGLang's `lm_head`; `ValueError` says why a head cannot be used."""
        weight = getattr(lm_head, "weight", None)
        if weight is None or weight.dtype not in HEAD_DTYPES:
            kind = "none" if weight is None else str(weight.dtype)
            raise ValueError(
                f"DDTREE needs an output head in float32, bfloat16 or float16 (lm_head.weight: {kind}); "
                "serve it without a quantized lm_head, or use --speculative-algorithm DFLASH"
            )
        group = group if group is not None and group.world_size > 1 else None
        shard = getattr(lm_head, "shard_indices", None)
        if shard is None:
            if group is not None:
                raise ValueError("DDTREE cannot tell which part of the vocabulary this rank's lm_head has")
            return VocabularyShard(weight, 0, None)
        if shard.num_added_elements:
            raise ValueError(
                f"DDTREE does not cover {shard.num_added_elements} tokens added to the vocabulary; "
                "use --speculative-algorithm DFLASH"
            )
        return VocabularyShard(weight[: int(shard.num_org_elements)], int(shard.org_vocab_start_index), group)

    def marginals(self, hidden: Tensor, candidate_topk: int) -> DraftMarginals:
        """Marginals over the whole vocabulary of `hidden` [bs, draft_depth, hidden_size]."""
        # As rows: of a slice of blocks `matmul` makes one product a request, each of which reads all weights.
        rows = hidden.reshape(-1, hidden.shape[-1]).to(self.weight.dtype)  # [bs * L, hidden_size]
        logits = (rows @ self.weight.T).view(*hidden.shape[:-1], -1)  # [bs, L, num_tokens]
        if self.group is None:
            marginals = DraftMarginals.from_logits(logits, candidate_topk)
            return (
                DraftMarginals(marginals.tokens + self.start, marginals.log_probs)
                if self.start
                else marginals
            )
        return gather_marginals(logits, candidate_topk, self.start, self.group)


def gather_marginals(logits: Tensor, candidate_topk: int, start: int, group: Gatherer) -> DraftMarginals:
    """The marginals of a vocabulary that is spread over ranks in ascending order of ids.

    `logits` [bs, L, num_tokens] are this rank's, `start` is the id of its first token. Exact up to the
    rounding of the log-sum, and the same on every rank: ties between ranks go to the lower id.
    """
    topk = min(candidate_topk, logits.shape[-1])
    local = DraftMarginals.from_logits(logits, topk)
    values = logits.gather(-1, local.tokens).float()  # [bs, L, K]
    values = values.masked_fill(values.isnan(), float("-inf"))
    # The best token's log-probability is the log-sum over exponentials relative to it, negated.
    log_sums = values[..., :1] - local.log_probs[..., :1]  # [bs, L, 1]
    log_sums = torch.where(values[..., :1].isneginf(), float("-inf"), log_sums)  # no token on this rank
    values = _all_gather(torch.cat((values, log_sums), -1).contiguous(), group)  # [ranks, bs, L, K + 1]
    tokens = _all_gather((local.tokens + start).contiguous(), group)  # [ranks, bs, L, K]
    log_sum = values[..., -1].logsumexp(0).unsqueeze(-1)  # [bs, L, 1]
    # Ranks have ascending ids, and a rank's candidates stand in the order of the tie rule.
    all_values = values[..., :-1].movedim(0, -2).flatten(-2)  # [bs, L, ranks * K]
    all_tokens = tokens.movedim(0, -2).flatten(-2)
    log_probs = (all_values - log_sum).clamp_(max=0.0)
    log_probs = torch.where(log_probs.isnan(), float("-inf"), log_probs)
    log_probs, places = log_probs.sort(dim=-1, descending=True, stable=True)
    count = min(candidate_topk, log_probs.shape[-1])
    return DraftMarginals(all_tokens.gather(-1, places[..., :count]), log_probs[..., :count].contiguous())


def _all_gather(local: Tensor, group: Gatherer) -> Tensor:
    """Every rank's tensor, [ranks, ...]."""
    gathered = local.new_empty(group.world_size * local.shape[0], *local.shape[1:])
    group.all_gather_into_tensor(gathered, local)
    return gathered.view(group.world_size, *local.shape)


def check_equal_trees(trees: DraftedTrees, group: Gatherer) -> None:
    """Raise `RuntimeError` if ranks have built different trees; a debug check, which waits for the device."""
    mine = torch.cat((trees.tree.tokens.flatten(), trees.tree.parents.flatten()))
    every = _all_gather(mine.unsqueeze(0), group).view(group.world_size, -1)  # [ranks, 2 * bs * W]
    if not torch.equal(every, every[:1].expand_as(every)):
        raise RuntimeError(
            f"DDTREE: the {group.world_size} tensor-parallel ranks have built different draft trees; "
            "please report it with the target, the drafter and the SGLang version"
        )


class TreeDraftSampler:
    """Turns the drafter's hidden states into trees: the tail of the drafter's graph, or a call of its own.

    Args:
        head: the target's output head.
        config: budget, candidates and mode.
        block_size: positions of a draft block, the root's included.
    """

    def __init__(self, head: VocabularyShard, config: PluginConfig, block_size: int) -> None:
        self.head = head
        self.config = config
        self.block_size = block_size
        self.num_verify_tokens = config.verify_width(block_size)
        self.max_captured = 0
        self._captured: DraftedTrees | None = None
        self._views: dict[int, DraftedTrees] = {}
        self._then: Callable[[DraftedTrees, Tensor], None] | None = None

    def prepare_capture(self, max_bs: int) -> None:
        """Make the buffers that graphs of up to `max_bs` requests leave their trees in."""
        device, shape = self.head.weight.device, (max_bs, self.num_verify_tokens)
        ints = torch.zeros((6, *shape), dtype=torch.int64, device=device)
        self._captured = DraftedTrees(
            DraftTree(ints[0], ints[1], ints[2], torch.zeros(shape, device=device)),
            torch.zeros((*shape, self.num_verify_tokens), dtype=torch.bool, device=device),
            RetrieveLinks(ints[3], ints[4]),
            ints[5],
        )
        self.max_captured = max_bs

    def then(self, work: Callable[[DraftedTrees, Tensor], None]) -> None:
        """Capture `work(trees, prefix_lens)` behind the trees."""
        self._then = work

    def capture(self, runner: Any, out: Any, forward_batch: Any, num_tokens: int) -> None:
        """SGLang's capture hook: called with the drafter's output while a graph is captured."""
        del runner
        bs = num_tokens // self.block_size
        prefix_lens = forward_batch.seq_lens[:bs]
        self.captured(bs).copy_(self.draft(out.hidden_states, forward_batch.input_ids, prefix_lens))
        if self._then is not None:
            self._then(self.captured(bs), prefix_lens)

    @property
    def writes_mask(self) -> bool:
        """Whether graphs have work behind their trees, which is to write the verify mask."""
        return self._then is not None

    def captured(self, bs: int) -> DraftedTrees:
        """What a replayed graph has left for `bs` requests; the next one overwrites it."""
        assert self._captured is not None, "prepare_capture comes before a capture"
        if bs not in self._views:
            self._views[bs] = self._captured.first(bs)
        return self._views[bs]

    def draft(self, hidden: Tensor, block_tokens: Tensor, prefix_lens: Tensor) -> DraftedTrees:
        """The trees of `hidden` [bs * block, hidden_size], [bs] requests of `prefix_lens` committed tokens.

        The blocks of `block_tokens` [bs * block] begin with the roots.
        """
        roots = block_tokens.view(-1, self.block_size)[:, 0]  # [bs]
        hidden = hidden.view(roots.shape[0], self.block_size, -1)[:, 1:]  # [bs, L, hidden_size]
        return self.build(self.head.marginals(hidden, self.config.num_candidates), roots, prefix_lens)

    def build(self, marginals: DraftMarginals, root_tokens: Tensor, prefix_lens: Tensor) -> DraftedTrees:
        """The trees of `marginals` [bs, L, K] under `root_tokens` [bs] at positions `prefix_lens` [bs]."""
        if self.config.mode == Mode.CHAIN:
            tree = build_chain(marginals, root_tokens)
            layout, links = tree_layout(tree, prefix_lens), retrieve_links(tree)
        else:
            tree, layout, links = build_trees_with_layout(
                marginals, root_tokens, prefix_lens, self.config.node_budget
            )
        trees = DraftedTrees(tree, layout.ancestor_mask, links, layout.positions)
        return _pad(trees, self.num_verify_tokens, prefix_lens)


def _pad(trees: DraftedTrees, width: int, prefix_lens: Tensor) -> DraftedTrees:
    """The trees with padding up to `width` columns."""
    missing = width - trees.tree.num_verify_tokens
    if missing == 0:
        return trees
    tree, links, mask = trees.tree, trees.links, trees.ancestor_mask

    def columns(values: Tensor, padding: float) -> Tensor:
        return torch.nn.functional.pad(values, (0, missing), value=padding)

    mask = torch.nn.functional.pad(mask, (0, missing, 0, missing))
    mask = mask | torch.eye(width, dtype=torch.bool, device=mask.device)  # padding sees itself
    tree = DraftTree(
        columns(tree.tokens, 0), columns(tree.parents, -1), columns(tree.depths, 0),
        columns(tree.log_probs, float("-inf")),
    )  # fmt: skip
    links = RetrieveLinks(columns(links.next_token, -1), columns(links.next_sibling, -1))
    return DraftedTrees(tree, mask, links, prefix_lens.unsqueeze(1) + tree.depths)
