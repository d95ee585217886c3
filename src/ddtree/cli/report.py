"""`ddtree report`: a page, plots and tables from benchmark runs, and a page to step through a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree.cli.console import plain_text, write
from ddtree.config import check
from ddtree.errors import ConfigError

EPILOG = """Examples:

ddtree report run.jsonl

ddtree report embedded.jsonl sglang.jsonl --output report --paper

ddtree report --trace trace.jsonl --model Qwen/Qwen3-8B

ddtree report servers.jsonl --plain http://127.0.0.1:30000/v1"""

OutputFlag = Annotated[
    str,
    typer.Option(
        "--output",
        help="folder of the report; made where it is not there",
        metavar="PATH",
        rich_help_panel="Output",
    ),
]
PlainFlag = Annotated[
    str | None,
    typer.Option(
        help="arm that others are compared with where their engine has no ar arm, such as a server of plain "
        "decoding",
        metavar="ARM",
        rich_help_panel="Report",
    ),
]
PaperFlag = Annotated[
    bool,
    typer.Option(
        "--paper",
        help="draw the DDTree paper's own figures into the plots over node budget",
        rich_help_panel="Report",
    ),
]
TraceFlag = Annotated[
    Path | None,
    typer.Option(
        help="a trace (docs/traces.md): adds trace.html, which steps through its rounds",
        metavar="FILE",
        rich_help_panel="Trace",
    ),
]
ModelFlag = Annotated[
    str | None,
    typer.Option(
        help="whose tokenizer turns the trace's tokens into text (default: the trace's target, if it lies on "
        "this machine)",
        metavar="NAME",
        rich_help_panel="Trace",
    ),
]
RunsArgument = Annotated[
    list[Path],
    typer.Argument(
        help="files that ddtree bench wrote, of one target, prompts and max_tokens", show_default=False
    ),
]


def report(
    runs: RunsArgument = [],  # noqa: B006 (typer makes a new one a call)
    *,
    output: OutputFlag = "report",
    plain: PlainFlag = None,
    paper: PaperFlag = False,
    trace: TraceFlag = None,
    model: ModelFlag = None,
) -> None:
    """Make a report of benchmark runs: index.html, report.md, report.json and the plots as PNG.

    The page holds its plots and needs no network. It says how fast each arm was against plain decoding and
    the chain, which node budget to set, how the runs were made, and what others published. docs/bench.md says
    how to read it.
    """
    if not runs and trace is None:
        raise ConfigError("give the files of runs that ddtree bench wrote, or --trace FILE")
    check(model is None or trace is not None, "--model", model, "only with --trace")
    check(output.strip() != "", "--output", output, "a folder, such as report")
    for path in _written(runs, Path(output), trace, plain, model, paper=paper):
        write(f"{plain_text(str(path))}\n")


def _written(
    runs: list[Path], output: Path, trace: Path | None, plain: str | None, model: str | None, *, paper: bool
) -> list[Path]:
    from ddtree.bench.report import TRACE_PAGE, ReportOptions, make_folder, write_report
    from ddtree.bench.trace_view import write_trace_page

    make_folder(output)
    paths = []
    if trace is not None:
        page = output / TRACE_PAGE
        write_trace_page(trace, page, model=model)
        paths.append(page)
    if runs:
        options = ReportOptions(plain=plain, with_paper=paper, has_trace_page=trace is not None)
        paths += write_report(runs, output, options)
    return paths
