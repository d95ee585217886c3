"""`ddtree compare`: whether two runs of the same requests differ by more than rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ddtree.cli.console import StdoutConsole, write_json
from ddtree.cli.exit_codes import TEXTS_DIFFER
from ddtree.cli.replay import (
    DeviceFlag,
    EpsFlag,
    EpsFromFlag,
    JsonFlag,
    OrderFlag,
    replay_options,
    reported,
    show,
)

EPILOG = """Examples:

ddtree compare ar-float32.jsonl tree-float32.jsonl

ddtree compare embedded.jsonl sglang.jsonl --model Qwen/Qwen3-8B --eps-from plain.jsonl

ddtree compare before.jsonl after.jsonl --json"""

JudgeFlag = Annotated[
    str | None,
    typer.Option("--model", help="target to judge places where texts part: a known name, a local folder or a "
                 "Hugging Face name (default: none is loaded, the traces' margins judge)", metavar="NAME",
                 rich_help_panel="Target"),
]  # fmt: skip
JudgeDtypeFlag = Annotated[
    str | None,
    typer.Option("--dtype", help="number format that --model is loaded in: float32, bfloat16 or float16 "
                 "(default: the traces', float32 where they differ)", metavar="NAME",
                 rich_help_panel="Target"),
]  # fmt: skip


def compare(
    a: Annotated[Path, typer.Argument(help="a trace or an outputs file", show_default=False)],
    b: Annotated[Path, typer.Argument(help="another one of the same requests", show_default=False)],
    *,
    model: JudgeFlag = None,
    dtype: JudgeDtypeFlag = None,
    device: DeviceFlag = "auto",
    engine: OrderFlag = None,
    eps: EpsFlag = None,
    eps_from: EpsFromFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare two runs of the same requests: texts, accept lengths, trees, draws.

    Where two texts of a request part, the margin there says whether rounding explains it: that of the traces,
    or with --model of the target itself. Draws of different seeds are compared by a G-test. Runs of other
    prompts, sampling parameters or targets are refused. The checks are described in docs/compare.md.

    Ends with 0 without a difference, 1 with one that is more than rounding or of which nothing can be said,
    2 for a mistake in the request.
    """
    with reported(as_json=as_json):
        from ddtree.trace.files import compare_files
        from ddtree.trace.text import accept_rows, compare_lines

        options = replay_options(model, dtype, device, engine, eps, eps_from)
        made = compare_files(a, b, options)
    if as_json:
        write_json(made.to_json())
    else:
        rows = accept_rows(made)
        if rows:
            StdoutConsole().print(_table(rows))
        show(compare_lines(made))
    if made.is_different:
        raise typer.Exit(TEXTS_DIFFER)


def _table(rows: list[tuple[str, str, str]]) -> Table:
    table = Table(title="acceptance", title_justify="left")
    table.add_column("")
    for name in ("A", "B"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
