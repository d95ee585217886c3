"""How far a training run is, on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY_S = 30.0


class BarReporter:
    """One bar a stage, with its figures and the time left; `ddtree.train.reporting.Reporter`."""

    def __init__(self, console: Console) -> None:
        self.bars = Progress(
            TextColumn("{task.description:<8}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self.task: TaskID | None = None

    def __enter__(self) -> BarReporter:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def stage(self, name: str) -> None:
        if self.task is not None:
            self.bars.stop_task(self.task)
        self.task = self.bars.add_task(name, total=None, figures="")

    def progress(self, done: float, total: float, text: str) -> None:
        if self.task is not None:
            self.bars.update(self.task, completed=done, total=total, figures=escape(text))

    def message(self, text: str) -> None:
        self.bars.console.print(escape(text), soft_wrap=True)


class LineReporter:
    """Lines for files and pipes, of a stage's progress at most one each half minute, and its last one."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self.name = ""
        self.begun_s = self.told_s = clock()

    def __enter__(self) -> LineReporter:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stage(self, name: str) -> None:
        self.name, self.begun_s = name, self.clock()
        self.told_s = self.begun_s
        self.message(f"{name}: begins")

    def progress(self, done: float, total: float, text: str) -> None:
        now_s = self.clock()
        if now_s - self.told_s < LINE_EVERY_S and done < total:
            return
        self.told_s = now_s
        left_s = (now_s - self.begun_s) * (total - done) / done if done else float("nan")
        left = f", {left_s:.0f} s left" if 0 < left_s < float("inf") else ""
        self.message(f"{self.name}: {done:,.0f} of {total:,.0f}, {text}{left}")

    def message(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)
