"""A served engine for tests: tiny models, a tokenizer of bytes, ways to hold, break and ask it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ddtree.config import EngineConfig, Mode, SamplingParams, ServerConfig
from ddtree.engine.engine import Engine
from ddtree.engine.request import Generation, Request
from ddtree.engine.stream import TokenStream
from ddtree.server.app import create_app
from ddtree.server.listen import DrainingServer, bind, uvicorn_config
from ddtree.server.service import Service
from engine_kit import BLOCK_SIZE, CPU, tiny_target
from tiny_models import load_tiny_drafter, tiny_llama, write_tiny_drafter

SPECIAL = ("<pad>", "<s>", "</s>", "<mask>")
VOCAB_SIZE = 260
MAX_CONTEXT = 512
MODEL = "tiny"
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "<s>{{ m['role'] }}{% if m['name'] %}({{ m['name'] }}){% endif %}:{{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte after four special ones, so that most characters of other scripts take several."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Checkpoints of a tiny target with its tokenizer and of its drafter."""
    model = tiny_llama(vocab_size=VOCAB_SIZE)
    model.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    write_tiny_drafter(folder / "drafter", model, BLOCK_SIZE, max_position_embeddings=4096)
    return folder / "target", folder / "drafter"


def served_engine(folder: Path, *, has_drafter: bool = True) -> Engine:
    """A tiny engine in which all modes work."""
    model = tiny_llama(vocab_size=VOCAB_SIZE)
    model.config.max_position_embeddings = 2048
    max_positions = MAX_CONTEXT + BLOCK_SIZE
    target = tiny_target(folder / "target", model, max_positions)
    drafter = None
    if has_drafter:
        path = write_tiny_drafter(
            folder / "drafter", model, BLOCK_SIZE, max_position_embeddings=max_positions
        )
        drafter = load_tiny_drafter(path, model, max_positions)
    config = EngineConfig(model=MODEL, drafter="none", device="cpu", max_context_tokens=MAX_CONTEXT)
    return Engine(target, drafter, byte_tokenizer(), config, frozenset({2}), CPU)


class HeldEngine(Engine):
    """An engine whose chunks wait while it is held, and whose requests can be made to fail.

    Attributes:
        may_run: clear it to hold the engine before its next chunk.
        failures: raised by the next requests, one each, after `fail_after` chunks.
        started: requests that began.
    """

    def __init__(self, inner: Engine) -> None:
        self.__dict__.update(inner.__dict__)
        self.may_run = threading.Event()
        self.may_run.set()
        self.failures: list[Exception] = []
        self.fail_after = 0
        self.started: list[Request] = []

    def stream(self, request: Request) -> TokenStream:
        self.started.append(request)
        stream = super().stream(request)
        failure = self.failures.pop(0) if self.failures else None
        run = stream._run

        def held() -> Iterator[Any]:
            for number, chunk in enumerate(run()):
                if failure is not None and number == self.fail_after:
                    raise failure
                while not self.may_run.wait(0.01):
                    if stream._cancelled.is_set():
                        break
                yield chunk

        stream._run = held  # type: ignore[method-assign]
        return stream


class InstantEngine(HeldEngine):
    """Checks a request as the engine does, and ends it with its first token."""

    def stream(self, request: Request) -> TokenStream:
        stream = super().stream(request)
        stream._max_tokens = 1
        stream._run = lambda: iter([stream._take((2,), ())])  # type: ignore[method-assign]
        return stream


class Answer(NamedTuple):
    """A response of an application that was called in this process."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, its shape checked."""
        document = self.json()
        assert set(document) == {"error"}
        error: dict[str, Any] = document["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        return error


async def call(
    app: FastAPI,
    method: str,
    path: str,
    body: bytes | list[bytes] = b"",
    headers: dict[str, str] | None = None,
    until_gone: Awaitable[object] | None = None,
    on_body: Callable[[bytes], object] | None = None,
) -> Answer:
    """Call an application without a network.

    Args:
        body: the whole, or pieces that arrive one by one.
        until_gone: the client leaves when this is done; it stays if None.
        on_body: is told every piece of the answer.
    """
    given = {"content-type": "application/json"} | (headers or {})
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "method": method, "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 9), "state": {},
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
    }  # fmt: skip
    pieces = list(body) if isinstance(body, list) else [body]
    received: list[dict[str, Any]] = []
    gone: asyncio.Future[object] = asyncio.ensure_future(until_gone or asyncio.Event().wait())

    async def receive() -> dict[str, Any]:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}
        await asyncio.wait({gone})
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        received.append(message)
        if on_body and message["type"] == "http.response.body":
            on_body(message["body"])

    try:
        await app(scope, receive, send)  # type: ignore[arg-type]
    finally:
        gone.cancel()
    start, *rest = received
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], found, b"".join(message.get("body", b"") for message in rest))


async def post(app: FastAPI, path: str, document: Any, **options: Any) -> Answer:
    return await call(app, "POST", path, json.dumps(document).encode(), **options)


class Client:
    """An application between its start and its end, on an event loop of its own."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.service: Service = app.state.service
        self._runner = asyncio.Runner()

    def __enter__(self) -> Client:
        self._lifespan = self.app.router.lifespan_context(self.app)
        self._runner.run(self._lifespan.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._lifespan.__aexit__(None, None, None))
        self._runner.close()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run something on the application's loop."""
        return self._runner.run(coroutine)

    def ask(self, path: str, **fields: Any) -> Answer:
        answer: Answer = self.run(post(self.app, path, fields))
        return answer

    def send(self, path: str, body: bytes | list[bytes], **headers: str) -> Answer:
        answer: Answer = self.run(call(self.app, "POST", path, body, headers))
        return answer

    def get(self, path: str, **headers: str) -> Answer:
        answer: Answer = self.run(call(self.app, "GET", path, headers=headers))
        return answer


class Live(NamedTuple):
    """A server in a thread of this process."""

    url: str
    service: Service
    engine: HeldEngine
    server: DrainingServer


@contextlib.contextmanager
def live_server(engine: Engine, api_key: str | None = None, **settings: Any) -> Iterator[Live]:
    """Serve an engine on a free port."""
    config = ServerConfig(port=0, **settings)
    held = engine if isinstance(engine, HeldEngine) else HeldEngine(engine)
    app = create_app(held, config, api_key)
    bound = bind(config)
    url: list[str] = []
    server = DrainingServer(uvicorn_config(app), app.state.service, config.shutdown_s, url.append)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        wait_for(lambda: url, "the server to start")
        yield Live(url[0], app.state.service, held, server)
    finally:
        held.may_run.set()
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def wait_for(is_true: Callable[[], object], what: str, limit_s: float = 30.0) -> None:
    """Return once it is true; fail if that takes too long."""
    end = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < end, f"waited {limit_s:g} s for {what}"
        time.sleep(0.005)


def sample(service: Service, name: str, **labels: str) -> float:
    """A metric's value, 0 where it was never counted."""
    return service.metrics.registry.get_sample_value(f"ddtree_server_{name}", labels) or 0.0


def alone(engine: Engine, prompt: str, sampling: SamplingParams, **options: Any) -> Generation:
    """What the engine says to one chat message with nobody else around."""
    request = Request(engine.encode(prompt), sampling, **({"mode": Mode.TREE, "node_budget": 6} | options))
    return engine.generate(request)


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The JSON objects of an event stream, its end checked."""
    lines = body.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
