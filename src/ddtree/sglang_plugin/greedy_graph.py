"""A greedy round's end within the target's own CUDA graph: argmax, walk, and all that a path commits.

At a small batch a round's time is the host's, not the device's. What a graph holds costs the host nothing,
so a batch that only asks for the best tokens is committed by the graph that verified it. For other batches
the same graph commits nothing: a number on the device says how many of its requests to commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddtree.sglang_plugin.accept_path import AcceptPath, accept_path
from ddtree.sglang_plugin.draft_sampler import TreeDraftSampler

# Commits paths: (window [bs, W], draft slots [bs * block], prefix lengths [bs], hidden [bs * W, H], path).
Commit = Callable[[Tensor, Tensor, Tensor, Tensor, AcceptPath], None]


class GreedyRound(NamedTuple):
    """What a committed round tells the scheduler; the tensors are the round's own."""

    path: AcceptPath
    target_tokens: Tensor  # [bs, W] int64, a view that the next round overwrites
    new_seq_lens: Tensor  # [bs] int64


class GreedyGraph:
    """The tail of the target's decode graphs.

    Args:
        sampler: whose captured trees are verified.
        commit: commits paths, with nothing but device work.
        max_bs: largest captured batch.
        max_accept_tokens: as of `accept_path`.
        device: where the graphs run.
    """

    def __init__(
        self,
        sampler: TreeDraftSampler,
        commit: Commit,
        max_bs: int,
        max_accept_tokens: int,
        device: torch.device,
    ) -> None:
        self.sampler = sampler
        self.commit = commit
        self.max_accept_tokens = max_accept_tokens
        block_size, width = sampler.block_size, sampler.num_verify_tokens
        self.num_committed = torch.zeros((), dtype=torch.int64, device=device)
        self._host_num_committed = 0
        self._max_bs = max_bs
        self._has_scratch = False
        self.target_tokens = torch.zeros(max_bs, width, dtype=torch.int64, device=device)
        # Columns of a row: the path's indices, its tokens, its length, the bonus token, the new length.
        self.results = torch.zeros(max_bs, 2 * block_size + 3, dtype=torch.int64, device=device)

    def __call__(self, runner: Any, out: Any, forward_batch: Any, num_tokens: int) -> None:
        """SGLang's capture hook: called with the target's output while a graph is captured."""
        del runner
        sampler, block_size = self.sampler, self.sampler.block_size
        if not self._has_scratch:
            # SGLang runs a batch before it captures it, so this is not captured.
            self._take_scratch(out.hidden_states)
            self._has_scratch = True
        bs = num_tokens // sampler.num_verify_tokens
        prefix_lens = forward_batch.seq_lens[:bs]
        tokens = out.next_token_logits.argmax(-1).view(bs, -1)  # [bs, W]
        path = accept_path(sampler.captured(bs), tokens, block_size, self.max_accept_tokens)
        path = path.where(torch.arange(bs, device=tokens.device) < self.num_committed)
        window = forward_batch.out_cache_loc.to(torch.int64).view(bs, -1)  # [bs, W]
        self.commit(window, window[:, :block_size].reshape(-1), prefix_lens, out.hidden_states, path)
        self.target_tokens[:bs].copy_(tokens)
        ends = (path.lens, path.bonus_tokens, prefix_lens + path.lens)
        columns = [path.indices, path.tokens, *(end.to(torch.int64).unsqueeze(1) for end in ends)]
        self.results[:bs].copy_(torch.cat(columns, dim=1))

    def _take_scratch(self, hidden: Tensor) -> None:
        """Commit nothing for the largest batch: scratch memory that a graph uses must not move later."""
        block_size, width, bs = self.sampler.block_size, self.sampler.num_verify_tokens, self._max_bs
        zeros = self.target_tokens.new_zeros(bs, block_size)
        nothing = AcceptPath(zeros - 1, zeros, zeros[:, 0].to(torch.int32), zeros[:, 0])
        window = self.target_tokens.new_zeros(bs, width)
        self.commit(window, zeros.view(-1), zeros[:, 0], hidden[:1].expand(bs * width, -1), nothing)

    def announce(self, num_committed: int) -> None:
        """Say how many of the next graph's requests to commit: all of them, or 0."""
        if num_committed != self._host_num_committed:
            self.num_committed.fill_(num_committed)
            self._host_num_committed = num_committed

    def take(self, bs: int) -> GreedyRound:
        """What the last graph committed of `bs` requests."""
        block_size = self.sampler.block_size
        results = self.results[:bs].clone()
        lens, bonus_tokens, new_seq_lens = results[:, 2 * block_size :].unbind(1)
        path = AcceptPath(
            results[:, :block_size],
            results[:, block_size : 2 * block_size],
            lens.to(torch.int32),
            bonus_tokens,
        )
        return GreedyRound(path, self.target_tokens[:bs], new_seq_lens.contiguous())
