"""The program `ddtree`: runs a command line, and how errors end it.

Commands are imported late, since Ctrl-C may come while that goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ddtree.cli.exit_codes import BROKEN_PIPE, INTERRUPTED, USER_ERROR
from ddtree.errors import DDTreeError


def main() -> None:
    """Run the command line of this process and end it."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code.

    A user's mistake is one line on standard error and 2; Ctrl-C is 130; a reader that goes away is 141.
    """
    try:
        from ddtree.cli.app import invoke

        return invoke(arguments)
    except DDTreeError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return BROKEN_PIPE


def _refuse(message: str) -> int:
    print("Error:", " ".join(message.split()), file=sys.stderr)
    return USER_ERROR
