"""From the bytes of a request to a JSON object, strictly: what is doubtful is refused, never repaired."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from starlette.requests import Request

from ddtree.errors import short_repr
from ddtree.server.api_errors import ApiError


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, whether its length was announced or not.

    Raises:
        ApiError: it is no JSON by its headers (400) or too large (413).
        starlette.requests.ClientDisconnect: the client left while sending.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(400, f"Content-Type is {short_repr(content_type)}: send application/json")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise ApiError(400, f"Content-Encoding is {short_repr(encoding)}: send the body uncompressed")
    announced = request.headers.get("content-length", "")
    # Longer ones are cut short, since Python refuses to read a number of thousands of digits.
    if announced.isdecimal() and int(announced[:20]) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than {max_bytes} bytes; shorten the prompt", code="body_too_large"
    )


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        ApiError: it is not UTF-8, not JSON or not an object; it has a key twice, NaN, Infinity, a number
            beyond what a float or Python holds, or half a surrogate pair.
        RecursionError: it is nested too deeply.
    """
    try:
        text = body.decode()
        document = json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_float
        )
        if "\\u" in text:
            _refuse_lone_surrogates(document)
    except ApiError:
        raise
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 (byte {error.start})") from None
    except ValueError as error:  # JSONDecodeError, and whole numbers of thousands of digits
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ApiError(400, f"the body is {short_repr(document)}: send a JSON object")
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ApiError(400, f"the body has the key {short_repr(twice)} twice in one object")
    return document


def _refuse_constant(name: str) -> float:
    raise ApiError(400, f"the body has {name}, which is no JSON number")


def _float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ApiError(400, f"the body has the number {text[:40]}, which is too large")
    return number


def _refuse_lone_surrogates(document: Any) -> None:
    """Half a character, which JSON can write and UTF-8 cannot; neither tokenizers nor answers can hold it."""
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body has half of a surrogate pair (such as \\ud800) in a string") from None
