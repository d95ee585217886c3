"""`ddtree tune`: which node budget to set, by a minute of measuring or from a benchmark run."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ddtree.cli import loading
from ddtree.cli.console import StdoutConsole, messages, plain_text, write, write_json
from ddtree.cli.exit_codes import INTERRUPTED
from ddtree.cli.options import Output, Panel, expand_settings, given_flags, refuse_unread
from ddtree.cli.train_progress import BarReporter
from ddtree.config import EngineConfig, Mode
from ddtree.errors import ConfigError
from ddtree.tune_config import TuneConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddtree.bench.elsewhere import Elsewhere
    from ddtree.bench.recommendation import GroupAdvice, Recommendation
    from ddtree.tree.plan_rates import Evidence

EPILOG = """Examples:

ddtree tune

ddtree tune --seconds 300 --set prompts.jsonl --temperature 0.7

ddtree tune --from run.jsonl

ddtree tune --from run.jsonl --gpu H200 --concurrency 1,8,32"""

ELSEWHERE = "Another machine or load"


@expand_settings
def tune(
    *,
    context_of_call: typer.Context,
    config: Annotated[TuneConfig, Panel("Calibration", TuneConfig())],
    run: Annotated[
        Path | None,
        typer.Option("--from", help="measure nothing; read this run of ddtree bench, of whichever engines",
                     metavar="RUN", rich_help_panel="Calibration"),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="predict SGLang on this GPU, by the cost model: A100, H200, B200 or RTX PRO 6000",
                     metavar="NAME", rich_help_panel=ELSEWHERE),
    ] = None,
    concurrency: Annotated[
        str,
        typer.Option(help="requests at once to tell of, predicted where they were not measured (needs "
                     "--from or --gpu)", metavar="N,...", rich_help_panel=ELSEWHERE),
    ] = "",
    tp: Annotated[
        int, typer.Option(help="with --gpu: GPUs over which the target is split", metavar="N",
                          rich_help_panel=ELSEWHERE),
    ] = 1,
    context: Annotated[
        int, typer.Option(help="with --gpu: tokens of a request's context", metavar="N",
                          rich_help_panel=ELSEWHERE),
    ] = 1024,
    engine: Annotated[EngineConfig, Panel("Engine", EngineConfig())],
    output: Annotated[Output, Panel("Output", Output())],
) -> None:  # fmt: skip
    """Say which plan to set, plain decoding, the chain or a tree of some budget, and what it gains.

    Measures the embedded engine for a minute on this machine, or with --from reads a run of ddtree bench, of
    SGLang too. The answer has 95 % intervals, the flags to paste, and "measure longer" where it is within the
    noise. A tree is set only where it surely pays; docs/bench.md says how that is decided.

    Ctrl-C ends the measuring early: the answer is from what was measured so far, and the exit code 130.
    """
    given = given_flags(context_of_call)
    _refuse_unread(given, is_read=run is not None, is_elsewhere=gpu is not None)
    loads = _loads(concurrency)
    if loads and run is None and gpu is None:
        raise ConfigError(
            f"--concurrency={concurrency!r} needs --from or --gpu: the embedded engine decodes one "
            "request at a time"
        )
    is_interrupted = False
    with messages(output) as stderr:
        from ddtree.bench.elsewhere import Elsewhere

        there = None if gpu is None else Elsewhere(gpu, loads or (1,), tp, context)
        if run is not None:
            budgets = config.budgets if "budgets" in given else ()
            made = _from_run(run, budgets, () if gpu else loads, there, engine)
        else:
            made, is_interrupted = _measure(config, engine, there, stderr)
    if output.as_json:
        from ddtree.bench.recommendation import to_json

        write_json({**to_json(made), "is_interrupted": is_interrupted})
    else:
        _show(made)
    if is_interrupted:
        raise typer.Exit(INTERRUPTED)


def _refuse_unread(given: Mapping[str, str], *, is_read: bool, is_elsewhere: bool) -> None:
    """Refuse flags that would change nothing.

    Args:
        given: flags of the command line by parameter.
        is_read: whether a run is read instead of measuring (--from).
        is_elsewhere: whether another machine is predicted (--gpu).
    """
    measuring = {spec.name for kind in (TuneConfig, EngineConfig) for spec in fields(kind)} - {"budgets"}
    if is_elsewhere:
        measuring -= {"model", "drafter"}  # of a run that does not name them
    refuse_unread(given, measuring if is_read else (), "with --from, which measures nothing")
    refuse_unread(given, () if is_elsewhere else ("tp", "context"), "without --gpu")


def _loads(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(
            f"--concurrency={text!r} is not allowed: whole numbers with commas between them, such as 1,8,32"
        ) from None


def _from_run(
    path: Path, budgets: Sequence[int], loads: Sequence[int], there: Elsewhere | None, engine: EngineConfig
) -> Recommendation:
    from ddtree.bench.elsewhere import with_group
    from ddtree.bench.recommendation import recommend
    from ddtree.bench.report import check_measured
    from ddtree.bench.run_format import read_run

    found = read_run(path)
    check_measured(found)
    made = recommend(found, loads, budgets)
    if there is None:
        return made
    model = made.model or engine.model
    drafter = engine.drafter if engine.drafter != "auto" else made.drafter or "auto"
    for group in made.groups:
        made = with_group(made, _elsewhere(group, there, model, drafter))
    return made


def _elsewhere(group: GroupAdvice, there: Elsewhere, model: str, drafter: str) -> GroupAdvice:
    from ddtree.bench.elsewhere import draft_pair, predict_elsewhere

    evidence: list[Evidence] = [found for loads in group.evidence.values() for found in loads]
    return predict_elsewhere(evidence, draft_pair(model, drafter), there, group.temperature, group.sets)


def _measure(
    config: TuneConfig, engine: EngineConfig, there: Elsewhere | None, stderr: Console
) -> tuple[Recommendation, bool]:
    loading.check_drafter(engine, Mode.TREE)
    from ddtree.bench.elsewhere import draft_pair, with_group
    from ddtree.bench.tune import Tuner, encode_texts, load_prompts, recommend_tuned

    if there is not None:
        draft_pair(engine.model, engine.drafter)  # a pair of unknown shape shows before the minute
    prompts = load_prompts(config)
    stderr.print(plain_text(f"loading {engine.model} ..."), style="dim")
    loaded = loading.load_engine(engine)
    bar = BarReporter(stderr) if stderr.is_terminal else None
    with bar or nullcontext():
        tuner = Tuner(loaded, encode_texts(loaded, prompts, config), config)
        if bar is not None:
            bar.stage("tune")
            tuner.on_progress = bar.progress
        evidence = tuner.run()
    made = recommend_tuned(tuner, evidence)
    if there is not None:
        made = with_group(made, _elsewhere(made.groups[0], there, engine.model, engine.drafter))
    return made, tuner.is_interrupted


def _show(made: Recommendation) -> None:
    from ddtree.bench.recommendation import COLUMNS, launch_of, option_cells, summary_lines, title_of

    screen = StdoutConsole()
    for group in made.groups:
        for load, advice in group.by_load.items():
            table = Table(title=plain_text(f"{title_of(group)}, {load} at once"), title_justify="left")
            for number, name in enumerate(COLUMNS):
                table.add_column(name, justify="left" if number in (0, len(COLUMNS) - 1) else "right")
            for option in advice.options:
                style = "bold" if option.plan == advice.plan else None
                table.add_row(*map(plain_text, option_cells(option)), style=style)
            screen.print(table)
        for line in summary_lines(group):
            write(f"{line}\n")
        write("".join(f"\n{line}" for line in launch_of(made, group)) + "\n\n")
    for note in made.notes:
        write(f"{note}\n")
