"""The one transfer a round from the device: what was committed, and what the budget policy learns from."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.engine.decode_round import Round
from ddtree.engine.logprobs import unpack_logprobs
from ddtree.engine.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Readout:
    """A round on the host.

    `surrogate` holds, for each budget asked for, the drafter's own forecast of correct drafts; it is
    empty without budgets, as are `top1_tokens` in plain decoding and `logprobs` where not asked for.
    """

    accept_tokens: tuple[int, ...]
    accept_indices: tuple[int, ...]
    num_nodes: int
    top1_tokens: tuple[int, ...]
    surrogate: tuple[float, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


def pack(finished: Round, budgets: Items[int]) -> Tensor:
    """A round as one int64 vector on its device, to be read with `unpack`; budgets are in rising order."""
    built, result, logprobs = finished
    tree = built.tree
    parts = [result.num_correct_drafts, tree.num_nodes, result.accept_tokens[0], result.accept_indices[0]]
    if built.top1_tokens is not None:
        parts.append(built.top1_tokens)
        if budgets:
            forecast = tree.log_probs[0, 1:].exp().cumsum(0)  # [B]
            last = forecast.shape[0] - 1
            at_budgets = torch.stack([forecast[min(budget - 1, last)] for budget in budgets])
            parts.append(at_budgets.view(torch.int32).to(torch.int64))
    if logprobs is not None:
        parts.append(logprobs.flatten())
    return torch.cat(parts)


def unpack(
    vector: Tensor, block_size: int, *, has_draft: bool, logprobs_shape: tuple[int, int] = (0, 0)
) -> Readout:
    """Read a packed round; this waits for the device. `logprobs_shape` is the round's own."""
    values: list[int] = vector.tolist()  # the one wanted sync of a round
    rows, columns = logprobs_shape
    logprobs_start = len(values) - rows * columns
    values, said = values[:logprobs_start], values[logprobs_start:]
    num_accept_tokens, num_nodes = values[0] + 1, values[1]
    tokens, indices = values[2 : 2 + block_size], values[2 + block_size : 2 + 2 * block_size]
    rest = values[2 + 2 * block_size :]
    top1, forecast = (rest[: block_size - 1], rest[block_size - 1 :]) if has_draft else ([], [])
    surrogate: list[float] = torch.tensor(forecast, dtype=torch.int32).view(torch.float32).tolist()
    accept_tokens = tuple(tokens[:num_accept_tokens])
    return Readout(
        accept_tokens=accept_tokens,
        accept_indices=tuple(indices[:num_accept_tokens]),
        num_nodes=num_nodes,
        top1_tokens=tuple(top1),
        surrogate=tuple(surrogate),
        logprobs=unpack_logprobs(said, columns, accept_tokens) if rows else (),
    )
