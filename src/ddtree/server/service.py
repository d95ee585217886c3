"""What the routes share: the queue in front of the engine, the counts, and how a request is answered."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ddtree.config import ServerConfig
from ddtree.engine.request import Generation
from ddtree.errors import ConfigError
from ddtree.server import api_errors
from ddtree.server.answers import VERSION, AnswerWriter, ChatWriter, TextWriter
from ddtree.server.api_errors import ApiError
from ddtree.server.asked import Asked, RequestReader
from ddtree.server.body import parse_object, read_body
from ddtree.server.engine_queue import EngineQueue, Job, Progress
from ddtree.server.exchange import EventStream, Exchange, outcome_of
from ddtree.server.metrics import ServerMetrics
from ddtree.server.protocol import BodyKind, read_request

if TYPE_CHECKING:
    from ddtree.engine.engine import Engine

logger = logging.getLogger(__name__)

# Reading a request (JSON, template, tokenizer) runs beside the event loop; more threads than this would
# only take time from the engine.
READER_THREADS = 2
CLOSE_TIMEOUT_S = 10.0


class Service:
    """One engine being served.

    Args:
        engine: from now on used by this service alone.
        config: settings of the server.
    """

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine, self.config = engine, config
        self.model_name = config.served_model_name or PurePath(engine.config.model).name
        self.created = int(time.time())
        self.metrics = ServerMetrics()
        self.queue = EngineQueue(engine, self.metrics, config.max_queue)
        self._reader = RequestReader(engine, config)
        self._threads = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="ddtree-reader")

    def start(self) -> None:
        self.queue.start()

    def close(self) -> None:
        """End the threads; a round in progress is waited for."""
        if not self.queue.close(CLOSE_TIMEOUT_S):
            logger.warning("the engine is still busy after %g s; the process ends after it", CLOSE_TIMEOUT_S)
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def complete(self, http: Request, kind: BodyKind, endpoint: str) -> Response:
        """Answer one request of an endpoint.

        Raises:
            ApiError: it is refused or failed before an answer began.
            starlette.requests.ClientDisconnect: the client left.
        """
        arrived_at = time.monotonic()

        def on_close(outcome: str) -> None:
            self.metrics.on_answered(endpoint, outcome, time.monotonic() - arrived_at)

        try:
            exchange, writer, is_stream = await self._begin(http, kind, arrived_at, on_close)
        except BaseException as error:
            on_close(outcome_of(error))
            raise
        outcome = "error"
        try:
            event = await exchange.next()
            if is_stream:
                return EventStream(exchange, writer, event)
            while isinstance(event, Progress):
                event = await exchange.next()
            # Thousands of log-probabilities take their time, so not on the event loop.
            loop = asyncio.get_running_loop()
            response = await loop.run_in_executor(self._threads, _whole, writer, event, exchange.job.wait_s)
            outcome = "ok"
        except BaseException as error:
            outcome = outcome_of(error)
            is_stream = False
            raise
        finally:
            if not is_stream:
                exchange.close(outcome)
        return response

    async def _begin(
        self,
        http: Request,
        kind: BodyKind,
        arrived_at: float,
        on_close: Callable[[str], None],
    ) -> tuple[Exchange, AnswerWriter, bool]:
        """Read the request and put it into the queue."""
        self.queue.check_open()  # before a body is read that nobody will look at
        timeout_s = self.config.request_timeout_s
        try:
            body = await asyncio.wait_for(read_body(http, self.config.max_body_bytes), timeout_s)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {timeout_s:g} s") from None
        request_id = http.state.request_id
        with self.queue.place():
            asked = await self._read_in_time(body, kind, arrived_at + timeout_s)
            job = Job(asked.request, request_id, arrived_at, has_rounds=asked.has_rounds)
            self.queue.submit(job)
        exchange = Exchange(self.queue, job, timeout_s, http.receive, on_close)
        return exchange, self._writer(asked), asked.is_stream

    async def _read_in_time(self, body: bytes, kind: BodyKind, until: float) -> Asked:
        loop = asyncio.get_running_loop()
        reading: Awaitable[Asked] = loop.run_in_executor(self._threads, self._read, body, kind)
        try:
            return await asyncio.wait_for(reading, until - time.monotonic())
        except TimeoutError:
            raise api_errors.timed_out(self.config.request_timeout_s) from None

    def _read(self, body: bytes, kind: BodyKind) -> Asked:
        """A request from its bytes; runs in a thread of its own."""
        try:
            return self._reader.read(read_request(kind, parse_object(body)), self.model_name)
        except ConfigError as error:
            raise api_errors.refused(error) from error
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply") from None

    def _writer(self, asked: Asked) -> AnswerWriter:
        writer, prefix = (ChatWriter, "chatcmpl") if asked.is_chat else (TextWriter, "cmpl")
        return writer(asked, self.model_name, f"{prefix}-{secrets.token_hex(12)}", self.queue.texts)

    def model_card(self) -> dict[str, Any]:
        """The model as /v1/models lists it."""
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "ddtree",
            "max_model_len": self.engine.max_context_tokens,
        }

    def stats(self) -> dict[str, Any]:
        """What /v1/ddtree/stats answers."""
        engine = self.engine
        return {
            "version": VERSION,
            "status": self.queue.status(),
            "model": self.model_name,
            "engine": {
                "device": str(engine.device),
                "dtype": str(engine.pair.kv_cache.data.dtype).removeprefix("torch."),
                "max_context_tokens": engine.max_context_tokens,
                "drafter": engine.config.drafter if engine.drafter is not None else None,
                "block_size": engine.pair.block_size if engine.drafter is not None else None,
                "default_mode": str(self.config.mode),
                "default_budget": self.config.node_budget,
            },
            "queue": self.queue.sizes(),
            **self.metrics.totals(),
        }


def _whole(writer: AnswerWriter, generation: Generation, wait_s: float) -> Response:
    answer = writer.answer(generation, wait_s)
    return Response(answer.model_dump_json(), media_type="application/json")
