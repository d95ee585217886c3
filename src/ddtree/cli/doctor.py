"""`ddtree doctor`: whether DDTREE will work here, and what to do where it will not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ddtree.cli.console import StdoutConsole, write, write_json
from ddtree.cli.exit_codes import DOES_NOT_FIT
from ddtree.errors import ConfigError

if TYPE_CHECKING:
    from ddtree.doctor.plan import Plan
    from ddtree.doctor.report import Report

STYLES = {"ok": "green", "warn": "yellow", "error": "bold red"}

EPILOG = """Examples:

ddtree doctor

ddtree doctor --model Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 --max-requests 16 --context 32768

ddtree doctor --model smollm2-135m --compute-capability 12.0 --gpu-memory-gb 95 --json

ddtree doctor --sglang-wheel sglang-0.5.23-cp312-cp312-manylinux_2_34_x86_64.whl"""


def doctor(
    *,
    sglang_wheel: Annotated[
        str | None,
        typer.Option(
            help="look only at this wheel, source tree or site-packages folder (default: this machine "
            "and the SGLang that would be imported)",
            metavar="PATH", rich_help_panel="SGLang",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="target: a known name, a local folder or a Hugging Face name; asks about the "
                     "pair, its memory and its flags", rich_help_panel="Pair"),
    ] = None,
    drafter: Annotated[
        str,
        typer.Option(help="DFlash drafter: auto (the one shipped for the model), a folder or a name",
                     rich_help_panel="Pair"),
    ] = "auto",
    weights_gb: Annotated[
        float | None,
        typer.Option(help="the target's weights in GiB, where its files are not here", metavar="X",
                     rich_help_panel="Pair"),
    ] = None,
    node_budget: Annotated[
        int | None,
        typer.Option(help="nodes of the tree, root not counted (default: the plugin's settings)", metavar="N",
                     rich_help_panel="Plan"),
    ] = None,
    max_requests: Annotated[
        int | None,
        typer.Option(help="requests decoded at once (default: 48)", metavar="N", rich_help_panel="Plan"),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="tokens of a request, prompt and answer (default: the target's longest)",
                     metavar="N", rich_help_panel="Plan"),
    ] = None,
    tp: Annotated[
        int, typer.Option(help="GPUs over which the target is split", metavar="N", rich_help_panel="Plan")
    ] = 1,
    kv_dtype: Annotated[
        str, typer.Option(help="SGLang's --kv-cache-dtype", metavar="NAME", rich_help_panel="Plan")
    ] = "auto",
    mem_fraction: Annotated[
        float | None,
        typer.Option(help="SGLang's --mem-fraction-static (default: the largest that leaves room)",
                     metavar="X", rich_help_panel="Plan"),
    ] = None,
    gpu_memory_gb: Annotated[
        float | None,
        typer.Option(help="memory of each GPU in GiB (default: this machine's)", metavar="X",
                     rich_help_panel="Plan"),
    ] = None,
    compute_capability: Annotated[
        str | None,
        typer.Option(help="answer for a GPU of this compute capability, such as 9.0 or 12.0 (default: this "
                     "machine's)", metavar="X.Y", rich_help_panel="Plan"),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="write one JSON object to standard output", rich_help_panel="Output"),
    ] = False,
) -> None:  # fmt: skip
    """Tell whether DDTREE will work here, and what to do where it will not.

    Looks at torch and the GPUs, the SGLang that would be imported and whether its files were changed, the
    hook contract, the plugin's settings and attention backends; with --model also at the pair, its memory
    and the flags to start it with. Nothing of SGLang is imported, and no weights are downloaded.

    Ends with 0 if nothing stops DDTREE (warnings do not), 1 if something does, 2 for a mistake in the
    request. With --json a request that is not allowed gives {"error": "..."}; one that cannot be parsed
    gives nothing on standard output.
    """
    try:
        from ddtree.doctor.plan import Plan

        plan = Plan(
            model=model, drafter=drafter, node_budget=node_budget, max_requests=max_requests,
            context_tokens=context, gpu_memory_gb=gpu_memory_gb, mem_fraction=mem_fraction, tp_size=tp,
            kv_dtype=kv_dtype, weights_gb=weights_gb, compute_capability=compute_capability,
        )  # fmt: skip
        report = _examine(plan, sglang_wheel)
    except ConfigError as error:
        if as_json:
            write_json({"error": str(error)})
        raise
    if as_json:
        write_json(report.to_json())
    else:
        _show(report)
    if not report.fits:
        raise typer.Exit(DOES_NOT_FIT)


def _examine(plan: Plan, path: str | None) -> Report:
    """The report on this machine, or on the SGLang at a path alone."""
    from ddtree.doctor import examine
    from ddtree.doctor.plan import Plan

    if path is None:
        return examine.examine(plan, examine.Surroundings())
    if plan != Plan():
        raise ConfigError(
            "--sglang-wheel looks at an SGLang alone: leave out the flags about a pair and a plan, or it"
        )
    return examine.examine_source(_expanded(path))


def _expanded(path: str) -> Path:
    """A path as it was typed, with "~" and "~user" written out.

    Raises:
        ConfigError: it is empty, or there is no such user.
    """
    from ddtree.sglang_plugin.contract_files import WANTED

    if not path:
        raise ConfigError(f"--sglang-wheel is empty: give {WANTED}")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"--sglang-wheel {path!r} cannot be read: {error} Give {WANTED}") from None


def _show(report: Report) -> None:
    """Folded to a terminal; in a pipe a sentence is a line."""
    from ddtree.doctor.text import report_lines

    console = StdoutConsole()
    titles = {section.title for section in report.sections}
    for level, line in report_lines(report, console.width if console.is_terminal else None):
        # The first line of a finding leaves room for its level.
        shown = f"  {level:<6}{line[8:]}" if level else line
        if console.is_terminal:
            text = Text(shown)
            text.stylize(
                STYLES[level] if level else "bold" if line in titles else "", 0, 8 if level else None
            )
            console.print(text, soft_wrap=True)
        else:
            write(f"{shown}\n")
