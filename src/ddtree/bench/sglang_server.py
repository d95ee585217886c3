"""Stock SGLang as an arm of a run: a server that is started, asked over its own API, and stopped."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddtree.bench.chat_answer import sglang_rounds
from ddtree.bench.chat_tokens import ChatTokens, load_tokenizer
from ddtree.bench.http_client import REFUSED, HttpClient, Received, RequestRefusedError, ServerError
from ddtree.bench.measure import Answer, Chat, Observed
from ddtree.bench.openai_engine import flush_sglang
from ddtree.bench.run_format import Arm
from ddtree.bench.server_facts import sglang_facts
from ddtree.bench.server_process import ServerProcess, free_port
from ddtree.bench.sglang_launch import HOST, Launch, gpu_memory, launch_of, least_free, taken_bytes
from ddtree.bench.stream_events import stream_events
from ddtree.bench_config import BenchConfig
from ddtree.config import GREEDY_BELOW, Mode
from ddtree.errors import short_repr
from ddtree.models import resolve_drafter, resolve_target

GRACE_S = 30.0  # for a server to end by itself; SGLang gives its schedulers half of that
READY_PATH = "/health_generate"  # 200 once a token was made
# As the engine decodes by itself: without what a generation_config.json may set.
PLAIN_SAMPLING = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class SGLangEngine:
    """An SGLang server of this run.

    Args:
        arm: with a mode.
        process: the server; stopped with the engine.
        client: to it.
        chat_tokens: makes token ids of chats.
        started: what is known of its start, for `info`.
    """

    def __init__(
        self,
        arm: Arm,
        process: ServerProcess,
        client: HttpClient,
        chat_tokens: ChatTokens,
        started: Mapping[str, Any],
    ) -> None:
        self._arm, self._process, self._client, self._chat_tokens = arm, process, client, chat_tokens
        self._started = started

    def info(self) -> Mapping[str, Any]:
        """How it was started, and what it says of itself."""
        facts = sglang_facts(self._client, "")
        said = {} if facts is None else {"version": facts.version, **facts.details}
        return {
            "server": "sglang",
            **said,
            **self._started,
            "peak_memory": "taken from all its GPUs together by the time the server was ready"
            if self._started["device_bytes"]
            else "resident in the server's processes since their start",
        }

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
            ServerError: a request failed, or the server died.
            ConfigError: the server refuses a request.
        """
        chats = [self._chat_tokens(prompt) for prompt in prompts]
        bodies = [
            generate_body(tokens, max_tokens, temperature, seed)
            for tokens, seed in zip(chats, seeds, strict=True)
        ]
        try:
            wall_s, received = self._client.post_all("/generate", bodies, concurrency)
            answers = [
                read_generated(answer, chat, is_plain=self._arm.mode is Mode.AR)
                for answer, chat in zip(received, chats, strict=True)
            ]
        except ServerError as error:
            raise self._process.death() or error from error
        return wall_s, answers

    def observe(
        self, prompts: Sequence[Chat], *, max_tokens: int, temperature: float, seeds: Sequence[int]
    ) -> Observed | None:
        """None: ranks and stages are in the plugin's trace, which costs time."""
        return None

    def peak_memory_bytes(self) -> int | None:
        """What it took from its GPUs when it was ready, where it has any; else its processes' own peaks."""
        taken: int | None = self._started["device_bytes"]
        return taken or self._process.peak_memory_bytes()

    def flush(self) -> None:
        """Empty the prefix cache.

        Raises:
            ServerError: the server died.
        """
        try:
            flush_sglang(self._client)
        except ServerError as error:
            raise self._process.death() or error from error

    def close(self) -> None:
        """Stop the server."""
        try:
            self._client.close()
        finally:
            self._process.stop()


def generate_body(tokens: Sequence[int], max_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
    """The body of a request to /generate."""
    sampling: dict[str, Any] = {"max_new_tokens": max_tokens, "temperature": 0.0, **PLAIN_SAMPLING}
    if temperature >= GREEDY_BELOW:
        sampling |= {"temperature": temperature, "sampling_seed": seed}
    return {"input_ids": list(tokens), "sampling_params": sampling, "stream": True}


def read_generated(received: Received, prompt: tuple[int, ...], *, is_plain: bool) -> Answer:
    """The answer to a streamed /generate request.

    Chunks have all tokens so far, or with `--incremental-streaming-output` the new ones.

    Raises:
        RequestRefusedError: SGLang refuses what it asks, such as more tokens than the context has.
        ServerError: it broke off, was aborted, or cannot be read.
    """
    tokens: list[int] = []
    texts: list[str] = []
    chunk_times: list[tuple[float, int]] = []
    meta: Mapping[str, Any] = {}
    for event in stream_events(received) if received.is_stream else []:
        meta, ids, text = _parts(event.value)
        before = len(tokens)
        is_whole = len(ids) == meta.get("completion_tokens")
        tokens, texts = (ids, [text]) if is_whole else ([*tokens, *ids], [*texts, text])
        if len(tokens) > before:
            chunk_times.append((event.time_s, len(tokens) - before))
    finish = meta.get("finish_reason")
    if not isinstance(finish, dict) or len(tokens) != meta.get("completion_tokens"):
        raise ServerError(f"the answer broke off after {len(tokens)} tokens: {_end_of(received)}")
    if finish.get("type") == "abort":
        kind = RequestRefusedError if finish.get("status_code") in REFUSED else ServerError
        raise kind(f"SGLang aborted a request: {short_repr(finish.get('message', finish))}")
    rounds, histogram = sglang_rounds(meta)
    return Answer(
        tokens=tuple(tokens),
        text="".join(texts),
        prompt_tokens=len(prompt),
        new_tokens=len(tokens),
        finish_reason=str(finish.get("type")),
        begin_s=received.begin_s,
        first_s=chunk_times[0][0] if chunk_times else received.end_s,
        end_s=received.end_s,
        chunk_times=tuple(chunk_times),
        rounds=rounds,
        accept_histogram=None if is_plain else histogram,
        prompt=prompt,
    )


def _parts(value: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[int], str]:
    meta, ids, text = value.get("meta_info"), value.get("output_ids"), value.get("text", "")
    if not isinstance(meta, dict) or not isinstance(ids, list) or not isinstance(text, str):
        raise ServerError(f"SGLang's answer has a chunk that cannot be read: {short_repr(value)}")
    return meta, ids, text


def _end_of(received: Received) -> str:
    return short_repr(received.body[-160:].decode("utf-8", "replace"))


def start_engine(arm: Arm, config: BenchConfig, log_folder: Path) -> SGLangEngine:
    """Start the server of an arm and wait until it is ready; it is stopped again where that fails.

    Args:
        arm: of the engine `sglang`, with a mode.
        config: of the run.
        log_folder: where its log goes, `sglang-tree-64.log`; of several starts one after the other.

    Raises:
        ConfigError: a setting that SGLang does not take.
        ModelError: a model cannot be found.
        ServerError: the server ended or was not ready in time.
    """
    target = resolve_target(config.model)
    drafter = None if arm.mode is Mode.AR else resolve_drafter(config.drafter, config.model)
    chat_tokens = ChatTokens(load_tokenizer(config.model))
    port, memory = free_port(), gpu_memory(config)
    launch = launch_of(arm, config, target, drafter, port, least_free(memory))
    log = log_folder / f"sglang-{arm.plan.replace(':', '-')}.log"
    begin_s = time.perf_counter()
    process = ServerProcess(str(arm), launch.command, launch.environment, log, GRACE_S)
    client = HttpClient(f"http://{HOST}:{port}", limit_s=config.request_timeout_s)
    try:
        process.wait_until_ready(client, READY_PATH, config.start_timeout_s)
        taken = taken_bytes(memory, gpu_memory(config))
        started = _started(launch, log, time.perf_counter() - begin_s, taken)
        return SGLangEngine(arm, process, client, chat_tokens, started)
    except BaseException:  # Ctrl-C too
        client.close()
        process.stop()
        raise


def _started(launch: Launch, log: Path, start_s: float, device_bytes: int | None) -> dict[str, Any]:
    config = launch.environment.get("DDTREE_CONFIG")
    return {
        "command": shlex.join(launch.command),
        "ddtree_config": None if config is None else json.loads(config),
        "log": str(log),
        "start_s": round(start_s, 1),
        "device_bytes": device_bytes,
    }
