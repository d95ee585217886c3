"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from ddtree.errors import ModelError, first_line


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path`, then move it there.

    Raises:
        ModelError: it cannot be written, for lack of space or permission; nothing is left of it.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(unfinished)
        os.replace(unfinished, path)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own
        reason = (isinstance(error, OSError) and error.strerror) or first_line(error)
        raise ModelError(
            f"{path} cannot be written: {reason}; what was there before is kept, make room and run it again"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
