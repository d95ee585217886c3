"""`ddtree train`: from a recipe to a drafter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ddtree.cli.console import StdoutConsole, messages, write
from ddtree.cli.exit_codes import UNFINISHED
from ddtree.cli.loading import ENGINE_PACKAGES
from ddtree.cli.options import Output, Panel, expand_settings
from ddtree.cli.train_progress import BarReporter, LineReporter
from ddtree.config import check
from ddtree.errors import ConfigError, MissingExtraError, ModelError

if TYPE_CHECKING:
    from ddtree.train.recipe import Recipe
    from ddtree.train.reporting import PipelineOptions, PipelineResult

RUNS = Path("runs")
ALL_STAGES = "all"
DRY_RUN_MARK = ".dry-run"

EPILOG = """Examples:

ddtree train recipes/smollm2-135m.toml --dry-run

ddtree train recipes/smollm2-135m.toml

ddtree train recipes/smollm2-135m.toml --stage train --max-seconds 500

torchrun --nproc-per-node 8 -m ddtree train recipes/qwen3-8b.toml --stage train"""


@expand_settings
def train(
    config: Annotated[Path, typer.Argument(help="the recipe, a TOML file", show_default=False)],
    *,
    stage: Annotated[
        list[str],
        typer.Option(
            help="run only this part: all, data, train, evaluate or export (repeatable)",
            metavar="NAME",
            rich_help_panel="Run",
            show_default=False,
        ),
    ] = [],  # noqa: B006 (typer makes a new one a call)
    folder: Annotated[
        Path | None,
        typer.Option("--output", help="folder of the run (default: runs/ and the recipe's name)",
                     rich_help_panel="Run"),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(" /--no-resume", help="make anew what the folder holds of these stages",
                     rich_help_panel="Run", show_default=False),
    ] = True,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="the whole run in small, with a tiny random target on the CPU",
                     rich_help_panel="Run"),
    ] = False,
    device: Annotated[
        str, typer.Option(help="auto, cpu, cuda or cuda:N", rich_help_panel="Run")
    ] = "auto",
    max_seconds: Annotated[
        float | None,
        typer.Option(help="stop at a checkpoint after this long; the same command goes on", metavar="S",
                     rich_help_panel="Run"),
    ] = None,
    output: Annotated[Output, Panel("Output", Output(), only=("quiet", "verbose"))],
) -> None:  # fmt: skip
    """Train a drafter: the target writes a corpus, the drafter learns from it, is measured and exported.

    The recipe and the stages are described in docs/training.md. Paths and acceptance go to standard output,
    progress to standard error. A run that was stopped goes on where it was.
    """
    from ddtree.train.recipe import load_recipe

    recipe = load_recipe(config)
    options = _options(stage, device, max_seconds, resume=resume)
    folder = folder or RUNS / (f"{config.stem}-dry-run" if dry_run else config.stem)
    with messages(output) as stderr:
        result = (
            _dry_run(recipe, folder, options, stderr) if dry_run else _run(recipe, folder, options, stderr)
        )
    if is_first_process():
        _show(result)
    # torchrun takes any other code than 0 for a failure and ends the other processes.
    if not result.is_finished and "RANK" not in os.environ:
        raise typer.Exit(UNFINISHED)


def _options(names: list[str], device: str, max_seconds: float | None, *, resume: bool) -> PipelineOptions:
    from ddtree.train.reporting import PipelineOptions, Stage

    allowed = (ALL_STAGES, *Stage)
    for name in names:
        check(name in allowed, "--stage", name, f"one of {', '.join(allowed)}")
    everything = not names or ALL_STAGES in names
    stages = tuple(stage for stage in Stage if everything or stage in names)
    return PipelineOptions(stages, device, resume, max_seconds)


def _dry_run(recipe: Recipe, folder: Path, options: PipelineOptions, stderr: Console) -> PipelineResult:
    """The whole run with the recipe shrunk and a tiny random target, always anew and on one core."""
    from dataclasses import replace

    from ddtree.train.recipe import dry_run_recipe
    from ddtree.train.reporting import Stage

    if options.stages != tuple(Stage):
        raise ConfigError("--dry-run and --stage are both given: a dry run goes through all stages")
    if folder.exists() and not _is_free(folder):
        raise ConfigError(
            f"--output {str(folder)!r} is not empty and no dry run's, and a dry run begins by clearing its "
            "folder: choose another one"
        )
    target = _write_target(folder / "target")
    device = "cpu" if options.device == "auto" else options.device
    return _run(dry_run_recipe(recipe, target), folder, replace(options, device=device, resume=False), stderr)


def _is_free(folder: Path) -> bool:
    """Whether a dry run may clear a folder: it is empty, or an earlier dry run's."""
    return folder.is_dir() and ((folder / DRY_RUN_MARK).exists() or not any(folder.iterdir()))


def _write_target(folder: Path) -> Path:
    with _needed_packages():
        import torch

        from ddtree.train.tiny_pair import write_tiny_target

        # More threads than one only get into each other's way over matrices this small.
        torch.set_num_threads(1)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder.parent / DRY_RUN_MARK).touch()
            return write_tiny_target(folder)
        except OSError as error:
            raise ModelError(
                f"the folder {str(folder.parent)!r} cannot be written: {error.strerror or error}; "
                "choose another"
            ) from None


def _run(recipe: Recipe, folder: Path, options: PipelineOptions, stderr: Console) -> PipelineResult:
    with _needed_packages():
        from ddtree.train.pipeline import run_pipeline
        from ddtree.train.reporting import SilentReporter

        if not is_first_process():
            return run_pipeline(recipe, folder, options, SilentReporter())
        reporter = BarReporter(stderr) if stderr.is_terminal else LineReporter(stderr)
        with reporter:
            return run_pipeline(recipe, folder, options, reporter)


@contextmanager
def _needed_packages() -> Iterator[None]:
    """A package that is not installed becomes the error that names its extra."""
    # Advice of transformers is for those who program it; ours comes as errors.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in (*ENGINE_PACKAGES, "tokenizers"):
            raise
        raise MissingExtraError(package, "train") from error


def is_first_process() -> bool:
    """Whether this is the one process, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def _show(result: PipelineResult) -> None:
    console = StdoutConsole()
    if result.acceptance:
        console.print(acceptance_table(result))
    for what, path in result.files.items():
        write(f"{what}: {path}\n")
    if not result.is_finished:
        write("stopped by --max-seconds; the same command goes on\n")


def acceptance_table(result: PipelineResult) -> Table:
    """Accept lengths, sets by row, chain and node budgets by column."""
    columns = list(dict.fromkeys(column for row in result.acceptance.values() for column in row))
    table = Table(title="accept length, tokens a round", title_justify="left")
    table.add_column("prompts")
    for column in columns:
        table.add_column(column if column == "chain" else f"B={column}", justify="right")
    for name, row in result.acceptance.items():
        table.add_row(name, *(f"{row[column]:.2f}" if column in row else "" for column in columns))
    return table
