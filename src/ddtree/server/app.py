"""The HTTP application: routes over one service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ddtree.config import ServerConfig
from ddtree.server.answers import VERSION, ChatAnswer, TextAnswer
from ddtree.server.api_errors import ApiError
from ddtree.server.api_key import is_loopback
from ddtree.server.guard import Guard
from ddtree.server.protocol import ChatRequest, CompletionRequest
from ddtree.server.service import Service

if TYPE_CHECKING:
    from ddtree.engine.engine import Engine

STATIC = Path(__file__).parent / "static"
REF = "#/components/schemas/{model}"
# What a client that left before its answer is said to have got; nobody reads it.
CLIENT_CLOSED_REQUEST = 499
NO_CACHE = {"cache-control": "no-cache"}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """What every refusal and failure looks like."""

    error: ErrorDetail


ERRORS = {
    400: "the request is not allowed, and why",
    401: "no or a wrong API key, where the server has one",
    403: "sent to another machine's name, where the server is local and has no key",
    404: "no such model",
    408: "the body did not arrive in time",
    413: "the body is too large",
    429: "the queue is full; Retry-After says when to come again",
    500: "the engine failed; the log has the request's id",
    503: "the server is shutting down",
    504: "not finished in time",
}


def create_app(engine: Engine, config: ServerConfig | None = None, api_key: str | None = None) -> FastAPI:
    """An engine behind OpenAI's API; one sequence is decoded at a time, the others wait in order.

    Args:
        engine: from now on used by this application alone. Its threads start and end with the
            application's lifespan.
        config: settings of the server; one that listens on this machine alone answers, without a key, to
            no other machine's name. Port and key file are not its business.
        api_key: what clients of /v1/ must send; None lets everyone in.
    """
    service = Service(engine, config or ServerConfig())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            service.close()

    # The pages with documentation that FastAPI offers load scripts from elsewhere.
    app = FastAPI(
        title="ddtree", version=VERSION, docs_url=None, redoc_url=None, redirect_slashes=False,
        lifespan=lifespan,
    )  # fmt: skip
    app.state.service = service
    app.add_middleware(Guard, api_key=api_key, is_local=is_loopback(service.config.host))
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    _add_openai_routes(app, service)
    _add_operation_routes(app, service)
    if STATIC.is_dir():
        _add_page(app)
    _describe(app, has_key=api_key is not None)
    return app


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    async def completions(http: Request) -> Response:
        """Continue a text."""
        return await service.complete(http, CompletionRequest, "completions")

    async def chat_completions(http: Request) -> Response:
        """Answer a conversation."""
        return await service.complete(http, ChatRequest, "chat_completions")

    for path, call, body, answer in (
        ("/v1/completions", completions, CompletionRequest, TextAnswer),
        ("/v1/chat/completions", chat_completions, ChatRequest, ChatAnswer),
    ):
        app.post(
            path,
            response_model=None,
            responses={
                200: {"model": answer, "content": {"text/event-stream": {"schema": {"type": "string"}}}},
                **_errors(*ERRORS),
            },
            # The body is read by us, so FastAPI does not know it.
            openapi_extra={
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": {"$ref": REF.format(model=body.__name__)}}},
                }
            },
        )(call)

    @app.get("/v1/models", responses=_errors(401))
    async def models() -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [service.model_card()]}

    @app.get("/v1/models/{model:path}", responses=_errors(401, 404))
    async def model(model: str) -> dict[str, Any]:
        """The one model, by name."""
        if model != service.model_name:
            raise ApiError(
                404, f"the model {model!r} is not here: this server has {service.model_name!r}",
                param="model", code="model_not_found",
            )  # fmt: skip
        return service.model_card()


def _add_operation_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses={503: {"description": "stopping or failing"}})
    async def health() -> JSONResponse:
        """Whether requests can be sent here."""
        status = service.queue.status()
        return JSONResponse({"status": status}, 200 if status == "ok" else 503, NO_CACHE)

    @app.get("/metrics", response_class=Response)
    async def metrics(http: Request) -> Response:
        """Counts for Prometheus."""
        try:
            encode, content_type = choose_encoder(http.headers.get("accept", ""))
        except (TypeError, ValueError):  # a version that is no number
            encode, content_type = choose_encoder("")
        return Response(encode(service.metrics.registry), headers={"content-type": content_type})

    @app.get("/v1/ddtree/stats", responses=_errors(401))
    async def stats() -> dict[str, Any]:
        """Counts for people."""
        return service.stats()


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(STATIC / "index.html", headers=NO_CACHE)

    app.mount("/static", StaticFiles(directory=STATIC), name="static")


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorAnswer, "description": ERRORS[status]} for status in statuses}


def _describe(app: FastAPI, *, has_key: bool) -> None:
    """Let /openapi.json have the bodies, which FastAPI does not see, and the key."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            bodies: list[tuple[type[BaseModel], JsonSchemaMode]] = [
                (CompletionRequest, "validation"),
                (ChatRequest, "validation"),
            ]
            _, definitions = models_json_schema(bodies, ref_template=REF)
            components = schema.setdefault("components", {})
            components.setdefault("schemas", {}).update(definitions["$defs"])
            if has_key:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                for path, operations in schema["paths"].items():
                    if path.startswith("/v1/"):
                        for operation in operations.values():
                            operation["security"] = [{"key": []}]
            app.openapi_schema = schema
        return app.openapi_schema

    # FastAPI's own way to extend a schema: https://fastapi.tiangolo.com/how-to/extending-openapi/
    app.openapi = openapi  # type: ignore[method-assign]


async def _answer_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _answer_http_error(http: Request, error: Exception) -> Response:
    """What the router refuses: an unknown path, a method that a path does not have."""
    assert isinstance(error, HTTPException)
    method, path = http.method, http.url.path
    said = {404: f"there is nothing at {path}", 405: f"{path} does not take {method}"}
    message = said.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _answer_nobody(http: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
