"""The log of a training run: one CSV, a row every few steps, that a resumed run goes on writing."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddtree.errors import ConfigError

NUMBERS = ("loss", "learning_rate", "grad_norm", "tokens_per_s")
CORRECT, ACCEPT = "correct_", "accept_"


@dataclass(frozen=True, slots=True)
class LogRow:
    """State of training after `step` steps.

    Attributes:
        loss: mean over the labels of the steps since the row before, by their weights.
        grad_norm: before clipping.
        tokens_per_s: row tokens trained on, over all processes.
        position_correct: share of right tokens at each position of the block, [draft_depth].
        accept_lengths: drafting ("chain" or a node budget in digits) -> held-out accept length, if measured.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_s: float
    position_correct: tuple[float, ...]
    accept_lengths: dict[str, float] = field(default_factory=dict)


class TrainingLog:
    """Appends rows to a CSV file, each written out at once.

    Args:
        path: the file; its folder is there.
        draft_depth: positions of a block, one column each.
        columns: keys of `accept_lengths`, one column each.
        resume_step: rows after this step are dropped; 0 begins anew.

    Raises:
        ConfigError: the file to go on with has other columns.
    """

    def __init__(self, path: Path, draft_depth: int, columns: Sequence[str], resume_step: int) -> None:
        self.path, self.columns = path, tuple(columns)
        depths = [f"{CORRECT}{depth}" for depth in range(1, draft_depth + 1)]
        self.header = ["step", *NUMBERS, *depths, *(f"{ACCEPT}{column}" for column in columns)]
        kept = self._kept_lines(resume_step) if resume_step and path.exists() else []
        unfinished = path.with_name(f"{path.name}.tmp")
        with open(unfinished, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([self.header, *kept])
        os.replace(unfinished, path)

    def append(self, row: LogRow) -> None:
        """Write one row; `position_correct` has a number for each position."""
        numbers = [row.loss, row.learning_rate, row.grad_norm, row.tokens_per_s, *row.position_correct]
        accepts = [row.accept_lengths.get(column, math.nan) for column in self.columns]
        cells = [str(row.step), *map(written, numbers), *map(written, accepts)]
        assert len(cells) == len(self.header), f"{len(cells)} cells for {len(self.header)} columns"
        with open(self.path, "a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(cells)

    def _kept_lines(self, resume_step: int) -> list[list[str]]:
        header, *lines = read_cells(self.path)
        if header != self.header:
            raise ConfigError(
                f"{self.path} has other columns than this recipe logs: move it away, or do not resume"
            )
        return [cells for cells in lines if int(cells[0]) <= resume_step]


def read_log(path: Path) -> list[LogRow]:
    """The rows of a log; a last row that was cut off is left out.

    Raises:
        ConfigError: there is no such file, or it is no training log.
    """
    header, *lines = read_cells(path)
    if header[: 1 + len(NUMBERS)] != ["step", *NUMBERS]:
        raise ConfigError(
            f"{path} is no training log: its first line must begin with step,{','.join(NUMBERS)}"
        )
    return list(parsed_rows(header, lines))


def parsed_rows(header: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[LogRow]:
    for cells in lines:
        values = {name: float(cell) for name, cell in zip(header, cells, strict=True) if cell}
        loss, rate, norm, speed = (values.get(name, math.nan) for name in NUMBERS)
        yield LogRow(
            step=int(cells[0]),
            loss=loss,
            learning_rate=rate,
            grad_norm=norm,
            tokens_per_s=speed,
            position_correct=tuple(values.get(name, math.nan) for name in header if name.startswith(CORRECT)),
            accept_lengths={
                name.removeprefix(ACCEPT): value for name, value in values.items() if name.startswith(ACCEPT)
            },
        )


def read_cells(path: Path) -> list[list[str]]:
    """Header and lines that were written to their newline; a process may have ended inside the last one."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the training log {str(path)!r}: {error}") from None
    header, *lines = list(csv.reader(text[: text.rfind("\n") + 1].splitlines())) or [[]]
    broken = [number for number, cells in enumerate(lines, 2) if len(cells) != len(header)]
    if broken:
        raise ConfigError(f"{path} is no training log: line {broken[0]} has not as many cells as the first")
    return [header, *lines]


def written(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"
