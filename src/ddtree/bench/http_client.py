"""Sends requests to a server, so many at a time, and keeps what came back with the time of each piece.

Pieces are read later, by `stream_events`, so that no parsing stands between a piece and its time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from ddtree.errors import ConfigError, DDTreeError, MissingExtraError, short_repr

try:
    import httpx
except ModuleNotFoundError:
    raise MissingExtraError("httpx", "bench") from None

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
IDLE_S = 2.0  # servers close idle connections after some seconds, perhaps just when one is used
QUERY_S = 30.0  # of a question about the server
SHORTEST_WAIT_S, FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 0.5, 60.0  # of a request that is to come back
TOO_MANY, UNAVAILABLE = 429, 503
REFUSED = (400, 404, 413, 422)  # about this request, not about the server's health
MAX_ERROR_BYTES = 65_536


class ServerError(DDTreeError):
    """A server cannot be reached, failed, or answered with what cannot be read."""


class RequestRefusedError(ConfigError):
    """A server refuses a request for what it asks."""


@dataclass(frozen=True, slots=True)
class Received:
    """An answer as it came.

    Attributes:
        begin_s: when the request was sent for the first time.
        end_s: when the answer had ended.
        pieces: time and bytes, decompressed.
        is_stream: whether it is an event stream.
        retry_ct: times that the server told the request to come back later.
    """

    begin_s: float
    end_s: float
    pieces: tuple[tuple[float, bytes], ...]
    is_stream: bool
    retry_ct: int = 0

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


class HttpClient:
    """Requests to one server over connections that are kept open.

    Args:
        root: URL before all paths, such as `http://127.0.0.1:8080`.
        api_key: sent as a bearer token, if any.
        limit_s: seconds that a request gets, waiting for a busy server included.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        root: str,
        *,
        api_key: str | None = None,
        limit_s: float = 600.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.root = root.rstrip("/")
        self._limit_s, self._clock = limit_s, clock
        headers = {"Accept-Encoding": "identity"}  # compressing would hold pieces back
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_S
            ),
            trust_env=not _is_loopback(root),  # no proxy to this machine
        )

    def close(self) -> None:
        """Close all connections; does nothing the second time."""
        if not self._client.is_closed:
            self._runner.run(self._client.aclose())
            self._runner.close()

    def get_json(self, path: str) -> Any:
        """The JSON document at a path; None where the server has none.

        Raises:
            ServerError: the server cannot be reached or answers no HTTP.
        """
        response = self._query("GET", path)
        if response.status_code in (401, 403):
            raise RequestRefusedError(
                f"{self.root}{path} asks for an API key or refuses the one given: name the environment "
                "variable that holds it with --api-key-env"
            )
        try:
            return response.json() if response.is_success else None
        except (ValueError, RecursionError):
            return None

    def status(self, method: str, path: str, limit_s: float = QUERY_S) -> int:
        """Status of the answer to a request without a body.

        Raises:
            ServerError: the server cannot be reached or answers no HTTP.
        """
        return self._query(method, path, limit_s).status_code

    def _query(self, method: str, path: str, limit_s: float = QUERY_S) -> httpx.Response:
        async def ask() -> httpx.Response:
            async with asyncio.timeout(limit_s):
                return await self._client.request(method, self.root + path)

        try:
            return self._runner.run(ask())
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise self._failed(path, error, limit_s) from error

    def post_all(
        self, path: str, bodies: Sequence[Mapping[str, Any]], concurrency: int
    ) -> tuple[float, list[Received]]:
        """Send all bodies, `concurrency` at a time; wall seconds and the answers in the bodies' order.

        A request that is told to come back later (429, or 503 with Retry-After) does so, holding its place.

        Raises:
            RequestRefusedError: a request is refused for what it asks.
            ServerError: a request failed otherwise; the other ones are ended.
        """
        received = self._runner.run(self._post_all(path, bodies, concurrency))
        retry_ct = sum(answer.retry_ct for answer in received)
        if retry_ct:
            logger.warning(
                "%s: the server was busy %d times; times to the first token have the waits", path, retry_ct
            )
        begin_s = min(answer.begin_s for answer in received)
        return max(answer.end_s for answer in received) - begin_s, received

    async def _post_all(
        self, path: str, bodies: Sequence[Mapping[str, Any]], concurrency: int
    ) -> list[Received]:
        slots = asyncio.Semaphore(concurrency)
        contents = [json.dumps(body).encode("ascii") for body in bodies]
        tasks = [asyncio.create_task(self._post_in_turn(path, content, slots)) for content in contents]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _post_in_turn(self, path: str, content: bytes, slots: asyncio.Semaphore) -> Received:
        async with slots:
            begin_s, retry_ct = self._clock(), 0
            try:
                async with asyncio.timeout(self._limit_s):
                    while isinstance(answer := await self._post(path, content, retry_ct), float):
                        await asyncio.sleep(answer)
                        retry_ct += 1
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
                raise self._failed(path, error, self._limit_s) from error
            pieces, is_stream = answer
            return Received(begin_s, self._clock(), pieces, is_stream, retry_ct)

    async def _post(
        self, path: str, content: bytes, retry_ct: int
    ) -> tuple[tuple[tuple[float, bytes], ...], bool] | float:
        """An answer's pieces and whether it is a stream, or the seconds after which to come back."""
        headers = {"Content-Type": "application/json"}
        async with self._client.stream(
            "POST", self.root + path, content=content, headers=headers
        ) as response:
            status, asked = response.status_code, response.headers.get("retry-after")
            if status == TOO_MANY or (status == UNAVAILABLE and asked is not None):
                return wait_s(asked, retry_ct)
            if not response.is_success:
                raise self._refusal(path, status, await _read_some(response))
            is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
            pieces = [(self._clock(), piece) async for piece in response.aiter_bytes()]
        return tuple(pieces), is_stream

    def _refusal(self, path: str, status: int, body: bytes) -> DDTreeError:
        kind = RequestRefusedError if status in REFUSED else ServerError
        return kind(f"{self.root}{path} answered {status}: {error_text(body)}")

    def _failed(self, path: str, error: Exception, limit_s: float) -> ServerError:
        if isinstance(error, TimeoutError):
            return ServerError(f"{self.root}{path} did not answer within {limit_s:g} s")
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ServerError(f"{self.root} cannot be reached: {_reason(error)}; does the server run there?")
        return ServerError(f"{self.root}{path} broke off: {_reason(error)}")


def wait_s(retry_after: str | None, retry_ct: int) -> float:
    """Seconds to wait as a Retry-After header says, in seconds or as a date; else longer each time."""
    seconds = None if retry_after is None else _seconds_of(retry_after)
    if seconds is None:
        seconds = FIRST_WAIT_S * 2.0 ** min(retry_ct, 10)
    return min(max(seconds, SHORTEST_WAIT_S), LONGEST_WAIT_S)


def _seconds_of(retry_after: str) -> float | None:
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        return parsedate_to_datetime(retry_after).timestamp() - time.time()
    except ValueError:
        return None


async def _read_some(response: httpx.Response) -> bytes:
    """The beginning of a body, which may be as long as the server likes."""
    body = b""
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) >= MAX_ERROR_BYTES:
            break
    return body


def error_text(body: bytes) -> str:
    """What an error's body says: the message of OpenAI's shape or of FastAPI's, else the text itself."""
    text = body.decode("utf-8", "replace").strip()
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, dict):
        said = document.get("error", document.get("message", document.get("detail", document)))
        text = str(said.get("message", said)) if isinstance(said, dict) else str(said)
    return short_repr(" ".join(text.split())) if text else "no reason given"


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
