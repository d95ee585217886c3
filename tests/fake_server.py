"""An HTTP server in a thread of this process that answers byte by byte what a test says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

CHAT_PATH = "/v1/chat/completions"
MODELS = {"object": "list", "data": [{"id": "fake", "object": "model"}]}


@dataclass(frozen=True)
class Asked:
    """A request that came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


Handler = Callable[[Asked], AsyncIterator[bytes]]


@dataclass
class FakeServer:
    """Answers by path; what has no handler gets 404.

    Attributes:
        handlers: make the whole response, its head included.
        asked: requests in the order in which they came.
        in_flight, most_in_flight: chat requests that are being answered, now and at most.
        broken_off: requests whose client left before their end.
    """

    handlers: dict[str, Handler]
    asked: list[Asked] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    broken_off: int = 0
    url: str = ""

    def chats(self) -> list[Any]:
        return [asked.json() for asked in self.asked if asked.path == CHAT_PATH]

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            asked = await read_request(reader)
            self.asked.append(asked)
            is_chat = asked.path == CHAT_PATH
            self.in_flight += is_chat
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            gone = asyncio.create_task(reader.read())
            answering = asyncio.create_task(self._answer(asked, writer))
            await asyncio.wait({gone, answering}, return_when=asyncio.FIRST_COMPLETED)
            self.in_flight -= is_chat
            if not answering.done():
                self.broken_off += 1
                answering.cancel()
            gone.cancel()
        with suppress(ConnectionError):
            writer.close()

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        handler = self.handlers.get(asked.path.partition("?")[0], not_found)
        async for piece in handler(asked):
            writer.write(piece)
            await writer.drain()


async def read_request(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(method, path, headers, body)


@contextmanager
def serving(handlers: dict[str, Handler] | None = None, **answers: Handler) -> Iterator[FakeServer]:
    """A server with one model, and `chat` as the handler of chat requests if given."""
    base: dict[str, Handler] = {"/v1/models": lambda asked: respond(MODELS)}
    if "chat" in answers:
        base[CHAT_PATH] = answers["chat"]
    fake = FakeServer(base | (handlers or {}))
    loop = asyncio.new_event_loop()
    started = threading.Event()
    stop = asyncio.Event()

    async def run() -> None:
        server = await asyncio.start_server(fake.connected, "127.0.0.1", 0)
        fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert started.wait(10)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        assert not thread.is_alive()
        loop.close()


# -- responses --------------------------------------------------------------------------------------


def head(status: int = 200, kind: str = "application/json", **headers: str) -> bytes:
    """The head of a response that ends with its connection."""
    fields = {"content-type": kind, "connection": "close"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    lines = [f"HTTP/1.1 {status} Status", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("ascii")


async def respond(document: Any, status: int = 200, **headers: str) -> AsyncIterator[bytes]:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    yield head(status, content_length=str(len(body)), **headers) + body


async def not_found(_asked: Asked) -> AsyncIterator[bytes]:
    async for piece in respond({"detail": "Not Found"}, 404):
        yield piece


def event(value: Any) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"data: {text}\n\n".encode()


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    """A chunk of a chat stream."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def usage(prompt: int, new: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": new}}


def says(*values: Any) -> Handler:
    """Answers every chat with a stream of these values, `[DONE]` not added."""

    async def answer(_asked: Asked) -> AsyncIterator[bytes]:
        yield head(kind="text/event-stream")
        for value in values:
            yield value if isinstance(value, bytes) else event(value)

    return answer


HELLO = (
    chunk(role="assistant", content=""),
    chunk(content="Hel"),
    chunk(content="lo!"),
    chunk("stop"),
    usage(5, 4),
    "[DONE]",
)
