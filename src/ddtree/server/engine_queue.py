"""One thread that owns the engine, and the requests that wait for it.

The event loop submits jobs and reads their events; the thread runs them one after another. Whatever
happens to a job, it gets one last event and the thread goes on to the next.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddtree.engine.request import Chunk, FinishReason, Generation, Request
from ddtree.errors import ConfigError
from ddtree.server import api_errors
from ddtree.server.metrics import ServerMetrics
from ddtree.server.rounds import RoundWatch
from ddtree.server.token_texts import TokenTexts

if TYPE_CHECKING:
    from ddtree.engine.engine import Engine
    from ddtree.engine.stream import TokenStream

logger = logging.getLogger(__name__)

MAX_RETRY_AFTER_S = 60
FAILURES_UNTIL_UNHEALTHY = 3
THREAD_NAME = "ddtree-engine"


@dataclass(frozen=True, slots=True)
class Progress:
    """Newly committed text and tokens, with the round that made them where it is wanted."""

    chunk: Chunk
    round: dict[str, Any] | None


Event = Progress | Generation | Exception


class Job:
    """A request on its way through the queue; made on the event loop that reads its events.

    Attributes:
        events: what happened so far; a `Generation` or an error ends them.
        arrived_at: when the request came in, as `time.monotonic` tells it.
        wait_s: how long it waited, once it runs.
    """

    def __init__(self, request: Request, request_id: str, arrived_at: float, *, has_rounds: bool) -> None:
        self.request, self.request_id, self.has_rounds = request, request_id, has_rounds
        self.arrived_at, self.wait_s = arrived_at, 0.0
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._stream: TokenStream | None = None
        self._lock = threading.Lock()
        self.is_cancelled = False

    def post(self, event: Event) -> None:
        """Hand an event to the loop, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:  # the loop is closed, and nobody reads any more
            self.cancel()

    def attach(self, stream: TokenStream) -> None:
        """Say which stream runs the job; one cancelled before ends after its first chunk."""
        with self._lock:
            self._stream = stream
            if self.is_cancelled:
                stream.cancel()

    def cancel(self) -> None:
        """End the job after the round in progress, or never start it."""
        with self._lock:
            self.is_cancelled = True
            if self._stream is not None:
                self._stream.cancel()


class EngineQueue:
    """Requests in the order of arrival, and the thread that runs them.

    Args:
        engine: used by the thread alone.
        metrics: is fed by the thread.
        max_queue: requests that may wait.
    """

    def __init__(self, engine: Engine, metrics: ServerMetrics, max_queue: int) -> None:
        self._engine, self._metrics, self._max_queue = engine, metrics, max_queue
        self.texts = TokenTexts(engine.tokenizer)
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._reserved = 0  # places of requests that are still being read
        self._running: Job | None = None
        self._is_draining = self._is_closed = False
        self._failures_in_a_row = 0
        self._mean_request_s = 1.0
        # No daemon: an interpreter that ends under a thread inside torch aborts the process.
        self._thread = threading.Thread(target=self._work, name=THREAD_NAME)

    def start(self) -> None:
        self._thread.start()

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place in the queue while a request is read, before it is a job.

        Raises:
            ApiError: the queue is full (429), or the server is shutting down (503).
        """
        with self._changed:
            self._check_open()
            self._reserved += 1
            self._count()
        try:
            yield
        finally:
            with self._changed:
                self._reserved -= 1
                self._count()

    def check_open(self) -> None:
        """Raise what `place` would, without taking one."""
        with self._changed:
            self._check_open()

    def _check_open(self) -> None:
        if self._is_draining or self._is_closed:
            raise api_errors.shutting_down()
        if len(self._waiting) + self._reserved >= self._max_queue:
            wait_s = math.ceil(self._mean_request_s * self._max_queue)
            raise api_errors.queue_full(self._max_queue, max(1, min(wait_s, MAX_RETRY_AFTER_S)))

    def submit(self, job: Job) -> None:
        """Put a job at the end of the queue; its place must be held.

        Raises:
            ApiError: the server is shutting down (503).
        """
        with self._changed:
            if self._is_draining or self._is_closed:
                raise api_errors.shutting_down()
            self._waiting.append(job)
            self._count()
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Forget a job that waits, end one that runs; nothing if it has ended."""
        job.cancel()
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                self._count()

    def drain(self) -> None:
        """Take no more requests; those inside go on."""
        with self._changed:
            self._is_draining = True

    def abort(self) -> None:
        """End every job inside with an error."""
        with self._changed:
            jobs = [*self._waiting, *([self._running] if self._running else [])]
            self._waiting.clear()
            self._count()
        for job in jobs:
            job.cancel()
            job.post(api_errors.shutting_down())

    def close(self, timeout_s: float) -> bool:
        """End the thread after the round in progress; returns whether it ended in time."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self.abort()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def status(self) -> str:
        """`ok`, `stopping`, or `failing` where the last requests all failed or the thread is gone."""
        if self._is_draining or self._is_closed:
            return "stopping"
        is_failing = self._failures_in_a_row >= FAILURES_UNTIL_UNHEALTHY or not self._thread.is_alive()
        return "failing" if is_failing else "ok"

    def sizes(self) -> dict[str, int]:
        """How many requests wait and run, and how many may wait."""
        with self._changed:
            return {
                "waiting": len(self._waiting) + self._reserved,
                "running": int(self._running is not None),
                "max_waiting": self._max_queue,
            }

    @property
    def is_idle(self) -> bool:
        sizes = self.sizes()
        return sizes["waiting"] == sizes["running"] == 0

    def _count(self) -> None:
        self._metrics.queue_requests.set(len(self._waiting) + self._reserved)
        self._metrics.running_requests.set(self._running is not None)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._run_to_end(job)
            del job  # so that nothing of it is kept while there is nothing to do

    def _run_to_end(self, job: Job) -> None:
        """Run a job and post its last event, whatever happens."""
        begin = time.monotonic()
        job.wait_s = begin - job.arrived_at
        try:
            last: Event = self._run(job)
            self._failures_in_a_row = 0
        except ConfigError as error:
            last = api_errors.refused(error)
        except Exception:
            logger.exception("request %s failed", job.request_id)
            self._failures_in_a_row += 1
            last = api_errors.internal(job.request_id)
        # A moving mean over some ten requests, for Retry-After.
        self._mean_request_s += 0.1 * (time.monotonic() - begin - self._mean_request_s)
        with self._changed:
            self._running = None
            self._count()
        job.post(last)

    def _next(self) -> Job | None:
        """The next job, when there is one; None once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if self._is_closed:
                return None
            self._running = self._waiting.popleft()
            self._count()
            return self._running

    def _run(self, job: Job) -> Generation:
        metrics = self._metrics
        metrics.on_started(job.wait_s)
        watch = RoundWatch(metrics, self.texts, wants_trees=job.has_rounds)
        stream = self._engine.stream(replace(job.request, observer=watch))
        job.attach(stream)
        before: float | None = None
        try:
            for chunk in stream:
                now = time.monotonic()
                if before is None:
                    metrics.first_token.observe(now - job.arrived_at)
                else:
                    metrics.on_tokens(len(chunk.tokens), now - before)
                before = now
                job.post(Progress(chunk, watch.take()))
        finally:
            metrics.on_ended(stream.result(), watch.rounds_s)
        generation = stream.result()
        assert job.is_cancelled or generation.finish_reason is not FinishReason.CANCEL
        return generation
