"""`ddtree generate`: continue one prompt."""

from __future__ import annotations

import logging
import platform
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddtree.cli import loading
from ddtree.cli.console import messages, plain_text, write, write_json
from ddtree.cli.exit_codes import INTERRUPTED
from ddtree.cli.options import BudgetFlag, ModeFlag, Output, Panel, expand_settings
from ddtree.cli.prompts import read_prompt
from ddtree.config import EngineConfig, Mode, SamplingParams, parse_budget
from ddtree.provenance import package_version
from ddtree.trace_format import Detail

if TYPE_CHECKING:
    from ddtree.engine.request import Generation, Request
    from ddtree.engine.stream import TokenStream
    from ddtree.trace.record import RecordedStream, TraceRecorder

logger = logging.getLogger(__name__)

LogprobsFlag = Annotated[
    int | None,
    typer.Option(
        help="with --json: each token's log-probability and those of the N (0 to 20) most likely tokens",
        metavar="N",
        rich_help_panel="Output",
        show_default=False,
    ),
]
TraceFlag = Annotated[
    Path | None,
    typer.Option(
        help="write what each round did to this file, as JSON Lines",
        rich_help_panel="Output",
        show_default=False,
    ),
]
TraceDetailFlag = Annotated[
    Detail,
    typer.Option(
        help="with --trace: what rounds committed, or their whole trees with target log-probabilities too",
        rich_help_panel="Output",
    ),
]
EPILOG = """Examples:

ddtree generate "Why is the sky blue?"

ddtree generate --file notes.txt --max-tokens 400 --temperature 0.7 --seed 1

echo "2, 3, 5, 7," | ddtree generate --raw --mode chain --json"""


@expand_settings
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="the prompt; left out or - means standard input", show_default=False)
    ] = None,
    *,
    file: Annotated[
        Path | None, typer.Option(help="read the prompt from this file (UTF-8)", rich_help_panel="Prompt")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="use the text as it is, no chat template", rich_help_panel="Prompt")
    ] = False,
    mode: ModeFlag = Mode.TREE,
    budget: BudgetFlag = "auto",
    sampling: Annotated[SamplingParams, Panel("Sampling", SamplingParams())],
    engine: Annotated[EngineConfig, Panel("Engine", EngineConfig())],
    output: Annotated[Output, Panel("Output", Output())],
    logprobs: LogprobsFlag = None,
    trace: TraceFlag = None,
    trace_detail: TraceDetailFlag = Detail.SUMMARY,
) -> None:
    """Continue a prompt, faster through a draft tree, with the text that plain decoding gives.

    The text alone goes to standard output, as it is made; figures go to standard error.
    """
    from ddtree.engine.request import Request, check_top_logprobs

    text = read_prompt(prompt, file)
    node_budget = parse_budget(budget, "--budget")
    check_top_logprobs(logprobs, "--logprobs")
    if mode is Mode.AR and engine.drafter == "auto":
        engine = replace(engine, drafter="none")
    loading.check_drafter(engine, mode)
    with messages(output) as stderr, open_recorder(trace, trace_detail) as recorder:
        if node_budget != "auto" and mode is not Mode.TREE:
            logger.warning("--budget %s has no effect in mode %s", node_budget, mode)
        if logprobs is not None and not output.as_json:
            logger.warning("--logprobs %d has no effect without --json", logprobs)
            logprobs = None
        prepared = loading.load_engine(engine)
        request = Request(
            prepared.encode(text, chat=not raw), sampling, mode, node_budget, top_logprobs=logprobs
        )
        stream = recorder.stream(prepared, request) if recorder else prepared.stream(request)
        with cancel_on_interrupt(stream) as interrupted:
            for chunk in stream:
                if not output.as_json:
                    write(chunk.text)
        generation = stream.result()
        if output.as_json:
            write_json(report(request, generation, engine))
        elif not generation.text.endswith("\n"):
            write("\n")
        stderr.print(plain_text(summary(generation)), style="dim", soft_wrap=True)
    if interrupted.is_set():
        raise typer.Exit(INTERRUPTED)


def open_recorder(file: Path | None, detail: Detail) -> AbstractContextManager[TraceRecorder | None]:
    """The recorder of a trace, made before anything is loaded; None without a file."""
    if file is None:
        if detail is not Detail.SUMMARY:
            logger.warning("--trace-detail %s has no effect without --trace", detail)
        return nullcontext()
    from ddtree.trace.record import TraceRecorder

    return TraceRecorder(file, detail)


@contextmanager
def cancel_on_interrupt(stream: TokenStream | RecordedStream) -> Iterator[threading.Event]:
    """The first Ctrl-C ends the request after its round and sets the event; a second one ends the program."""
    interrupted = threading.Event()

    def on_interrupt(signal_number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupted.set()
        stream.cancel()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def summary(generation: Generation) -> str:
    """One line for the reader: speed, rounds, why it ended."""
    stats = generation.stats
    return (
        f"{stats.new_tokens} tokens, {stats.tokens_per_s:.1f} tokens/s after a prefill of "
        f"{stats.prefill_s * 1e3:.0f} ms ({stats.prompt_tokens} tokens); {stats.verify_ct} rounds, "
        f"accept length {stats.accept_length:.2f}; ended by {generation.finish_reason}"
    )


def report(request: Request, generation: Generation, config: EngineConfig) -> dict[str, Any]:
    """What `--json` writes."""
    from ddtree import __version__

    asked = {} if request.top_logprobs is None else {"logprobs": logprobs_report(generation)}
    return {
        "text": generation.text,
        "tokens": list(generation.tokens),
        "finish_reason": generation.finish_reason.value,
        "mode": request.mode.value,
        "budget": request.node_budget if request.mode is Mode.TREE else None,
        "model": config.model,
        **asked,
        "stats": stats_report(generation),
        "versions": {
            "ddtree": __version__,
            "python": platform.python_version(),
            "torch": package_version("torch"),
            "transformers": package_version("transformers"),
        },
    }


def logprobs_report(generation: Generation) -> list[dict[str, Any]]:
    """The log-probabilities of each new token."""
    return [
        {
            "token": entry.token,
            "log_prob": entry.log_prob,
            "top": [{"token": token, "log_prob": log_prob} for token, log_prob in entry.top],
        }
        for entry in generation.logprobs
    ]


def stats_report(generation: Generation) -> dict[str, Any]:
    """The figures of one request, units in their names."""
    stats = generation.stats
    return {
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "rounds": stats.verify_ct,
        "accept_length": round(stats.accept_length, 4),
        "accept_histogram": {str(length): count for length, count in sorted(stats.accept_histogram.items())},
        "tokens_per_s": round(stats.tokens_per_s, 3),
        "prefill_ms": round(stats.prefill_s * 1e3, 3),
        "decode_ms": round(stats.decode_s * 1e3, 3),
    }
