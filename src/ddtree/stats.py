"""What one round did and what one request did, for logs, traces and the budget policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ddtree.config import Mode

Stage = Literal["draft", "build", "verify", "accept", "commit"]
STAGES: tuple[Stage, ...] = ("draft", "build", "verify", "accept", "commit")


@dataclass(frozen=True, slots=True)
class RoundStats:
    """One round: draft, build, verify, accept, commit.

    `accept_tokens` are the committed tokens, the bonus token last; `accept_indices` the path's nodes,
    the root (0) first. `draft_tokens`, `parents` and `log_probs` describe the whole tree; they are
    filled only when an observer asks for trees, since reading them costs time. `stages_ms` are the
    milliseconds of each step, filled only when an observer asks for stages: on a CPU on the clock; on a CUDA
    device on its own clock, where such a round is one graph a step instead of one graph in all.
    """

    mode: Mode
    node_budget: int
    num_nodes: int
    prefix_len: int
    accept_tokens: tuple[int, ...]
    round_ms: float
    root_token: int = 0
    draft_tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    accept_indices: tuple[int, ...] = ()
    stages_ms: Mapping[Stage, float] | None = None

    @property
    def num_accept_tokens(self) -> int:
        """Tokens committed by the round, the bonus token included."""
        return len(self.accept_tokens)

    @property
    def num_correct_drafts(self) -> int:
        """Draft tokens that were right, the bonus token not included."""
        return len(self.accept_tokens) - 1


class RoundObserver(Protocol):
    """Is told about every round of a request, in order, after its commit.

    Attributes:
        wants_trees: whether the rounds' trees are read for it.
        wants_stages: whether the rounds' steps are timed for it.
    """

    wants_trees: bool
    wants_stages: bool

    def on_round(self, stats: RoundStats) -> None: ...


@dataclass(slots=True)
class GenerationStats:
    """Totals of one request; times in seconds, measured on the host."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    verify_ct: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    accept_histogram: Counter[int] = field(default_factory=Counter)

    @property
    def accept_length(self) -> float:
        """Mean tokens committed a round, the bonus token included (tau)."""
        rounds = sum(self.accept_histogram.values())
        return sum(k * n for k, n in self.accept_histogram.items()) / rounds if rounds else 0.0

    @property
    def tokens_per_s(self) -> float:
        """New tokens over decode time; the first token, which prefill makes, is not counted."""
        return (self.new_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0
