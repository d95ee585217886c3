"""Which cells of `bench_sglang_tensor_parallel` are missing, and the engines that they need."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench_sglang import cell_name
from check_sglang_replay import cell_name as replay_name
from sglang_common import Results
from tensor_parallel_pairs import (
    PAIRS,
    RANDOM,
    SHIPPED,
    EngineSpec,
    Group,
    ServedPair,
    engine_spec,
    rank_specs,
)

CHECK_ARM = "ddtree:31"
GROUP = re.compile(rf"\b({'|'.join(PAIRS)}) tp(\d+)\b")
REPLAY_CONCURRENCY = {"plain": (16,), CHECK_ARM: (1, 16)}
PROFILE_ARMS, PROFILE_CONCURRENCY = ("dflash", "ddtree:31", "ddtree:63"), (1, 16)


class Plan:
    """The cells that a run still has to measure.

    Args:
        args: the parsed arguments.
        results: which has the others.
        folder: where check engines write.
        pairs: by name.
    """

    def __init__(
        self, args: argparse.Namespace, results: Results, folder: Path, pairs: Mapping[str, ServedPair]
    ) -> None:
        self._args, self._results, self._folder, self._pairs = args, results, folder, pairs

    def groups(self) -> Iterator[Group]:
        """Pairs and numbers of ranks in the order in which they are measured."""
        for tp_size in self._args.tp_size:
            for pair in self._args.pairs:
                yield Group(pair, tp_size)

    def measured(self) -> list[Group]:
        """The groups that have cells, of earlier runs too: the most ranks first, then as `PAIRS` has them."""
        found = {(match[1], int(match[2])) for cell in self._results.cells if (match := GROUP.search(cell))}
        return [Group(pair, size) for pair, size in sorted(
            found, key=lambda group: (-group[1], PAIRS.index(group[0])))]  # fmt: skip

    def _is_missing(self, cell: str) -> bool:
        return cell not in self._results.cells

    def bench(self, group: Group) -> list[tuple[str, int, int]]:
        """Arm, concurrency and repeat of the missing cells, a whole grid of each repeat at a time."""
        planned = []
        for repeat in range(self._args.repeats):
            for concurrency in self._args.concurrency:
                turn = repeat % len(self._args.arms)
                for arm in [*self._args.arms[turn:], *self._args.arms[:turn]]:
                    if self._is_missing(cell_name(arm, concurrency, str(group), repeat)):
                        planned.append((arm, concurrency, repeat))
        return planned if "bench" in self._args.parts else []

    def ranks(self, group: Group) -> list[EngineSpec]:
        """The check engines whose cells are missing; one rank has nobody to compare with."""
        if "ranks" not in self._args.parts or group.tp_size == 1:
            return []
        specs = rank_specs(self._pairs[group.pair], group, CHECK_ARM, self._folder)
        return [spec for spec in specs if self._is_missing(f"ranks {spec.name}")]

    def replay(self, group: Group) -> list[tuple[str, int, str]]:
        """Arm, concurrency and kind of the missing cells."""
        if "replay" not in self._args.parts or group.pair != SHIPPED or group.tp_size == 1:
            return []
        cells = [(arm, concurrency, kind)
                 for arm, counts in REPLAY_CONCURRENCY.items() for concurrency in counts
                 for kind in ("greedy", "sampled") if kind == "greedy" or arm != "plain"]  # fmt: skip
        return [cell for cell in cells if self._is_missing(f"replay {group} {replay_name(*cell)}")]

    def profile(self, group: Group) -> list[tuple[str, int]]:
        """Arm and concurrency of the missing cells: rounds of a real size, over ranks."""
        if "profile" not in self._args.parts or group.pair != RANDOM or group.tp_size == 1:
            return []
        cells = [
            (arm, concurrency) for concurrency in PROFILE_CONCURRENCY for arm in PROFILE_ARMS
            if arm in self._args.arms and concurrency in self._args.concurrency
        ]  # fmt: skip
        return [cell for cell in cells if self._is_missing(f"profile {group} {cell[0]} {cell[1]}")]

    def specs(self, group: Group) -> list[EngineSpec]:
        """The engines that a group's missing cells need."""
        arms = [arm for arm, *_ in (*self.bench(group), *self.replay(group))]
        arms += [arm for arm, _ in self.profile(group)]
        pair = self._pairs[group.pair]
        return [
            *self.ranks(group),
            *(engine_spec(pair, group, arm, first_gpu=i) for i, arm in enumerate(dict.fromkeys(arms))),
        ]
