"""How a pipeline tells its caller what goes on, and what the caller asks of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from ddtree.config import DEVICE, check, is_number


class Stage(StrEnum):
    """A part of a training run; each leaves its result in the run's folder."""

    DATA = "data"
    TRAIN = "train"
    EVALUATE = "evaluate"
    EXPORT = "export"


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """What to run of a recipe, where, and for how long.

    Attributes:
        stages: in the order in which they run.
        device: auto, cpu, cuda or cuda:N.
        resume: go on from what the folder holds; without it, what it holds of these stages is made anew.
        max_seconds: stop at a checkpoint after this long, None for never.
    """

    stages: tuple[Stage, ...] = tuple(Stage)
    device: str = "auto"
    resume: bool = True
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        stages = self.stages
        is_ordered = list(stages) == [stage for stage in Stage if stage in stages]
        check(len(stages) > 0 and is_ordered, "stages", stages, "stages in their order, once each")
        check(
            isinstance(self.device, str) and DEVICE.fullmatch(self.device) is not None,
            "device", self.device, "auto, cpu, cuda or cuda:N",
        )  # fmt: skip
        check(isinstance(self.resume, bool), "resume", self.resume, "true or false")
        seconds = self.max_seconds
        check(
            seconds is None or (is_number(seconds) and seconds > 0),
            "max_seconds", seconds, "a number of seconds above 0, or none",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """What a run left.

    Attributes:
        is_finished: False where it stopped at `max_seconds`; the same command goes on.
        files: what -> where it lies, such as "drafter" or "log".
        acceptance: set -> drafting ("chain" or a node budget in digits) -> accept length in tokens a round.
    """

    is_finished: bool
    files: Mapping[str, Path]
    acceptance: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class Reporter(Protocol):
    """Receives what a pipeline has to say; only the first process of a run calls it."""

    def stage(self, name: str) -> None:
        """A stage begins."""

    def progress(self, done: float, total: float, text: str) -> None:
        """The stage is at `done` of `total`; `text` holds its figures, such as tokens/s."""

    def message(self, text: str) -> None:
        """One line for the reader, such as a decision or where a file is."""


class SilentReporter:
    """Drops everything."""

    def stage(self, name: str) -> None:
        """Nothing."""

    def progress(self, done: float, total: float, text: str) -> None:
        """Nothing."""

    def message(self, text: str) -> None:
        """Nothing."""
