"""`ddtree baseline`: answers to compare with, made offline or read from official result files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ddtree.cli import loading
from ddtree.cli.console import messages, plain_text, write, write_json
from ddtree.cli.options import Output, Panel, expand_settings
from ddtree.cli.replay import reported
from ddtree.config import Dtype, EngineConfig, Mode, SamplingParams, check, parse_budget
from ddtree.errors import ConfigError

if TYPE_CHECKING:
    from ddtree.engine.engine import Engine
    from ddtree.trace.baseline import BaselinePlan

EPILOG = """Examples:

ddtree baseline prompts.jsonl --output baseline

ddtree baseline prompts.jsonl --output baseline --mode ar --dtype float32 --count 8 --max-tokens 128

ddtree baseline --from-pt results.pt --output official"""


@expand_settings
def baseline(
    prompts: Annotated[
        Path | None,
        typer.Argument(help="JSON Lines with prompt_tokens, prompt or turns a line", show_default=False),
    ] = None,
    *,
    folder: Annotated[
        Path, typer.Option("--output", help="folder of the files to write", metavar="FOLDER",
                           rich_help_panel="Baseline"),
    ],
    from_pt: Annotated[
        Path | None,
        typer.Option(help="read this result file of the official DDTree or DFlash benchmark instead; nothing "
                     "of it is run", metavar="FILE", rich_help_panel="Baseline"),
    ] = None,
    mode: Annotated[
        list[Mode],
        typer.Option(help="only this mode (repeatable; default: all three)", rich_help_panel="Baseline",
                     show_default=False),
    ] = [],  # noqa: B006 (typer makes a new one a call)
    dtype: Annotated[
        list[str],
        typer.Option(help="only this number format (repeatable; default: float32 and bfloat16)",
                     metavar="NAME", rich_help_panel="Baseline", show_default=False),
    ] = [],  # noqa: B006 (as above)
    budget: Annotated[
        int, typer.Option(help="nodes of the tree in mode tree, root not counted", metavar="N",
                          rich_help_panel="Baseline"),
    ] = 31,
    count: Annotated[
        int | None, typer.Option(help="only the first N prompts", metavar="N", rich_help_panel="Baseline")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="use texts as they are, no chat template",
                           rich_help_panel="Baseline"),
    ] = False,
    sampling: Annotated[SamplingParams, Panel("Sampling", SamplingParams())],
    engine: Annotated[
        EngineConfig, Panel("Engine", EngineConfig(), only=("model", "drafter", "device", "threads",
                                                            "max_context_tokens"))
    ],
    output: Annotated[Output, Panel("Output", Output())],
) -> None:  # fmt: skip
    """Make offline baselines: the embedded engine's answers in modes ar, chain and tree, as traces.

    A file MODE-DTYPE.jsonl for each mode and number format, with trees and the target's margins, to be
    compared with `ddtree compare` and replayed with `ddtree replay`.
    """
    with reported(as_json=output.as_json), messages(output) as stderr:
        if (prompts is None) == (from_pt is None):
            raise ConfigError("give either PROMPTS or --from-pt")
        if from_pt is not None:
            made = _from_official(from_pt, folder)
        else:
            assert prompts is not None
            check(count is None or count >= 1, "--count", count, "1 or more")
            plan = _plan(mode, dtype, budget, sampling, engine, is_chat=not raw)
            made = _make(plan, prompts, count, folder, stderr)
    if output.as_json:
        write_json(made)
        return
    for path, facts in made.items():
        write(f"{path}: {', '.join(f'{name} {value}' for name, value in facts.items())}\n")


def _from_official(path: Path, folder: Path) -> dict[str, Any]:
    from ddtree.trace.baseline import write_official
    from ddtree.trace.official import read_official

    return {str(file): {"outputs": number} for file, number in write_official(read_official(path), folder)}


def _plan(
    modes: list[Mode], dtypes: list[str], budget: int, sampling: SamplingParams, engine: EngineConfig,
    *, is_chat: bool,
) -> BaselinePlan:  # fmt: skip
    from ddtree.trace.baseline import BaselinePlan

    allowed = [known for known in Dtype if known is not Dtype.AUTO]
    for name in dtypes:
        check(name in allowed, "--dtype", name, f"one of {', '.join(allowed)}")
    parse_budget(budget, "--budget")
    plan = BaselinePlan(engine, sampling, node_budget=budget, chat=is_chat)
    plan = plan.only(tuple(modes), tuple(map(Dtype, dtypes)))
    for mode in plan.modes:
        loading.check_drafter(engine, mode)
    return plan


def _make(plan: BaselinePlan, path: Path, count: int | None, folder: Path, stderr: Console) -> dict[str, Any]:
    from ddtree.trace.baseline import make_baselines, read_prompts

    prompts = read_prompts(path, count)

    def load(config: EngineConfig) -> Engine:
        stderr.print(plain_text(f"{config.dtype.value}: loading {config.model}"))
        return loading.load_engine(config)

    # Lines and no bar: they tell as much in a log, and in a terminal what is done stays to be seen.
    def on_prompt(dtype: Dtype, mode: Mode, number: int) -> None:
        stderr.print(f"{dtype.value}, {mode.value}: prompt {number} of {len(prompts)}")

    return make_baselines(plan, prompts, folder, load, on_prompt)
