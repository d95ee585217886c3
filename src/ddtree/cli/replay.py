"""`ddtree replay`: whether every token of finished outputs is the target's own choice."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree.cli.console import StdoutConsole, plain_text, write, write_json
from ddtree.cli.exit_codes import TEXTS_DIFFER
from ddtree.cli.loading import ENGINE_PACKAGES
from ddtree.config import check
from ddtree.errors import DDTreeError, MissingExtraError

if TYPE_CHECKING:
    from ddtree.trace.files import ReplayOptions

EPILOG = """Examples:

ddtree replay trace.jsonl

ddtree replay outputs.jsonl --model Qwen/Qwen3-8B --dtype bfloat16 --eps-from plain.jsonl

ddtree replay outputs.jsonl --model smollm2-135m --dtype float32 --json"""

ModelFlag = Annotated[
    str | None,
    typer.Option(help="target: a known name, a local folder or a Hugging Face name (default: the trace's)",
                 metavar="NAME", rich_help_panel="Target"),
]  # fmt: skip
DtypeFlag = Annotated[
    str | None,
    typer.Option(help="number format of the engine: float32, bfloat16 or float16 (default: the trace's)",
                 metavar="NAME", rich_help_panel="Target"),
]  # fmt: skip
DeviceFlag = Annotated[
    str, typer.Option(help="where the target runs: auto, cpu, cuda or cuda:N", rich_help_panel="Target")
]
OrderFlag = Annotated[
    str | None,
    typer.Option("--engine", help="whose order of processing steps chose the tokens: embedded (ddtree serve "
                 "too) or sglang (default: what the file says, sglang without)", metavar="NAME",
                 rich_help_panel="Outputs"),
]  # fmt: skip
EpsFlag = Annotated[
    float | None,
    typer.Option(help="largest gap that is rounding, in logits (default: 0.001 in float32)", metavar="X",
                 rich_help_panel="Rounding"),
]  # fmt: skip
EpsFromFlag = Annotated[
    Path | None,
    typer.Option(help="measure it: twice the largest gap of plain decoding's greedy outputs in this file, at "
                 "least 0.25 in bfloat16 and 0.03125 in float16", metavar="FILE", rich_help_panel="Rounding"),
]  # fmt: skip
JsonFlag = Annotated[
    bool, typer.Option("--json", help="write one JSON object to standard output", rich_help_panel="Output")
]


def replay(
    outputs: Annotated[
        Path,
        typer.Argument(help="a trace, or JSON Lines of finished outputs of any engine", show_default=False),
    ],
    *,
    model: ModelFlag = None,
    dtype: DtypeFlag = None,
    device: DeviceFlag = "auto",
    engine: OrderFlag = None,
    eps: EpsFlag = None,
    eps_from: EpsFromFlag = None,
    as_json: JsonFlag = False,
) -> None:  # fmt: skip
    """Tell whether every token of finished outputs is the target's own choice.

    Each output is teacher-forced through plain prefill of the target, and every token's gap to the target's
    choice there is measured: greedy to the largest logit, sampled to the draw of the noise that its seed
    keys. The files are described in docs/compare.md.

    Ends with 0 if every token is, 1 if one is not, an output ended where it should not have, or the rounds
    or log-probabilities of a trace are not what they should be; 2 for a mistake in the request.
    """
    with reported(as_json=as_json):
        from ddtree.trace.files import replay_file
        from ddtree.trace.text import replay_lines

        options = replay_options(model, dtype, device, engine, eps, eps_from)
        report = replay_file(outputs, options)
    if as_json:
        write_json(report.to_json())
    else:
        show(replay_lines(report))
    if not report.is_clean:
        raise typer.Exit(TEXTS_DIFFER)


def replay_options(
    model: str | None, dtype: str | None, device: str, engine: str | None, eps: float | None,
    eps_from: Path | None,
) -> ReplayOptions:  # fmt: skip
    """The options of replays and comparisons, from flags."""
    from ddtree.trace.files import ReplayOptions
    from ddtree.trace.outputs import ORDERS
    from ddtree.tree.noise import keyed_gumbel

    order = next((known for known in ORDERS if known == engine), None)
    check(engine is None or order is not None, "--engine", engine, f"one of {', '.join(ORDERS)}")
    return ReplayOptions(model, dtype, eps, eps_from, order, device, keyed_gumbel)


@contextmanager
def reported(*, as_json: bool) -> Iterator[None]:
    """A package that is not installed becomes the error that names its extra; errors are JSON too."""
    # Its advice is for those who program it; ours comes as errors.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        with needed_packages():
            yield
    except DDTreeError as error:
        if as_json:
            write_json({"error": str(error)})
        raise


@contextmanager
def needed_packages() -> Iterator[None]:
    """A package that is not installed becomes the error that names its extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ENGINE_PACKAGES:
            raise
        raise MissingExtraError(package, "engine") from error


def show(lines: Iterable[str]) -> None:
    """Folded to a terminal; in a pipe a sentence is a line."""
    console = StdoutConsole()
    for line in lines:
        if console.is_terminal:
            style = "bold red" if line.startswith(("WRONG", "DIFFERENT", "UNDECIDED")) else ""
            console.print(plain_text(line), style=style)
        else:
            write(f"{plain_text(line)}\n")
