"""What a caller asks for and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from ddtree.config import Mode, SamplingParams, check, is_int, parse_budget, parse_mode
from ddtree.errors import ConfigError, short_repr
from ddtree.stats import GenerationStats, RoundObserver


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
    """

    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    mode: Mode = Mode.TREE
    node_budget: int | Literal["auto"] = "auto"
    observer: RoundObserver | None = None

    def __post_init__(self) -> None:
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


@dataclass(frozen=True, slots=True)
class Chunk:
    """Newly committed text and tokens; the last chunk carries the finish reason."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request. `tokens` includes the token that stopped it; `text` does not."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    stats: GenerationStats
