"""Finished outputs of any engine: what was asked for, what was emitted, and how it was chosen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from ddtree.config import GREEDY_BELOW, SamplingParams
from ddtree.errors import ConfigError, short_repr

Order = Literal["embedded", "sglang"]
"""Whose order of processing steps made a token: the embedded engine's or SGLang's plain decoding's."""

ORDERS: tuple[Order, ...] = ("embedded", "sglang")
SGLANG_GREEDY_BELOW = 1e-6
SGLANG_ALL = 1 << 30  # its top_k for all tokens
ANY_JSON = "$$ANY$$"  # its JSON schema for any JSON at all
# SGLang's names of fields.
OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "sampling_seed": "seed",
    "stop_regex": "stop",
    "stop_regex_strs": "stop",
    "stop_strs": "stop",
}
# Whose ranges are those of a request to the embedded engine, which hold SGLang's.
RANGED = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
# Of SGLang's sampling parameters: they change neither a token nor which one is the last.
WITHOUT_EFFECT = frozenset(
    {"n", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens", "stream_interval"}
)


class Grammar(NamedTuple):
    """What an output was constrained by."""

    kind: Literal["regex", "json_schema", "ebnf"]
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of an output were chosen and what ends it, in one set of names for all engines.

    Defaults are SGLang's, where a parameter that is not sent has one.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0 is all
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Sampling:
        """Read sampling parameters under our names or SGLang's.

        Raises:
            ConfigError: a value of a wrong kind or out of its range, or a parameter that may change tokens in
                an unknown way.
        """
        known = {spec.name for spec in fields(cls)}
        read: dict[str, Any] = {}
        for given, value in parameters.items():
            name = OTHER_NAMES.get(given, given)
            if name in known:
                if value is not None:
                    new = _read(given, name, value)
                    read[name] = (*read.get(name, ()), *new) if name == "stop" else new
            elif given not in WITHOUT_EFFECT and value not in (None, [], {}, "", False):
                raise ConfigError(
                    f"sampling has {given}={short_repr(value)}, which may change tokens in a way that is not "
                    f"known here: leave such outputs out; known are {', '.join(sorted(known))}"
                )
        try:
            SamplingParams(**{name: read[name] for name in RANGED if name in read})
        except ConfigError as error:
            raise ConfigError(f"sampling: {error}") from None
        return cls(**read)

    def is_greedy(self, order: Order) -> bool:
        """Whether the most likely token was taken, whatever the seed."""
        below = GREEDY_BELOW if order == "embedded" else SGLANG_GREEDY_BELOW
        return self.temperature < below or self.top_k == 1

    def normal(self, order: Order) -> Sampling:
        """The same with what makes no difference to a greedy choice at its default, for comparisons."""
        if not self.is_greedy(order):
            return self
        return replace(self, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=None)

    @property
    def grammar(self) -> Grammar | None:
        """What constrains the output, None without; of several SGLang takes the first of these."""
        if self.json_schema is not None:
            return Grammar("json_schema", self.json_schema)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        return None if self.ebnf is None else Grammar("ebnf", self.ebnf)

    @property
    def counts_tokens(self) -> bool:
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def changes_logits(self) -> bool:
        """Whether the greedy choice can be another one than the raw logits' largest."""
        return self.counts_tokens or bool(self.logit_bias or self.grammar or self.min_new_tokens)

    @property
    def depends_on_order(self) -> bool:
        """Whether the two orders of processing steps may choose different tokens."""
        cuts_twice = self.top_k > 0 and self.top_p < 1
        penalises = self.repetition_penalty != 1 or (self.counts_tokens and bool(self.logit_bias))
        return cuts_twice or penalises or self.min_new_tokens > 0

    @property
    def scale(self) -> float:
        """By how much penalties can stretch an error of a logit."""
        return max(self.repetition_penalty, 1 / self.repetition_penalty)


def _read(given: str, name: str, value: Any) -> Any:
    """One value in the type of its field."""
    try:
        if name in ("top_k", "min_new_tokens", "seed", "max_tokens"):
            whole = int(value)
            if name == "seed" and not -(2**63) <= whole < 2**63:
                raise ValueError
            return (whole if 0 < whole < SGLANG_ALL else 0) if name == "top_k" else whole
        if name == "logit_bias":
            return {int(token): float(bias) for token, bias in value.items()}
        if name == "stop":
            return (value,) if isinstance(value, str) else tuple(map(str, value))
        if name == "stop_token_ids":
            return tuple(map(int, value))
        if name in ("regex", "json_schema", "ebnf"):
            # SGLang takes a text; an outputs file may have the schema itself.
            return json.dumps(value) if isinstance(value, dict) else str(value)
        if name == "ignore_eos":
            return bool(value)
        return float(value)
    except (AttributeError, OverflowError, TypeError, ValueError):
        raise ConfigError(f"sampling has {given}={short_repr(value)}, which is no value of it") from None


@dataclass(frozen=True, slots=True)
class Output:
    """A finished request.

    Attributes:
        prompt, tokens: token ids; `tokens` are the emitted ones, that which ended the text included.
        sampling: sampling parameters under our names or SGLang's.
        name: what reports call it.
        finish: why it ended, as SGLang says it: "type" is stop, length, abort or cancel, "matched" the end
            token or stop string where it is known; None where nothing is known.
        order: whose processing steps chose the tokens.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    sampling: Mapping[str, Any]
    name: str = ""
    finish: Mapping[str, Any] | None = None
    order: Order = "sglang"

    def read_sampling(self) -> Sampling:
        """The sampling parameters under our names."""
        return Sampling.of(self.sampling)
