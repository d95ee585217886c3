"""What a caller asks for and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from ddtree.config import Mode, SamplingParams, check, is_int, parse_budget, parse_mode
from ddtree.errors import ConfigError, short_repr
from ddtree.stats import GenerationStats, RoundObserver

MAX_TOP_LOGPROBS = 20


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
        prompt_tokens: at least one token id.
        sampling: how tokens are chosen and when to stop.
        mode: ar, chain or tree.
        node_budget: nodes of the tree, root not counted, or "auto" (tree mode only): the engine
            then picks width, chain or plain decoding each round.
        observer: is told about every round.
        top_logprobs: None for no log-probabilities; from 0 to 20 for the log-probability of every new
            token and of so many of the most likely tokens at its position.
    """

    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    mode: Mode = Mode.TREE
    node_budget: int | Literal["auto"] = "auto"
    observer: RoundObserver | None = None
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        check_top_logprobs(self.top_logprobs)
        parse_mode(self.mode)
        check(
            self.node_budget == "auto" or is_int(self.node_budget),
            "node_budget", self.node_budget, "a whole number or auto",
        )  # fmt: skip
        parse_budget(self.node_budget)
        if not (isinstance(self.prompt_tokens, tuple | list) and all(map(is_int, self.prompt_tokens))):
            raise ConfigError(
                f"prompt_tokens={short_repr(self.prompt_tokens)} is not allowed: a tuple of token ids; "
                "encode a text with Engine.encode"
            )
        if not self.prompt_tokens:
            raise ConfigError("prompt=[] is not allowed: at least one token; give a prompt that is not empty")


def check_top_logprobs(value: int | None, name: str = "top_logprobs") -> None:
    """Raise `ConfigError` unless `Request` allows the value; `name` is what the caller calls it."""
    check(
        value is None or (is_int(value) and 0 <= value <= MAX_TOP_LOGPROBS),
        name, value, f"a whole number from 0 to {MAX_TOP_LOGPROBS}", "leave it out for no log-probabilities",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the target held a token that it chose.

    Log-probabilities are natural logarithms, in float32, of the target's own distribution: the softmax
    of its raw logits, before bias, penalties and temperature.

    Attributes:
        token: the chosen token.
        log_prob: its log-probability; the very number that `top` has for it, where it is there.
        top: the most likely tokens at this position with their log-probabilities, ordered by
            (log-probability descending, token id ascending).
    """

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Newly committed text and tokens; the last chunk carries the finish reason.

    `logprobs` has one entry a token where the request asked for them, and none elsewhere.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request. `tokens` includes the token that stopped it; `text` does not.

    `logprobs` has one entry a token where the request asked for them, and none elsewhere.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: GenerationStats
    logprobs: tuple[TokenLogprobs, ...] = ()
