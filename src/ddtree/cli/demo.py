"""`ddtree demo`: plain, chain and tree decoding side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ddtree.cli import loading
from ddtree.cli.comparison import EXAMPLES, Comparison, compare, generate, total_speedup
from ddtree.cli.console import StdoutConsole, messages, plain_text, write_json
from ddtree.cli.exit_codes import TEXTS_DIFFER
from ddtree.cli.generate import TraceDetailFlag, TraceFlag, open_recorder, stats_report
from ddtree.cli.options import BudgetFlag, Output, Panel, expand_settings
from ddtree.cli.tree_view import LEGEND, Decode, LongestPath, draw_tree
from ddtree.config import Dtype, EngineConfig, Mode, SamplingParams, parse_budget
from ddtree.provenance import provenance
from ddtree.stats import RoundStats
from ddtree.trace_format import Detail

if TYPE_CHECKING:
    from ddtree.engine.engine import Engine

DEFAULT_ENGINE = EngineConfig(dtype=Dtype.FLOAT32)
DEFAULT_SAMPLING = SamplingParams(max_tokens=96)
NOTES = {
    True: "float32: texts must agree token for token (--dtype bfloat16 is faster, but rounds differently)",
    False: "below float32 one token and many tokens a pass round differently: texts can part at near ties",
}

EPILOG = """Examples:

ddtree demo

ddtree demo --budget 32 --dtype bfloat16

ddtree demo --temperature 1 --seed 7 --json

ddtree demo --trace rounds.jsonl --trace-detail full"""


@expand_settings
def demo(
    *,
    budget: BudgetFlag = "16",
    sampling: Annotated[
        SamplingParams, Panel("Sampling", DEFAULT_SAMPLING, only=("max_tokens", "temperature", "seed"))
    ],
    engine: Annotated[EngineConfig, Panel("Engine", DEFAULT_ENGINE)],
    output: Annotated[Output, Panel("Output", Output())],
    trace: TraceFlag = None,
    trace_detail: TraceDetailFlag = Detail.SUMMARY,
) -> None:
    """Answer three prompts plainly, with a drafted chain and with a draft tree, and compare.

    A trace holds these nine requests; at detail full it takes time, which the figures then have in them.

    Ends with 1 if a text differs in float32, where all three must agree.
    """
    node_budget = parse_budget(budget, "--budget")
    loading.check_drafter(engine, Mode.TREE)
    is_exact = engine.dtype is Dtype.FLOAT32
    with messages(output) as stderr, open_recorder(trace, trace_detail) as recorder:
        stderr.print(plain_text(f"loading {engine.model} ..."), style="dim")
        loaded = loading.load_engine(engine)
        screen = None if output.as_json else StdoutConsole()
        comparisons = []
        for comparison in compare(loaded, EXAMPLES, sampling, node_budget, recorder):
            comparisons.append(comparison)
            if screen is not None:
                show_comparison(screen, comparison, loaded)
        path = LongestPath()
        generate(loaded, EXAMPLES[0], sampling, Mode.TREE, node_budget, path)
        if screen is None:
            write_json(report(comparisons, engine, node_budget, path.best))
        else:
            show_tree(screen, path, lambda token: loaded.tokenizer.decode([token]))
            screen.print(plain_text(f"\n{NOTES[is_exact]}"), style="dim")
            screen.print(plain_text(verdict(comparisons)), style="bold")
    if is_exact and not all(comparison.is_identical for comparison in comparisons):
        raise typer.Exit(TEXTS_DIFFER)


def show_comparison(screen: Console, comparison: Comparison, engine: Engine) -> None:
    """One prompt: its text, the table of modes, and where a text parts from the plain one."""
    example, runs = comparison.example, comparison.runs
    screen.print(plain_text(f"\n{example.title}: {example.prompt}"), style="bold")
    screen.print(plain_text(runs[Mode.AR].text), style="dim")
    table = Table()
    for heading in ("mode", "tokens/s", "times plain", "accept length", "rounds", "same text"):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for mode, run in runs.items():
        table.add_row(
            mode.value,
            f"{run.stats.tokens_per_s:.1f}",
            f"{comparison.speedup(mode):.2f}",
            f"{run.stats.accept_length:.2f}",
            str(run.stats.verify_ct),
            "yes" if comparison.first_difference(mode) is None else "no",
        )
    screen.print(table)
    for mode in runs:
        if (index := comparison.first_difference(mode)) is not None:
            screen.print(plain_text(difference(comparison, mode, index, engine.tokenizer.decode)))


def difference(comparison: Comparison, mode: Mode, index: int, decode: Any) -> str:
    """The first token in which a mode parts from plain decoding, beside the plain one."""
    texts = [
        repr(decode([tokens[index]])) if index < len(tokens) else "its end"
        for tokens in (comparison.runs[Mode.AR].tokens, comparison.runs[mode].tokens)
    ]
    return f"{mode} differs from {Mode.AR} at new token {index + 1}: {texts[1]}, not {texts[0]}"


def show_tree(screen: Console, path: LongestPath, decode: Decode) -> None:
    """The tree of the round with the longest accept path."""
    if path.best is None:
        screen.print("\nNo round drafted a tree.")
        return
    screen.print(
        f"\nRound {path.round_index} of the {EXAMPLES[0].title} prompt: {path.best.num_nodes} nodes verified "
        f"in one pass, {path.best.num_correct_drafts} accepted",
        style="bold",
    )
    screen.print(draw_tree(path.best, decode))
    screen.print(LEGEND, style="dim")


def verdict(comparisons: Sequence[Comparison]) -> str:
    """The demo in one line."""
    num_identical = sum(comparison.is_identical for comparison in comparisons)
    tree, chain = (total_speedup(comparisons, mode) for mode in (Mode.TREE, Mode.CHAIN))
    return (
        f"{num_identical} of {len(comparisons)} texts identical; "
        f"tree {tree:.2f} times plain (chain {chain:.2f} times)"
    )


def report(
    comparisons: Sequence[Comparison],
    config: EngineConfig,
    node_budget: int | str,
    round_stats: RoundStats | None,
) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        "model": config.model,
        "dtype": config.dtype.value,
        "budget": node_budget,
        "num_prompts": len(comparisons),
        "num_identical": sum(comparison.is_identical for comparison in comparisons),
        "speedup": {mode.value: round(total_speedup(comparisons, mode), 4) for mode in Mode},
        "prompts": [_prompt_report(comparison) for comparison in comparisons],
        "tree": None if round_stats is None else _tree_report(round_stats),
        "provenance": provenance(),
    }


def _prompt_report(comparison: Comparison) -> dict[str, Any]:
    runs = {
        mode.value: {
            "text": run.text,
            "finish_reason": run.finish_reason.value,
            "first_difference": comparison.first_difference(mode),
            "speedup": round(comparison.speedup(mode), 4),
            **stats_report(run),
        }
        for mode, run in comparison.runs.items()
    }
    return {"title": comparison.example.title, "prompt": comparison.example.prompt, "runs": runs}


def _tree_report(stats: RoundStats) -> dict[str, Any]:
    return {
        "draft_tokens": stats.draft_tokens,
        "parents": stats.parents,
        "log_probs": stats.log_probs,
        "accept_indices": stats.accept_indices,
        "accept_tokens": stats.accept_tokens,
    }
