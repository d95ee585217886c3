"""What the choice of target tokens needs to know of a batch's requests, as tensors on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NO_TOP_K = 1 << 30  # SGLang's TOP_K_ALL: what it makes of top_k -1


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """One request's sampling parameters as SGLang normalises them: temperature 0 becomes 1, with top_k 1."""

    temperature: float = 1.0
    top_k: int = NO_TOP_K
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_tokens: tuple[int, ...] = ()  # what min_new_tokens forbids
    seed: int = 0
    slot: int = 0  # row of the request pool

    @property
    def is_greedy(self) -> bool:
        return self.top_k <= 1

    @property
    def is_filtered(self) -> bool:
        """Whether it draws from less than the whole vocabulary."""
        return not self.is_greedy and (self.top_k < NO_TOP_K or self.top_p < 1 or self.min_p > 0)

    @property
    def has_penalties(self) -> bool:
        """Whether its logits depend on how often it has put out a token."""
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)

    @property
    def has_min_new_tokens(self) -> bool:
        return self.min_new_tokens > 0 and any(token >= 0 for token in self.stop_tokens)

    @property
    def needs_counts(self) -> bool:
        """Whether `TokenCounts` must follow its output."""
        return self.has_penalties or self.has_min_new_tokens


class Rows(NamedTuple):
    """Some requests of a batch, in ascending order, known on both sides."""

    numbers: tuple[int, ...]
    indices: Tensor  # [n] int64


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """The requests with penalties."""

    rows: Rows
    host_slots: tuple[int, ...]
    slots: Tensor  # [n] int64
    frequency: Tensor  # [n] float32
    presence: Tensor  # [n] float32
    repetition: Tensor  # [n] float32
    has_repetition: bool


@dataclass(frozen=True, slots=True)
class MinNewTokensRows:
    """The requests with a least number of output tokens, and the tokens that would stop them earlier."""

    rows: Rows
    slots: Tensor  # [n] int64
    min_new_tokens: Tensor  # [n] int64
    stop_tokens: Tensor  # [n, S] int64, ascending; the first again where a request has fewer than S


@dataclass(frozen=True, slots=True)
class BatchSampling:
    """A batch's sampling parameters by request; made anew only when the batch's composition changes.

    Every request is in exactly one of `greedy`, `plain` (drawn from the whole vocabulary) and `filtered`.
    """

    greedy: Rows
    plain: Rows
    filtered: Rows
    temperatures: Tensor  # [bs] float32
    top_ks: Tensor  # [bs] int64, 1 or less for greedy
    top_ps: Tensor  # [bs] float32
    max_gaps: Tensor  # [bs] float32: how far below the best a (scaled) logit may be under min-p, -log(min_p)
    seeds: Tensor  # [bs] int64
    slots: Tensor  # [bs] int64
    filter_places: Tensor  # [bs] int64: place in `filtered`, -1 for none
    penalised_rows: Tensor | None  # [n] int64: requests whose output `TokenCounts` must follow, None without
    penalties: PenaltyRows | None
    min_new_tokens: MinNewTokensRows | None

    @property
    def batch_size(self) -> int:
        return self.temperatures.shape[0]

    @property
    def needs_counts(self) -> bool:
        """Whether the choice needs a `TokenCounts`."""
        return self.penalised_rows is not None

    @staticmethod
    def from_requests(requests: Sequence[RequestSampling], device: torch.device | str) -> BatchSampling:
        """The tensors of `requests` on `device`; copies come from pinned memory, so nothing waits."""
        device = torch.device(device)
        greedy, filtered = _where(requests, "is_greedy"), _where(requests, "is_filtered")
        plain = sorted({*range(len(requests))} - {*greedy, *filtered})
        places = {row: place for place, row in enumerate(filtered)}
        counted = _where(requests, "needs_counts")
        ints, floats = upload(
            [
                greedy,
                plain,
                filtered,
                [min(r.top_k, NO_TOP_K) for r in requests],
                [_signed(r.seed) for r in requests],
                [r.slot for r in requests],
                [places.get(row, -1) for row in range(len(requests))],
                counted,
            ],
            [
                [r.temperature for r in requests],
                [r.top_p for r in requests],
                [_max_gap(r.min_p) for r in requests],
            ],
            device,
        )
        return BatchSampling(
            greedy=Rows(tuple(greedy), ints[0]), plain=Rows(tuple(plain), ints[1]),
            filtered=Rows(tuple(filtered), ints[2]), temperatures=floats[0], top_ks=ints[3],
            top_ps=floats[1], max_gaps=floats[2], seeds=ints[4], slots=ints[5], filter_places=ints[6],
            penalised_rows=ints[7] if counted else None, penalties=_penalty_rows(requests, device),
            min_new_tokens=_min_new_tokens_rows(requests, device),
        )  # fmt: skip


def upload(
    ints: list[list[int]], floats: list[list[float]], device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Lists as int64 and float32 tensors on `device`: one copy of each type, without waiting for it."""
    return _upload(ints, torch.int64, device), _upload(floats, torch.float32, device)


def _upload(lists: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    if not lists:
        return []
    flat = torch.tensor(
        [value for values in lists for value in values], dtype=dtype, pin_memory=device.type == "cuda"
    )
    return list(flat.to(device, non_blocking=True).split([len(values) for values in lists]))


def _where(requests: Sequence[RequestSampling], name: str) -> list[int]:
    return [row for row, request in enumerate(requests) if getattr(request, name)]


def _signed(seed: int) -> int:
    """The low 64 bits of `seed` as an int64, which is what keyed noise reads."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _max_gap(min_p: float) -> float:
    return abs(math.log(min_p)) if min_p > 0 else math.inf


def _penalty_rows(requests: Sequence[RequestSampling], device: torch.device) -> PenaltyRows | None:
    numbers = _where(requests, "has_penalties")
    if not numbers:
        return None
    chosen = [requests[row] for row in numbers]
    slots = [r.slot for r in chosen]
    (indices, slot_rows), (frequency, presence, repetition) = upload(
        [numbers, slots],
        [
            [r.frequency_penalty for r in chosen],
            [r.presence_penalty for r in chosen],
            [r.repetition_penalty for r in chosen],
        ],
        device,
    )
    has_repetition = any(r.repetition_penalty != 1.0 for r in chosen)
    rows = Rows(tuple(numbers), indices)
    return PenaltyRows(rows, tuple(slots), slot_rows, frequency, presence, repetition, has_repetition)


def _min_new_tokens_rows(
    requests: Sequence[RequestSampling], device: torch.device
) -> MinNewTokensRows | None:
    numbers = _where(requests, "has_min_new_tokens")
    if not numbers:
        return None
    chosen = [requests[row] for row in numbers]
    stops = [sorted({token for token in r.stop_tokens if token >= 0}) for r in chosen]
    width = max(map(len, stops))
    padded = [token for tokens in stops for token in tokens + tokens[:1] * (width - len(tokens))]
    (indices, slots, min_new_tokens, stop_tokens), _ = upload(
        [numbers, [r.slot for r in chosen], [r.min_new_tokens for r in chosen], padded], [], device
    )
    rows = Rows(tuple(numbers), indices)
    return MinNewTokensRows(rows, slots, min_new_tokens, stop_tokens.view(-1, width))
