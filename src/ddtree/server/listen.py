"""Runs the application under uvicorn, from the bound socket to the end of the last answer."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from ddtree.config import ServerConfig
from ddtree.errors import ConfigError
from ddtree.server.app import create_app
from ddtree.server.service import Service

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ddtree.engine.engine import Engine

logger = logging.getLogger(__name__)

BACKLOG = 2048
POLL_S = 0.02
# After the last answer: for bytes that are on their way to slow readers.
LAST_BYTES_S = 5


def bind(config: ServerConfig) -> socket.socket:
    """A socket bound to the settings' address; connections are taken once the engine is there.

    Raises:
        ConfigError: the address is not of this machine, in use or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host={config.host!r} cannot be listened on: {_reason(error)}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"{config.host} port {config.port} cannot be listened on: {_reason(error)}; "
            "choose another with --host and --port"
        ) from None
    return bound


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def url_of(bound: socket.socket) -> str:
    """Where a browser finds the server."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if bound.family is socket.AF_INET6 else f"http://{host}:{port}"


def serve(
    engine: Engine,
    config: ServerConfig,
    api_key: str | None,
    bound: socket.socket,
    on_ready: Callable[[str], None],
) -> int:
    """Serve until SIGTERM or SIGINT; returns the signal's number.

    Requests that are inside at that time get `shutdown_s` to finish, new ones 503; what is not finished
    then ends with an error. A second signal cuts the wait short.

    Args:
        engine: loaded; the server uses it alone.
        config: settings of the server.
        api_key: what clients must send, or None.
        bound: from `bind`.
        on_ready: is told the URL as soon as connections are taken.

    Raises:
        ConfigError: another program has begun to listen on the port since it was bound.
    """
    if engine.drafter is not None:
        engine.policy()  # measures what rounds cost, so that the first request does not wait for it
    app = create_app(engine, config, api_key)
    app.openapi()  # made once, which takes longer than the event loop should stand still
    server = DrainingServer(uvicorn_config(app), app.state.service, config.shutdown_s, on_ready)
    asyncio.run(server.serve(sockets=[bound]))
    return server.exit_signal


def uvicorn_config(app: FastAPI) -> uvicorn.Config:
    """How uvicorn runs the application: plain HTTP/1.1, no logging of its own, nobody's headers believed."""
    return uvicorn.Config(
        app,
        http="h11", ws="none", loop="asyncio", lifespan="on", log_config=None, access_log=False,
        proxy_headers=False, server_header=False, backlog=BACKLOG, timeout_graceful_shutdown=LAST_BYTES_S,
    )  # fmt: skip


class DrainingServer(uvicorn.Server):
    """A uvicorn server that goes on listening while it finishes what it has taken on.

    Uvicorn's own shutdown closes the socket first, so that new clients are refused by the network; here
    they get an answer, 503, for as long as there is work.

    Attributes:
        exit_signal: the signal that ended it, 0 before.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, shutdown_s: float, on_ready: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self._service, self._shutdown_s, self._on_ready = service, shutdown_s, on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self.exit_signal = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await super().startup(sockets=sockets)
        except OSError as error:  # two servers may bind one port, and the second to listen is refused
            raise ConfigError(f"the port cannot be listened on: {_reason(error)}; choose another") from None
        if self.started and sockets and not self.exit_signal:
            self._on_ready(url_of(sockets[0]))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came: the first begins the end, the second hastens it."""
        is_first, self.exit_signal = self.exit_signal == 0, sig
        if self._loop is None or not self.started:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._begin_drain if is_first else self._hasten)

    def _begin_drain(self) -> None:
        queue = self._service.queue
        queue.drain()
        sizes = queue.sizes()
        logger.warning(
            "%s: no more requests are taken; %d inside get %g s to finish",
            signal.Signals(self.exit_signal).name, sizes["waiting"] + sizes["running"], self._shutdown_s,
        )  # fmt: skip
        assert self._loop is not None
        self._drain = self._loop.create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        queue = self._service.queue
        assert self._loop is not None
        until = self._loop.time() + self._shutdown_s
        while not queue.is_idle and self._loop.time() < until and not self.should_exit:
            await asyncio.sleep(POLL_S)
        queue.abort()
        self.should_exit = True

    def _hasten(self) -> None:
        self._service.queue.abort()
        self.should_exit = True
