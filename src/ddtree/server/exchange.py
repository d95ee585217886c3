"""One request from its arrival to the end of its answer, on the event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ddtree.engine.request import FinishReason, Generation
from ddtree.server import api_errors
from ddtree.server.answers import AnswerWriter
from ddtree.server.api_errors import ApiError
from ddtree.server.engine_queue import EngineQueue, Job, Progress

logger = logging.getLogger(__name__)

OUTCOMES = {429: "queue_full", 503: "shutdown", 504: "timeout", 408: "timeout"}


def outcome_of(error: BaseException) -> str:
    """How a request ended, for the metrics."""
    if isinstance(error, ClientDisconnect | asyncio.CancelledError):
        return "cancelled"
    if isinstance(error, ApiError):
        return OUTCOMES.get(error.status, "invalid" if error.status < 500 else "error")
    return "error"


class Exchange:
    """A job, its deadline, and the client that may leave before the end.

    What ends the job early (the deadline, the client) comes in among its events, so that there is one
    place to wait. `close` must be called at the end; it frees the engine and counts the outcome once.

    Args:
        queue: holds the job.
        job: the request.
        timeout_s: seconds from the request's arrival to its end.
        on_close: is told how the request ended.
    """

    def __init__(
        self,
        queue: EngineQueue,
        job: Job,
        timeout_s: float,
        receive: Receive,
        on_close: Callable[[str], None],
    ) -> None:
        self._queue, self.job, self._receive, self._on_close = queue, job, receive, on_close
        loop = asyncio.get_running_loop()
        left_s = job.arrived_at + timeout_s - time.monotonic()
        self._timer = loop.call_later(max(0.0, left_s), self._end, api_errors.timed_out(timeout_s))
        self._watch = loop.create_task(self._until_gone())

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._end(ClientDisconnect())

    def _end(self, error: Exception) -> None:
        self._queue.cancel(self.job)
        self.job.events.put_nowait(error)

    async def next(self) -> Progress | Generation:
        """The next event.

        Raises:
            ApiError: the job failed, or its time is up.
            ClientDisconnect: the client left.
        """
        event = await self.job.events.get()
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Generation) and event.finish_reason is FinishReason.CANCEL:
            # Whoever cancelled it has said why, in an event that is on its way.
            return await self.next()
        return event

    def close(self, outcome: str) -> None:
        self._timer.cancel()
        self._watch.cancel()
        self._queue.cancel(self.job)
        self._on_close(outcome)


class EventStream(Response):
    """The rest of an answer as server-sent events; an error becomes the last event but one.

    Args:
        exchange: is closed at the end.
        writer: makes the chunks.
        first: the event that was waited for before the response began.
    """

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, writer: AnswerWriter, first: Progress | Generation) -> None:
        self._exchange, self._writer, self._first = exchange, writer, first
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = "error"

        async def write(body: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            async for document in self._documents():
                await write(sse(document))
            outcome = "ok"
        except ApiError as error:
            outcome = outcome_of(error)
            await write(sse(error.body()))
        except (ClientDisconnect, OSError):
            outcome = "cancelled"
            return
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except Exception:
            logger.exception("request %s failed in its stream", self._exchange.job.request_id)
            await write(sse(api_errors.internal(self._exchange.job.request_id).body()))
        finally:
            self._exchange.close(outcome)
        await write(b"data: [DONE]\n\n", more=False)

    async def _documents(self) -> AsyncIterator[dict[str, Any]]:
        for document in self._writer.opening():
            yield document
        event = self._first
        while isinstance(event, Progress):
            for document in self._writer.progress(event):
                yield document
            event = await self._exchange.next()
        for document in self._writer.ending(event, self._exchange.job.wait_s):
            yield document


def sse(document: dict[str, Any]) -> bytes:
    """One event of a stream.

    In ASCII, since many clients take U+2028 and its like for the end of a line.
    """
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"
