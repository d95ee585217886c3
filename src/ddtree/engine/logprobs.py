"""How likely the target held the tokens it chose, and what else it could have said.

Log-probabilities are of the target's own distribution: the softmax of its raw logits, before bias,
penalties and temperature. They cross to the host as integers, inside the round's one transfer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddtree.engine.request import MAX_TOP_LOGPROBS, TokenLogprobs
from ddtree.tree.marginals import DraftMarginals
from ddtree.tree.verify import VerifyResult


def path_logprobs(logits: Tensor, result: VerifyResult, top_logprobs: int | None) -> Tensor | None:
    """`pack_logprobs` of the tokens that a round commits, each at the node after which it was chosen.

    Args:
        logits: [W, vocab] raw target logits of the tree's nodes.
        result: the accept walk of one request.
        top_logprobs: alternatives wanted, or None for no log-probabilities.

    Returns: [rows, 1 + 2 * top] int64, where rows past the path hold nothing of use; or None.
    """
    if top_logprobs is None:
        return None
    columns, tokens = result.accept_indices[0], result.accept_tokens[0]  # [block_size], -1 past the path
    if columns.is_cpu:  # there looking costs nothing, while a row past the path costs as much as one on it
        num_accept_tokens = int(result.num_correct_drafts) + 1
        columns, tokens = columns[:num_accept_tokens], tokens[:num_accept_tokens]
    return pack_logprobs(logits[columns.clamp(min=0)], tokens.clamp(min=0), top_logprobs)


def pack_logprobs(logits: Tensor, tokens: Tensor, top_logprobs: int) -> Tensor:
    """Log-probabilities as integers, to be read with `unpack_logprobs`; no host sync.

    Args:
        logits: [n, vocab] raw target logits.
        tokens: [n] int64, the token chosen after each row.
        top_logprobs: alternatives wanted, at most `MAX_TOP_LOGPROBS`; a smaller vocabulary gives fewer.

    Returns: [n, 1 + 2 * top] int64: the bits of the chosen token's log-probability, the best tokens,
    the bits of theirs.
    """
    # One number of candidates for all requests, as kernels are compiled for it; what applies to draft
    # positions (normalised over the vocabulary, ties by id, at the cut too) is what is wanted here.
    best = DraftMarginals.from_logits(logits[None], MAX_TOP_LOGPROBS)
    # The best log-probability is minus the row's log-sum, so this rounds as the best tokens' do.
    behind = logits.gather(1, tokens[:, None]).float() - logits.amax(1, keepdim=True).float()  # [n, 1]
    chosen = behind + best.log_probs[0, :, :1]
    parts = (_bits(chosen), best.tokens[0, :, :top_logprobs], _bits(best.log_probs[0, :, :top_logprobs]))
    return torch.cat(parts, 1)


def unpack_logprobs(values: Sequence[int], columns: int, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    """Read packed rows of `columns` values each, one for each of `tokens`; further rows are left out."""
    top = (columns - 1) // 2
    # Read as numbers all at once; the tokens among them give junk that nobody looks at.
    numbers: list[float] = torch.tensor(values, dtype=torch.int32).view(torch.float32).tolist()

    def entry(token: int, start: int) -> TokenLogprobs:
        best = slice(start + 1, start + 1 + top)
        likely = zip(values[best], numbers[best.stop : best.stop + top], strict=True)
        return TokenLogprobs(token, numbers[start], tuple(likely))

    return tuple(entry(token, i * columns) for i, token in enumerate(tokens))


def _bits(log_probs: Tensor) -> Tensor:
    """The bits of float32 values as int64."""
    return log_probs.contiguous().view(torch.int32).to(torch.int64)
