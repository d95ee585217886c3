"""`ddtree bench`: measures engines side by side."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from ddtree.bench_config import EMBEDDED, SGLANG, BenchConfig, is_url
from ddtree.cli import loading
from ddtree.cli.console import StdoutConsole, messages, plain_text, write, write_json
from ddtree.cli.exit_codes import ARMS_FAILED, TERMINATED
from ddtree.cli.options import Output, Panel, expand_settings, given_flags, refuse_unread
from ddtree.cli.train_progress import BarReporter, LineReporter
from ddtree.errors import MissingExtraError, counted

if TYPE_CHECKING:
    from ddtree.bench.runner import BenchResult, Plan
    from ddtree.bench.summary import ArmFigures, Setting

EPILOG = """Examples:

ddtree bench --output run.jsonl

ddtree bench --output run.jsonl --budget 8,16,32,64 --set gsm8k --prompts 16 --temperature 0,1

ddtree bench --output run.jsonl --engine sglang --concurrency 1,8 --sglang-args "--mem-fraction-static 0.5"

ddtree bench --output run.jsonl --engine http://127.0.0.1:8080/v1 --set prompts.jsonl"""

ENGINE, SERVERS = "Engine", "Servers"
TITLES = {
    **dict.fromkeys(("model", "drafter", "device", "dtype", "threads", "max_context_tokens"), ENGINE),
    **dict.fromkeys(
        (
            "sglang_python", "sglang_args", "memory_share", "servers_at_once", "start_timeout_s",
            "request_timeout_s", "api_key_env",
        ),
        SERVERS,
    ),
}  # fmt: skip
# Who reads a setting that not every engine reads; URLS stands for all servers that run already.
URLS = "a URL"
READERS = {
    **dict.fromkeys(("drafter", "device", "dtype"), (EMBEDDED, SGLANG)),
    **dict.fromkeys(("threads", "max_context_tokens"), (EMBEDDED,)),
    **dict.fromkeys(
        ("sglang_python", "sglang_args", "memory_share", "servers_at_once", "start_timeout_s"), (SGLANG,)
    ),
    "request_timeout_s": (SGLANG, URLS),
    "api_key_env": (URLS,),
}
MISSING = "-"
COLUMNS = ("tokens/s", "x plain", "x chain", "accept length", "first token ms", "gap p50/p99 ms", "right")
PACKAGES = (*loading.ENGINE_PACKAGES, "httpx")


@expand_settings
def bench(
    *,
    context_of_call: typer.Context,
    run: Annotated[
        Path, typer.Option("--output", help="the run's file, JSON Lines; a run that is there is gone on with",
                           metavar="FILE", rich_help_panel="Benchmark"),
    ],
    outputs: Annotated[
        Path | None,
        typer.Option(help="write the finished outputs to this file, for ddtree replay (of several engines a "
                     "file each, with the engine in its name)", metavar="FILE", rich_help_panel="Benchmark"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show what would be measured, and measure nothing",
                           rich_help_panel="Benchmark"),
    ] = False,
    config: Annotated[BenchConfig, Panel("Benchmark", BenchConfig(), titles=TITLES)],
    output: Annotated[Output, Panel("Output", Output())],
) -> None:  # fmt: skip
    """Measure plain decoding, chains and trees side by side: engines of this machine and running servers.

    Arms take turns, so that whatever slows the machine down slows all of them. Each measured cell is on disk
    before the next begins: after Ctrl-C or a crash the same command goes on. Arms, budgets, sets, repeats and
    the like can be added to a run; a run of other models or prompts is refused.

    Ends with 0, or 1 when an engine did not start or died and the others were measured. Then: ddtree report.
    """
    _refuse_unread(given_flags(context_of_call), config)
    with messages(output) as stderr, _needed_packages():
        from ddtree.bench.engines import Engines
        from ddtree.bench.runner import check_files, log_folder, measure, plan_bench

        engines = Engines(config, log_folder(run), loading.load_engine)
        plan = plan_bench(config, run, engines)
        check_files(plan, run, outputs)
        for notice in plan.notices:
            stderr.print(plain_text(notice), soft_wrap=True)
        if dry_run:
            _show_plan(plan, as_json=output.as_json)
            return
        stderr.print(plain_text(plan_line(plan)), soft_wrap=True)
        with _told_interrupts(run, stderr), _reporter(stderr) as reporter:
            result = measure(plan, run, engines, outputs, reporter)
        _show(result, run, stderr, as_json=output.as_json)
    if result.failures:
        raise typer.Exit(ARMS_FAILED)


def _refuse_unread(given: Mapping[str, str], config: BenchConfig) -> None:
    """Refuse flags that none of the engines reads."""
    engines = {URLS if is_url(engine) else engine for engine in config.engines}
    unread = {name for name, readers in READERS.items() if engines.isdisjoint(readers)}
    refuse_unread(given, unread, f"with --engine {','.join(config.engines)}")


@contextmanager
def _needed_packages() -> Iterator[None]:
    """A package that is not installed becomes the error that names its extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if isinstance(error, MissingExtraError) or package not in PACKAGES:
            raise
        raise MissingExtraError(package, "bench") from error


@contextmanager
def _told_interrupts(run: Path, stderr: Console) -> Iterator[None]:
    """Ctrl-C and SIGTERM close the engines and say that nothing is lost."""

    def on_terminate(signal_number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        stderr.print(
            plain_text(f"stopped; what was measured is in {run}, and the same command goes on"),
            soft_wrap=True,
        )
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _reporter(stderr: Console) -> Iterator[BarReporter | LineReporter]:
    with BarReporter(stderr) if stderr.is_terminal else LineReporter(stderr) as reporter:
        reporter.stage("bench")
        yield reporter


def plan_line(plan: Plan) -> str:
    """What is to come, in one line."""
    are = "is" if plan.num_done == 1 else "are"
    done = f", {counted(plan.num_done, 'cell')} {are} measured already" if plan.num_done else ""
    where = f", on {plan.header.device}" if plan.config.has_own_engines else ""
    return (
        f"{counted(len(plan.arms), 'arm')} on {', '.join(plan.sets)}: {counted(plan.num_cells, 'cell')}, "
        f"{counted(plan.num_requests, 'request')} of at most {counted(plan.config.max_tokens, 'token')}"
        f"{where}{done}"
    )


def _show_plan(plan: Plan, *, as_json: bool) -> None:
    cells = [group.key(arm) for group in plan.groups for arm in group.arms]
    if as_json:
        fields = ("arm", "prompt_set", "concurrency", "temperature", "repeat")
        write_json(
            {
                "cells": [{name: getattr(key, name) for name in fields} for key in cells],
                "num_done": plan.num_done,
                "num_requests": plan.num_requests,
            }
        )
        return
    for key in cells:
        write(
            f"{key.arm}: {key.prompt_set}, T={key.temperature:g}, c={key.concurrency}, "
            f"repeat {key.repeat + 1} of {plan.config.repeats}\n"
        )
    write(plan_line(plan) + "\n")


def _show(result: BenchResult, run: Path, stderr: Console, *, as_json: bool) -> None:
    from ddtree.bench.summary import summarise

    rows = summarise(result.run)
    if as_json:
        write_json(
            {"run": str(run), "failures": list(result.failures), "arms": [row.to_json() for row in rows]}
        )
    else:
        console = StdoutConsole()
        settings = dict.fromkeys(row.setting for row in rows)
        for setting in settings:
            console.print(_table(setting, [row for row in rows if row.setting == setting]))
    if result.num_left_out:
        left_out, were = counted(result.num_left_out, "output"), "was" if result.num_left_out == 1 else "were"
        stderr.print(f"{left_out} without token ids {were} left out of the outputs file")
    for line in result.failures:
        stderr.print(plain_text(f"not measured: {line}"), soft_wrap=True)


def _table(setting: Setting, rows: Sequence[ArmFigures]) -> Table:
    title = f"{setting.prompt_set}, T={setting.temperature:g}, concurrency {setting.concurrency}"
    table = Table(title=plain_text(title), title_justify="left")
    table.add_column("arm", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(plain_text(row.label), *_cells(row))
    return table


def _cells(row: ArmFigures) -> Iterator[str]:
    speed, gaps, right = row.tokens_per_s, row.between_tokens_ms, row.accuracy
    yield MISSING if speed is None else f"{_short(speed.median)} ({_short(speed.low)}-{_short(speed.high)})"
    yield MISSING if row.to_plain is None else f"{row.to_plain.value:.2f}"
    yield MISSING if row.to_chain is None else f"{row.to_chain.value:.2f}"
    yield MISSING if row.accept_length is None else f"{row.accept_length:.2f}"
    yield MISSING if row.first_token_ms is None else _short(row.first_token_ms)
    yield f"{_short(gaps['50'])}/{_short(gaps['99'])}" if {"50", "99"} <= gaps.keys() else MISSING
    yield MISSING if right is None else f"{right.found}/{right.total}"


def _short(value: float) -> str:
    """Three digits or more."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
