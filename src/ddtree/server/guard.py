"""Around every request: its id, who may come in, headers for browsers, and a clean end whatever happens."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ddtree.errors import short_repr
from ddtree.server import api_errors
from ddtree.server.api_errors import ApiError

logger = logging.getLogger(__name__)

# The page needs nothing but its own files; answers of the API are no pages at all.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
PROTECTED = "/v1/"
# What a browser on this machine calls this machine by. A page whose own name was made to point here
# (DNS rebinding) is of the same origin to the browser, and only the name in Host tells.
LOCAL_HOST = re.compile(
    rb"(([a-z0-9-]+\.)*localhost\.?|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]*)?", re.IGNORECASE
)


class Guard:
    """ASGI middleware.

    Args:
        app: the application.
        api_key: what clients must send to /v1/ as `Authorization: Bearer KEY`; None lets everyone in.
        is_local: only programs on this machine are meant to reach the server; without a key it then
            answers to no other machine's name.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, *, is_local: bool) -> None:
        self._app = app
        self._checks_host = is_local and api_key is None
        self._api_key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        begin, status = time.monotonic(), 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                tag = (b"x-request-id", request_id.encode())
                message = {**message, "headers": [*message["headers"], tag, *HEADERS]}
            await send(message)

        try:
            if (refusal := self._refusal(scope)) is not None:
                await refusal.response()(scope, receive, tagged)
            else:
                await self._app(scope, receive, tagged)
        except Exception:
            logger.exception("request %s failed", request_id)
            if status:
                raise  # the server below closes the connection, so that nobody takes the rest for whole
            await api_errors.internal(request_id).response()(scope, receive, tagged)
        finally:
            took_ms = (time.monotonic() - begin) * 1e3
            logger.info(
                "%s %s %r: %d in %.1f ms", request_id, scope["method"], scope["path"], status, took_ms
            )

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Why the client may not come in, or None."""
        if self._checks_host:
            return _host_refusal(scope)
        if self._api_key is None or not scope["path"].startswith(PROTECTED):
            return None
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._api_key):
            return None
        what = "is wrong" if key else "is missing"
        return ApiError(
            401, f"the API key {what}: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip


def _host_refusal(scope: Scope) -> ApiError | None:
    """Why a request that was sent to this name is not answered, or None; programs may send no name."""
    hosts = [value for name, value in scope["headers"] if name == b"host" and value]
    if all(map(LOCAL_HOST.fullmatch, hosts)):
        return None
    return ApiError(
        403,
        f"Host is {short_repr(hosts[0].decode('latin-1'))}: without an API key this server answers to "
        "localhost and 127.0.0.1 only, so that no web page can reach it under a name of its own; "
        "use one of these, or start the server with a key",
        code="host_not_allowed",
    )  # fmt: skip
