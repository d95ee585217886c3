"""`ddtree serve`: the engine behind an OpenAI-compatible API."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Annotated

import typer

from ddtree.cli import loading
from ddtree.cli.console import messages, plain_text
from ddtree.cli.exit_codes import INTERRUPTED
from ddtree.cli.options import BudgetFlag, ModeFlag, Output, Panel, expand_settings
from ddtree.config import EngineConfig, Mode, ServerConfig, parse_budget
from ddtree.errors import MissingExtraError

logger = logging.getLogger(__name__)

EPILOG = """Examples:

ddtree serve

ddtree serve --port 9000 --verbose

DDTREE_API_KEY=... ddtree serve --host 0.0.0.0 --api-key-env DDTREE_API_KEY"""

SERVE_PACKAGES = ("fastapi", "prometheus_client", "pydantic", "starlette", "uvicorn")
LISTEN_FIELDS = ("host", "port", "served_model_name", "api_key_env", "api_key_file")
LIMIT_FIELDS = tuple(
    spec.name for spec in fields(ServerConfig) if spec.name not in (*LISTEN_FIELDS, "mode", "node_budget")
)


@expand_settings
def serve(
    *,
    listen: Annotated[ServerConfig, Panel("Server", ServerConfig(), LISTEN_FIELDS)],
    limits: Annotated[ServerConfig, Panel("Limits", ServerConfig(), LIMIT_FIELDS)],
    mode: ModeFlag = Mode.TREE,
    budget: BudgetFlag = "auto",
    engine: Annotated[EngineConfig, Panel("Engine", EngineConfig())],
    output: Annotated[Output, Panel("Output", Output(), ("quiet", "verbose"))],
) -> None:
    """Serve the model behind an OpenAI-compatible API, with a page at / that draws the trees.

    It decodes one sequence at a time, by design; other requests wait in order. Mode and budget are those
    of requests that name none. SIGTERM and Ctrl-C let running requests finish.
    """
    config = replace(
        listen,
        **{name: getattr(limits, name) for name in LIMIT_FIELDS},
        mode=mode,
        node_budget=parse_budget(budget, "--budget"),
    )
    loading.check_drafter(engine, mode)
    with messages(output) as stderr:

        def on_ready(url: str) -> None:
            stderr.print(
                plain_text(f"{engine.model} at {url}, one request at a time; Ctrl-C stops"), soft_wrap=True
            )

        exit_signal = _serve(engine, config, on_ready)
    if exit_signal == signal.SIGINT:
        raise typer.Exit(INTERRUPTED)


def _serve(engine: EngineConfig, config: ServerConfig, on_ready: Callable[[str], None]) -> int:
    """Serve until a signal, and return its number; mistakes show before the model is loaded."""
    try:
        from ddtree.server import api_key, listen
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in SERVE_PACKAGES:
            raise
        raise MissingExtraError(package, "serve") from error
    key = api_key.load_api_key(config)
    with listen.bind(config) as bound:
        for warning in api_key.exposure_warnings(config, key):
            logger.warning(warning)
        return listen.serve(loading.load_engine(engine), config, key, bound, on_ready)
