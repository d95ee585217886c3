"""The bodies of chat and completion requests, as far as a server takes what they ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ddtree.bench.http_client import RequestRefusedError
from ddtree.bench.measure import Chat
from ddtree.bench.run_format import Arm
from ddtree.bench.server_facts import ServerFacts, ServerKind
from ddtree.config import GREEDY_BELOW, Mode

Result = TypeVar("Result")

# A server fills in what a request leaves out from the model's generation_config.json.
PLAIN_SAMPLING = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
EXTRAS: Mapping[ServerKind, Mapping[str, Any]] = {
    ServerKind.DDTREE: {},
    ServerKind.SGLANG: {
        **PLAIN_SAMPLING,
        "return_spec_tokens_details": True,
        "return_input_ids_in_sglext": True,
        "return_output_ids_in_sglext": True,
    },
    ServerKind.VLLM: PLAIN_SAMPLING,
    ServerKind.OTHER: {},
}
EXACT_CHUNKS = (ServerKind.SGLANG, ServerKind.VLLM)  # tell the tokens so far with each chunk, if asked


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a server wants to be asked.

    Attributes:
        limit_name: field with the most new tokens.
        has_seed: whether it takes a seed.
        stream_options: what each request has there; nothing for a server that does not take it.
        extras: further fields of each request.
    """

    model: str
    limit_name: str = "max_tokens"
    has_seed: bool = True
    stream_options: Mapping[str, bool] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)

    def body(self, chat: Chat, max_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
        """The body of a streamed request."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [dict(message) for message in chat],
            self.limit_name: max_tokens,
            "temperature": 0.0 if temperature < GREEDY_BELOW else temperature,
            "stream": True,
            **self.extras,
        }
        if temperature >= GREEDY_BELOW:
            body["top_p"] = 1.0
            if self.has_seed:
                body["seed"] = seed
        if self.stream_options:
            body["stream_options"] = dict(self.stream_options)
        return body


def dialect_of(facts: ServerFacts, arm: Arm) -> Dialect:
    """What is known of a server before it was asked anything."""
    options = {"include_usage": True}
    if facts.kind in EXACT_CHUNKS:
        options["continuous_usage_stats"] = True
    extras = dict(EXTRAS[facts.kind])
    if arm.mode is not None:
        extras["ddtree"] = {"mode": arm.mode.value} | (
            {"budget": arm.node_budget} if arm.mode is Mode.TREE else {}
        )
    return Dialect(facts.model, stream_options=options, extras=extras)


def settle(dialect: Dialect, ask: Callable[[Dialect], Result]) -> tuple[Dialect, Result]:
    """Ask until the server refuses nothing that can be left out: its dialect and the answer.

    Raises:
        RequestRefusedError: it refuses something else.
    """
    while True:
        try:
            return dialect, ask(dialect)
        except RequestRefusedError as error:
            simpler = simpler_dialect(dialect, str(error))
            if simpler is None:
                raise
            dialect = simpler


def simpler_dialect(dialect: Dialect, refusal: str) -> Dialect | None:
    """The dialect without what a refusal names; None where it names nothing that can be left out."""
    if "stream_options" in refusal or "include_usage" in refusal or "continuous_usage_stats" in refusal:
        if "continuous_usage_stats" in dialect.stream_options:
            return replace(dialect, stream_options={"include_usage": True})
        if dialect.stream_options:
            return replace(dialect, stream_options={})
    if "max_completion_tokens" in refusal and dialect.limit_name == "max_tokens":
        return replace(dialect, limit_name="max_completion_tokens")
    if "seed" in refusal and dialect.has_seed:
        return replace(dialect, has_seed=False)
    unknown = [name for name in dialect.extras if name in refusal and name != "ddtree"]
    if unknown:
        return replace(dialect, extras={n: v for n, v in dialect.extras.items() if n not in unknown})
    return None
