"""How often each request has put out each token, kept on the device for the penalties."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.config import check
from ddtree.sglang_plugin.batch_sampling import upload


class TokenCounts:
    """Output tokens of the requests with penalties, one row a request slot.

    Stock SGLang counts on the host side of a step, a round too late for tokens that the device has only
    just accepted; this is told on the device, right after the walk, and never waits. The tensors are made
    on first use, since most servers never see a penalty.

    Args:
        num_slots: rows of the request pool.
        vocab_size: width of the logits.
        device: where the logits are.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str) -> None:
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._counts: Tensor | None = None
        self._output_lens: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        """Occurrences in each slot's output, [num_slots, V] int32."""
        if self._counts is None:
            self._counts = torch.zeros(self.num_slots, self.vocab_size, dtype=torch.int32, device=self.device)
        return self._counts

    @property
    def output_lens(self) -> Tensor:
        """Output tokens of each slot, [num_slots] int64."""
        if self._output_lens is None:
            self._output_lens = torch.zeros(self.num_slots, dtype=torch.int64, device=self.device)
        return self._output_lens

    def reset(self, slots: list[int], output_tokens: list[list[int]]) -> None:
        """Make the counts of `slots` those of `output_tokens`, what each request has put out so far.

        For every extend, since a slot may have had another request before and a retracted request comes
        back with output. Raises `ConfigError` for a token outside the vocabulary.
        """
        if not slots:
            return
        flat = [
            slot * self.vocab_size + self._check(token)
            for slot, tokens in zip(slots, output_tokens, strict=True)
            for token in tokens
        ]
        lengths = [len(tokens) for tokens in output_tokens]
        (rows, places, lens), _ = upload([slots, flat, lengths], [], self.device)
        self.counts.index_fill_(0, rows, 0)
        self.counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        self.output_lens.index_copy_(0, rows, lens)

    def add(self, slots: Tensor, tokens: Tensor, num_tokens: Tensor) -> None:
        """Count what a round accepts: the first `num_tokens` [n] of each row of `tokens` [n, D] int64.

        `slots` [n] int64 are distinct; columns beyond may hold anything. No host sync.
        """
        is_new = torch.arange(tokens.shape[1], device=tokens.device) < num_tokens.unsqueeze(1)  # [n, D]
        places = slots.unsqueeze(1) * self.vocab_size + torch.where(is_new, tokens, 0)
        self.counts.view(-1).index_add_(0, places.flatten(), is_new.flatten().to(torch.int32))
        self.output_lens.index_add_(0, slots, num_tokens.to(torch.int64))

    def _check(self, token: int) -> int:
        check(0 <= token < self.vocab_size, "output token", token, f"0 to {self.vocab_size - 1}")
        return token
