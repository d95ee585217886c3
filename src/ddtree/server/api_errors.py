"""Refusals and failures as OpenAI clients expect them: a status and one JSON object."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse

from ddtree.errors import ConfigError, ContextLengthError

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class ApiError(Exception):
    """Ends a request with a status and an error object.

    Args:
        status: HTTP status.
        message: what is wrong, the value, what is allowed, what to do.
        type: OpenAI's kind of error.
        param: the field at fault.
        code: a word for programs.
        headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type = status, message, type
        self.param, self.code, self.headers = param, code, dict(headers or {})

    def body(self) -> dict[str, dict[str, str | None]]:
        """The error object that is sent, as the answer or as an event of a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def refused(error: ConfigError) -> ApiError:
    """What the engine refuses in a request, as the client's mistake."""
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
    return ApiError(400, str(error), code=code)


def queue_full(max_queue: int, retry_after_s: int) -> ApiError:
    return ApiError(
        429,
        f"{max_queue} requests are waiting already, as many as this server keeps; try again later",
        type="rate_limit_error", code="queue_full", headers={"Retry-After": str(retry_after_s)},
    )  # fmt: skip


def shutting_down() -> ApiError:
    return ApiError(
        503,
        "the server is shutting down; send the request to another one, or again when it is back",
        type=SERVER_ERROR, code="shutting_down", headers={"Retry-After": "10"},
    )  # fmt: skip


def timed_out(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"the request was not finished within {seconds:g} s, waiting included; ask for fewer tokens, "
        "or have the server started with a longer --request-timeout-s",
        type=SERVER_ERROR, code="timeout",
    )  # fmt: skip


def internal(request_id: str) -> ApiError:
    """A fault of ours: the client learns no more than the name under which it is logged."""
    return ApiError(
        500, f"the server failed at this request; its log says more under {request_id}", type=SERVER_ERROR
    )
