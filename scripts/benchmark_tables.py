"""What the scripts that write benchmark pages share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Results = dict[str, Any]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
