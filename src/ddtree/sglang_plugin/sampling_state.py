"""What sampling needs to know of a batch's requests, kept over rounds: parameters, seeds, token counts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddtree.sglang_plugin.batch_sampling import BatchSampling, RequestSampling
from ddtree.sglang_plugin.compat import request_slot
from ddtree.sglang_plugin.target_choice import choose_target_tokens
from ddtree.sglang_plugin.token_counts import TokenCounts
from ddtree.tree import DraftTree


def request_seed(sampling_seed: int | None, rid: str, server_seed: int) -> int:
    """The seed of a request's noise: its own, or one made of its id and the server's, as on every rank."""
    if sampling_seed is not None:
        return sampling_seed
    digest = hashlib.blake2b(f"{server_seed}:{rid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def stop_tokens(req: Any) -> tuple[int, ...]:
    """Tokens that would end `req`, which `min_new_tokens` holds back."""
    tokens = set(req.sampling_params.stop_token_ids or ())
    tokens |= set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        tokens |= set(req.tokenizer.additional_stop_token_ids or ())
        tokens.add(req.tokenizer.eos_token_id)
    tokens.discard(None)
    return tuple(sorted(tokens))


def request_sampling(req: Any, server_seed: int) -> RequestSampling:
    """The sampling parameters of SGLang's `req`."""
    params = req.sampling_params
    return RequestSampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        min_new_tokens=params.min_new_tokens,
        stop_tokens=stop_tokens(req) if params.min_new_tokens > 0 else (),
        seed=request_seed(params.sampling_seed, req.rid, server_seed),
        slot=request_slot(req),
    )


class SamplingState:
    """The batch's sampling parameters, and the token counts of its requests with penalties.

    Args:
        num_slots: rows of SGLang's request pool.
        vocab_size: width of the logits.
        device: where the logits are.
        server_seed: seed of the server, for requests without their own.
        broadcast: takes over rank 0's tokens in place, or None on one rank.
        like_flashinfer: whether plain decoding samples with flashinfer, which takes top-p of what top-k has
            left where min-p is used, and keeps all of the tokens that tie at a cut.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        server_seed: int,
        broadcast: Callable[[Tensor], Tensor] | None,
        *,
        like_flashinfer: bool,
    ) -> None:
        self.device = device
        self.server_seed = server_seed
        self.broadcast = broadcast
        self.like_flashinfer = like_flashinfer
        self.counts = TokenCounts(num_slots, vocab_size, device)
        self._requests: list[tuple[Any, int]] = []
        self._parameters: list[RequestSampling] = []
        self._sampling: BatchSampling | None = None

    def of(self, reqs: list[Any]) -> BatchSampling:
        """The parameters of `reqs`, made anew only when the batch has changed."""
        requests = [(req, request_slot(req)) for req in reqs]
        if self._sampling is None or not _same(requests, self._requests):
            self._parameters = [request_sampling(req, self.server_seed) for req in reqs]
            self._sampling = BatchSampling.from_requests(self._parameters, self.device)
            self._requests = requests
        return self._sampling

    def seed_of(self, req: Any) -> int:
        """The seed of the noise of SGLang's `req`."""
        return request_seed(req.sampling_params.sampling_seed, req.rid, self.server_seed)

    def restart_counts(self, reqs: list[Any], seq_lens: list[int]) -> None:
        """Count what requests with penalties have put out before this prefill, up to `seq_lens` tokens.

        That is nothing for a new request, and everything for one that was retracted.
        """
        self.of(reqs)
        slots, output_tokens = [], []
        for req, seq_len, parameters in zip(reqs, seq_lens, self._parameters, strict=True):
            if parameters.needs_counts:
                slots.append(parameters.slot)
                output_tokens.append(list(req.output_ids[: max(seq_len - len(req.origin_input_ids), 0)]))
        self.counts.reset(slots, output_tokens)

    def first_tokens(
        self,
        reqs: list[Any],
        seq_lens: list[int],
        logits: Tensor,  # [bs, vocab]
        positions: Tensor,  # [bs] of the prompts' last tokens
        logit_bias: Tensor | None,  # [bs, vocab]
    ) -> Tensor:
        """The first token after each prefill, [bs] int64, which is counted."""
        self.restart_counts(reqs, seq_lens)
        sampling = self.of(reqs)
        tokens = self.choose(sampling, logits, positions.view(-1, 1), logit_bias)  # [bs, 1]
        self.count(reqs, tokens, torch.ones_like(tokens[:, 0]))
        return tokens[:, 0]

    def count(self, reqs: list[Any], tokens: Tensor, num_tokens: Tensor) -> None:
        """Count output of `reqs`: the first `num_tokens` [bs] of each row of `tokens` [bs, n]."""
        sampling = self.of(reqs)
        rows = sampling.penalised_rows
        if rows is not None:
            self.counts.add(sampling.slots[rows], tokens[rows], num_tokens[rows])

    def choose(
        self,
        sampling: BatchSampling,
        logits: Tensor,  # [bs * W, vocab]
        positions: Tensor,  # [bs, W]
        logit_bias: Tensor | None,  # [bs, vocab]
        tree: DraftTree | None = None,
        ancestor_mask: Tensor | None = None,
        apply_grammar: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """The target's own token after each node, [bs, W] int64, rank 0's on every rank."""
        tokens = choose_target_tokens(
            logits,
            sampling=sampling,
            positions=positions,
            tree=tree,
            ancestor_mask=ancestor_mask,
            counts=self.counts,
            logit_bias=logit_bias,
            apply_grammar=apply_grammar,
            sequential_top_k_top_p=self.like_flashinfer,
            ties="all" if self.like_flashinfer else "lowest_id",
        )
        return tokens if self.broadcast is None else self.broadcast(tokens)


def _same(requests: list[tuple[Any, int]], others: list[tuple[Any, int]]) -> bool:
    """Whether both lists have the same request objects in the same slots."""
    return len(requests) == len(others) and all(
        req is other and slot == other_slot
        for (req, slot), (other, other_slot) in zip(requests, others, strict=True)
    )


# One request of each kind of kernel: greedy, drawn, cut three ways, and penalised.
WARM_UP_REQUESTS = (
    RequestSampling(top_k=1),
    RequestSampling(slot=1),
    RequestSampling(top_k=5, top_p=0.9, slot=2),
    RequestSampling(min_p=0.1, slot=3),
    RequestSampling(
        frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.1, min_new_tokens=2,
        stop_tokens=(0,), slot=4,
    ),
)  # fmt: skip


def warm_up(state: SamplingState, num_verify_tokens: int) -> None:
    """Compile the kernels of sampling, which the first request that needs one would else wait for."""
    bs, vocab_size, device = len(WARM_UP_REQUESTS), state.counts.vocab_size, state.device
    sampling = BatchSampling.from_requests(WARM_UP_REQUESTS, device)
    for width in (1, num_verify_tokens):
        columns = torch.zeros(bs, width, dtype=torch.int64, device=device)
        tree = DraftTree(columns, columns - 1, columns, torch.zeros(bs, width, device=device))
        choose_target_tokens(
            torch.zeros(bs * width, vocab_size, device=device),
            sampling=sampling,
            positions=columns,
            tree=None if width == 1 else tree,
            ancestor_mask=torch.eye(width, dtype=torch.bool, device=device).repeat(bs, 1, 1),
            counts=TokenCounts(bs, vocab_size, device),
            logit_bias=None,
            apply_grammar=None,
            sequential_top_k_top_p=state.like_flashinfer,
            ties="all" if state.like_flashinfer else "lowest_id",
        )
