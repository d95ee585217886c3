"""A running OpenAI-compatible server as an arm of a run: `ddtree serve`, SGLang, vLLM and others."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from ddtree.bench.chat_answer import CountTokens, read_answer
from ddtree.bench.chat_request import Dialect, dialect_of, settle
from ddtree.bench.http_client import HttpClient, Received
from ddtree.bench.measure import Answer, Chat, Observed
from ddtree.bench.plan import arms_of_modes
from ddtree.bench.run_format import Arm
from ddtree.bench.server_facts import Address, ServerFacts, ServerKind, address_of, find_facts
from ddtree.bench_config import BenchConfig
from ddtree.config import Mode
from ddtree.errors import ConfigError

logger = logging.getLogger(__name__)

PROBE: Chat = ({"role": "user", "content": "Say hello."},)
PROBE_TOKENS = 8
FLUSH_LIMIT_S, FLUSH_WAIT_S = 10.0, 0.05


class OpenAIEngine:
    """A server that runs already, asked over its chat completions API.

    Args:
        arm: with a mode only for a `ddtree serve`, which is told it with each request.
        client: to the server; closed with the engine.
        address: where the API is below the client's root.
        facts: what the server says of itself.
        count_tokens: for a server that does not count the tokens it makes.

    Raises:
        ServerError: the server does not answer a short request as it should.
        ConfigError: it refuses one.
    """

    def __init__(
        self,
        arm: Arm,
        client: HttpClient,
        address: Address,
        facts: ServerFacts,
        count_tokens: CountTokens | None = None,
    ) -> None:
        self._client, self._facts, self._count_tokens = client, facts, count_tokens
        self._path = f"{address.api}/chat/completions"
        self._dialect, (self._probe, self._is_counted) = settle(dialect_of(facts, arm), self._ask_briefly)

    def _ask_briefly(self, dialect: Dialect) -> tuple[Answer, bool]:
        """The answer to a short request, and whether the server counted its tokens."""
        body = dialect.body(PROBE, PROBE_TOKENS, 1.0, 1)
        _, [received] = self._client.post_all(self._path, [body], 1)
        answer = self._read(received)
        return answer, b'"completion_tokens"' in received.body

    def info(self) -> Mapping[str, Any]:
        """What the server says of itself, and how its answers are counted and asked for."""
        return {
            **self._facts.as_info(),
            "is_streamed": self._probe.first_s is not None,
            "token_counts": self._token_counts(),
            "has_seed": self._dialect.has_seed,
            "request_fields": {"stream_options": self._dialect.stream_options, **self._dialect.extras},
        }

    def _token_counts(self) -> str:
        if self._is_counted:
            return "by the server"
        return "by the tokenizer, of the text" if self._count_tokens else "estimated: one a chunk"

    def run(
        self,
        prompts: Sequence[Chat],
        *,
        max_tokens: int,
        temperature: float,
        seeds: Sequence[int],
        concurrency: int,
    ) -> tuple[float, list[Answer]]:
        """Answer all prompts, `concurrency` at a time.

        Raises:
            ServerError: a request failed.
            ConfigError: the server refuses a request.
        """
        bodies = [
            self._dialect.body(prompt, max_tokens, temperature, seed)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        wall_s, received = self._client.post_all(self._path, bodies, concurrency)
        return wall_s, [self._read(answer) for answer in received]

    def _read(self, received: Received) -> Answer:
        return read_answer(received, self._count_tokens)

    def observe(
        self, prompts: Sequence[Chat], *, max_tokens: int, temperature: float, seeds: Sequence[int]
    ) -> Observed | None:
        """None: a server does not show its trees."""
        return None

    def peak_memory_bytes(self) -> int | None:
        """None: the server may run elsewhere."""
        return None

    def flush(self) -> None:
        """Empty the prefix cache of an SGLang server; others have no way to ask for it."""
        if self._facts.kind is ServerKind.SGLANG:
            flush_sglang(self._client)

    def close(self) -> None:
        """Hang up; the server runs on."""
        self._client.close()


def flush_sglang(client: HttpClient, clock: Callable[[], float] = time.monotonic) -> None:
    """Empty the prefix cache; the scheduler is done with the last request a moment after its answer.

    A server that others use may not become idle: that is logged, and prompts may then be cached.

    Raises:
        ServerError: the server cannot be reached.
    """
    end_s = clock() + FLUSH_LIMIT_S
    while (status := client.status("POST", "/flush_cache")) != 200:
        if clock() > end_s or status in (401, 403, 404):
            logger.warning("%s: the prefix cache was not emptied (status %d)", client.root, status)
            return
        time.sleep(FLUSH_WAIT_S)


def open_engine(arm: Arm, config: BenchConfig) -> OpenAIEngine:
    """The engine of a server that runs already.

    Raises:
        ServerError: it cannot be reached or does not answer as it should.
        ConfigError: it refuses what it is asked.
    """
    address = address_of(arm.engine)
    client = _client(address, config)
    try:
        facts = find_facts(client, address)
        return OpenAIEngine(arm, client, address, facts, _counter(facts, config))
    except BaseException:
        client.close()
        raise


def arms_of(url: str, config: BenchConfig) -> list[Arm]:
    """The arms of a server that runs already: itself as it is, or a `ddtree serve` in the run's modes.

    Raises:
        ServerError: it cannot be reached.
        ConfigError: it is a `ddtree serve` without a drafter, and the modes need one.
    """
    facts = _facts(url, config)
    if facts.kind is not ServerKind.DDTREE:
        return [Arm(url, None)]
    arms = arms_of_modes(url, config)
    if facts.has_drafter:
        return arms
    plain = [arm for arm in arms if arm.mode is Mode.AR]
    if not plain:
        raise ConfigError(
            f"modes={','.join(config.modes)} is not allowed for {url}: its server has no drafter; "
            "ask for ar, or start it with one"
        )
    return plain


def served_model(url: str, config: BenchConfig) -> str:
    """Name of the model that a server gives.

    Raises:
        ServerError: it cannot be reached.
    """
    return _facts(url, config).model


def _facts(url: str, config: BenchConfig) -> ServerFacts:
    address = address_of(url)
    with closing(_client(address, config)) as client:
        return find_facts(client, address)


def _client(address: Address, config: BenchConfig) -> HttpClient:
    key = None
    if config.api_key_env:
        key = os.environ.get(config.api_key_env, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise ConfigError(
                f"the environment variable {config.api_key_env!r} of --api-key-env holds no API key: "
                "set it to printable ASCII characters"
            )
    return HttpClient(address.root, api_key=key, limit_s=config.request_timeout_s)


def _counter(facts: ServerFacts, config: BenchConfig) -> CountTokens | None:
    """Counts a text's tokens where the server's model is the run's; loaded when it is first needed."""
    if facts.model != config.model:
        return None
    loaded: list[Any] = []

    def count(text: str) -> int:
        if not loaded:
            from ddtree.bench.chat_tokens import load_tokenizer

            loaded.append(load_tokenizer(config.model))
        return len(loaded[0].encode(text, add_special_tokens=False))

    return count
