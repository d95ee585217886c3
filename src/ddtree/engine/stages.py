"""Times the five steps of a round, for observers that ask for it."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from ddtree.stats import Stage


class StageClock(Protocol):
    """Is told when each step of one round has ended."""

    def mark(self, stage: Stage) -> None:
        """A step has ended here, on the host or on the device's queue."""

    def read_ms(self) -> dict[Stage, float] | None:
        """Milliseconds of each step, once the round has been read; None of a round that is not timed."""


class NoClock:
    """Of a round that nobody times: does nothing."""

    def mark(self, stage: Stage) -> None: ...

    def read_ms(self) -> None:
        return None


class HostClock:
    """Of a round whose steps run on the host: time on the clock."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]
        self._stages: list[Stage] = []

    def mark(self, stage: Stage) -> None:
        self._times.append(time.perf_counter())
        self._stages.append(stage)

    def read_ms(self) -> dict[Stage, float]:
        ends = zip(self._stages, self._times, self._times[1:], strict=False)
        return {stage: (end - begin) * 1e3 for stage, begin, end in ends}


class DeviceClock:
    """Of a round that is queued on a CUDA device: events between the steps, which nobody waits for.

    They are read when the round has been read, which is after all of them.
    """

    def __init__(self) -> None:
        self._events = [_recorded()]
        self._stages: list[Stage] = []

    def mark(self, stage: Stage) -> None:
        self._events.append(_recorded())
        self._stages.append(stage)

    def read_ms(self) -> dict[Stage, float]:
        ends = zip(self._stages, self._events, self._events[1:], strict=False)
        return {stage: float(begin.elapsed_time(end)) for stage, begin, end in ends}


NO_CLOCK = NoClock()


def start_clock(device: torch.device) -> StageClock:
    """A clock for a round that begins now."""
    return DeviceClock() if device.type == "cuda" else HostClock()


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
