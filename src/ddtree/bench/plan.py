"""Which cells a run has and in which order they are measured."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

from ddtree.bench.run_format import Arm, CellKey
from ddtree.bench_config import EMBEDDED, SGLANG, BenchConfig, is_url
from ddtree.config import Mode

Item = TypeVar("Item")
SEED_BITS = 31  # what every engine takes


@dataclass(frozen=True, slots=True)
class Group:
    """Cells that are measured side by side: arms on one set at one concurrency and temperature, once.

    Attributes:
        arms: in the order of their turns.
        repeat: from 0.
    """

    arms: tuple[Arm, ...]
    prompt_set: str
    concurrency: int
    temperature: float
    repeat: int

    def key(self, arm: Arm) -> CellKey:
        return CellKey(str(arm), self.prompt_set, self.concurrency, self.temperature, self.repeat)

    def __str__(self) -> str:
        return f"{self.prompt_set}, T={self.temperature:g}, c={self.concurrency}, repeat {self.repeat + 1}"


def arms_of(config: BenchConfig, arms_of_url: Callable[[str], Sequence[Arm]]) -> list[Arm]:
    """The arms of a run; `arms_of_url` tells those of a server that runs already."""
    arms: list[Arm] = []
    for engine in config.engines:
        arms += arms_of_url(engine) if is_url(engine) else arms_of_modes(engine, config)
    return arms


def arms_of_modes(engine: str, config: BenchConfig) -> list[Arm]:
    """An engine in every mode, trees with every budget."""
    return [
        Arm(engine, mode, budget)
        for mode in map(Mode, config.modes)
        for budget in (config.budgets if mode is Mode.TREE else (0,))
    ]


def plan_groups(arms: Sequence[Arm], config: BenchConfig, done: Container[CellKey]) -> list[Group]:
    """What is left to measure, in order; the arm that begins changes from group to group."""
    groups = []
    conditions = product(range(config.repeats), config.concurrency, config.temperatures, config.sets)
    for number, (repeat, concurrency, temperature, prompt_set) in enumerate(conditions):
        able = tuple(arm for arm in turned(arms, number) if can_run(arm, concurrency))
        groups.append(Group(able, prompt_set, concurrency, temperature, repeat))
    return without_cells(groups, done)


def without_cells(groups: Sequence[Group], done: Container[CellKey]) -> list[Group]:
    """The groups without cells that are done."""
    left = [
        replace(group, arms=tuple(arm for arm in group.arms if group.key(arm) not in done))
        for group in groups
    ]
    return [group for group in left if group.arms]


def can_run(arm: Arm, concurrency: int) -> bool:
    """Whether an arm can have so many requests in flight."""
    return arm.engine != EMBEDDED or concurrency == 1


def one_server_at_a_time(groups: Sequence[Group]) -> list[Group]:
    """The same cells, with those of each sglang server together, after all others."""
    servers = dict.fromkeys(arm for group in groups for arm in group.arms if arm.engine == SGLANG)
    others = {arm for group in groups for arm in group.arms} - servers.keys()
    turns = [others, *({server} for server in servers)]
    parts = [
        replace(group, arms=tuple(arm for arm in group.arms if arm in wanted))
        for wanted in turns
        for group in groups
    ]
    return [group for group in parts if group.arms]


def turned(items: Sequence[Item], number: int) -> Iterator[Item]:
    """The items from another one on for each number, so that each is first equally often."""
    start = number % len(items) if items else 0
    yield from items[start:]
    yield from items[:start]


def request_seed(seed: int, number: int) -> int:
    """The sampling seed of a prompt, from the run's seed and the prompt's number in its set."""
    digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)
