"""The commands of the program `ddtree`, put together."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ddtree.cli import baseline, bench, compare, demo, doctor, generate, replay, report, serve, train, tune
from ddtree.cli.console import prepare_streams, write
from ddtree.errors import ConfigError

# Newer typers carry their own copy of click; this is the usage error of whichever one typer raises.
UsageError = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="ddtree",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate", epilog=generate.EPILOG)(generate.generate)
app.command("demo", epilog=demo.EPILOG)(demo.demo)
app.command("serve", epilog=serve.EPILOG)(serve.serve)
app.command("train", epilog=train.EPILOG)(train.train)
app.command("doctor", epilog=doctor.EPILOG)(doctor.doctor)
app.command("baseline", epilog=baseline.EPILOG)(baseline.baseline)
app.command("replay", epilog=replay.EPILOG)(replay.replay)
app.command("compare", epilog=compare.EPILOG)(compare.compare)
app.command("bench", epilog=bench.EPILOG)(bench.bench)
app.command("report", epilog=report.EPILOG)(report.report)
app.command("tune", epilog=tune.EPILOG)(tune.tune)

EPILOG = """Examples:

ddtree demo

ddtree generate "Why is the sky blue?"

ddtree generate --help"""


def _show_version(wanted: bool) -> None:
    if wanted:
        from ddtree import __version__

        write(f"ddtree {__version__}\n")
        raise typer.Exit


@app.callback(epilog=EPILOG)
def root(
    version: Annotated[
        bool, typer.Option("--version", help="show the version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """DDTree: faster decoding of language models through draft trees, without changing what they say."""


def invoke(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code.

    Raises:
        DDTreeError: a mistake in the arguments or in what they ask for.
    """
    prepare_streams()
    command = typer.main.get_command(app)
    try:
        with command.make_context("ddtree", list(arguments) or ["--help"]) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as ending:
        return ending.exit_code
    except Exception as error:
        if not isinstance(error, UsageError):
            raise
        # Of the class above, which is found at run time, mypy knows no methods.
        raise ConfigError(error.format_message()) from error  # type: ignore[attr-defined]
    return 0
