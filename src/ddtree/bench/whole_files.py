"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def write_whole(contents: Mapping[Path, bytes]) -> None:
    """Write files, each beside its place; once all are there they are moved over what was there before.

    Raises:
        OSError: one cannot be written; nothing is left of it, and those that were there before are kept.
    """
    unfinished = {path: path.with_name(f"{path.name}.part") for path in contents}
    try:
        for path, content in contents.items():
            if path.is_dir():
                raise IsADirectoryError(None, "it is a folder")
            unfinished[path].write_bytes(content)
        for path, part in unfinished.items():
            os.replace(part, path)
    except OSError:
        for part in unfinished.values():
            with suppress(OSError):
                part.unlink(missing_ok=True)
        raise
