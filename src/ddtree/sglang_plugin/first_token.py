"""A request's first token, which SGLang draws at the end of the prefill, with the plugin's own choice.

Stock sampling has no seed of the request there, and a request that was retracted has lost its penalties.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.sampler import Sampler
from torch import Tensor

from ddtree.sglang_plugin.sampling_state import SamplingState


@dataclass(frozen=True, slots=True)
class _Prefill:
    """What the worker knows of the prefill whose tokens are drawn next."""

    reqs: list[Any]
    seq_lens: list[int]  # tokens of each request, with those of this prefill
    logit_bias: Tensor | None  # [bs, vocab]


class FirstTokenSampler(Sampler):
    """SGLang's sampler, choosing as a verify pass does; the worker calls `stage` before each prefill."""

    def __init__(self, state: SamplingState) -> None:
        super().__init__()
        self.state = state
        self._prefill: _Prefill | None = None

    def stage(self, batch: Any) -> None:
        """Take over penalties and bias of `batch`, whose sampling info is this forward's own copy.

        Stock code would apply penalties that know nothing of a retracted request's output, before the sampler
        is called; the bias follows after them.
        """
        info = batch.sampling_info
        seq_lens = [prefix + new for prefix, new in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
        self._prefill = _Prefill(list(batch.reqs), seq_lens, info.logit_bias)
        if info.logit_bias is not None and info.logit_bias.is_cuda:
            # The scheduler keeps this copy of the info alive for the forward, but no longer the bias in it.
            info.logit_bias.record_stream(torch.cuda.current_stream())
        info.logit_bias = info.acc_additive_penalties = info.acc_scaling_penalties = None

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: Any,
        token_ids_logprobs: Any,
        positions: Tensor,  # [bs] of the prompts' last tokens
        **kwargs: Any,
    ) -> Tensor:
        """The first tokens [bs] int64; arguments as of SGLang's `Sampler.forward`."""
        prefill, self._prefill = self._prefill, None
        if prefill is None:
            raise RuntimeError("DDTREE: tokens of a prefill are drawn that the worker did not announce")
        logits = logits_output.next_token_logits  # [bs, vocab]
        tokens = self.state.first_tokens(
            prefill.reqs, prefill.seq_lens, logits, positions, prefill.logit_bias
        )
        if return_logprob:
            log_probs = _log_probs(logits, sampling_info).gather(1, tokens.view(-1, 1)).view(-1)
            # Stock code fills in all but the drawn token's; the token that it draws itself is not used.
            super().forward(
                logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs,
                positions, **kwargs,
            )  # fmt: skip
            logits_output.next_token_logprobs = log_probs
        return tokens


def _log_probs(logits: Tensor, sampling_info: Any) -> Tensor:
    """The log-probabilities that SGLang reports, [bs, vocab]."""
    if not (sampling_info.is_all_greedy or envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get()):
        logits = logits / sampling_info.temperatures
    return torch.log_softmax(logits, dim=-1)
