"""Whether a file can be written, and keeping a second program from it meanwhile."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddtree.config import check
from ddtree.errors import ConfigError, short_repr

logger = logging.getLogger(__name__)


@contextmanager
def sole_writer(path: Path, flag: str) -> Iterator[None]:
    """Hold a file, made where it is not there, against all others that write it through this function.

    The system lets go of it when the process ends, however it ends.

    Args:
        flag: of the command line that named the file, for messages.

    Raises:
        ConfigError: another run writes it, or it cannot be written.
    """
    name = short_repr(str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"{flag} {name} cannot be written: {error.strerror}; name another file") from error
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        raise ConfigError(
            f"{flag} {name} is being written by another ddtree bench: wait for its end, or name another file"
        ) from None
    except OSError as error:  # a file system without locks
        logger.info("%s cannot be locked against other runs: %s", path, error.strerror)
    try:
        yield
    finally:
        os.close(number)


def check_writable(path: Path, name: str) -> None:
    """Raise `ConfigError` where a file cannot be written or made; changes nothing."""
    nearest = path
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    is_there = nearest == path
    check(
        not path.is_dir() and (is_there or nearest.is_dir()), name, str(path), "a file, in a folder",
        f"{str(nearest)!r} is a {'folder' if nearest.is_dir() else 'file'}",
    )  # fmt: skip
    check(
        os.access(nearest, os.W_OK), name, str(path), "a file that can be written",
        f"{str(nearest)!r} cannot",
    )  # fmt: skip
