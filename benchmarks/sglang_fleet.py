"""Engines of several pairs, numbers of ranks and arms side by side, for `bench_sglang_tensor_parallel`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench_sglang import WARM_UP_TOKENS
from sglang_common import Clock, EngineDied, EngineProcess, Results
from tensor_parallel_pairs import EngineSpec

# NVLink multicast, which not every host lets a program use, stays off for all arms alike.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
    # Engines that start side by side find different amounts of memory in use.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
}  # fmt: skip


class Fleet:
    """The engines of a run, started side by side and told apart by name.

    Args:
        args: the parsed arguments.
        folder: where their logs and sockets go.
        results: which learns what engines say of themselves, and which died.
    """

    def __init__(self, args: argparse.Namespace, folder: Path, results: Results) -> None:
        self._args, self._folder, self._results = args, folder, results
        self._processes: dict[str, EngineProcess] = {}
        self._dead: set[str] = set()
        self._warm: set[tuple[str, int]] = set()
        self._num_started = 0

    def start(self, specs: Sequence[EngineSpec]) -> None:
        """Start engines; whether they came up shows at their first call."""
        for spec in specs:
            environment = ENVIRONMENT | dict(spec.environment)
            self._processes[spec.name] = EngineProcess(
                spec.arm, spec.arguments(self._args), self._folder, self._num_started, dict(spec.plugins),
                environment, self._args.call_limit_s,
            )  # fmt: skip
            self._num_started += 1
            self._processes[spec.name].start()

    def wait(self, engines: Sequence[str], limit_s: float) -> None:
        """Wait until engines are up; `EngineDied` names those that are not within `limit_s` and are dead."""
        clock, missing = Clock(limit_s), []
        for engine in engines:
            try:
                self._processes[engine].wait(max(clock.left_s(), 1.0))
                self.call(engine, "flush")
                print(f"{engine} is up, {limit_s - clock.left_s():.0f} s", flush=True)
            except EngineDied as error:
                self._bury(engine, error)
                missing.append(f"{engine}: {error}")
        if missing:
            raise EngineDied("\n".join(missing))

    def is_alive(self, name: str) -> bool:
        return name in self._processes and name not in self._dead

    def call(self, engine: str, call: str, **arguments: Any) -> Any:
        """What an engine answers.

        Raises:
            EngineDied: it did not, and counts as dead from here on.
        """
        try:
            if engine not in self._results.engines:
                self._results.engines[engine] = self._processes[engine].call("info")
            return self._processes[engine].call(call, **arguments)
        except EngineDied as error:
            self._bury(engine, error)
            raise

    def _bury(self, engine: str, error: EngineDied) -> None:
        self._dead.add(engine)
        self._results.engines[engine] = {"died": str(error)[-4000:]}

    def process(self, engine: str) -> EngineProcess:
        return self._processes[engine]

    def run(
        self, engine: str, requests: Sequence[dict[str, Any]], concurrency: int, *, warm: bool = False
    ) -> dict[str, Any]:
        """An engine's answers with an empty prefix cache, if `warm` after a warm-up at that concurrency."""
        if warm and (engine, concurrency) not in self._warm:
            short = [{**row, "sampling": row["sampling"] | {"max_new_tokens": WARM_UP_TOKENS}}
                     for row in requests[: max(concurrency, 2)]]  # fmt: skip
            self.call(engine, "run", requests=short, concurrency=concurrency)
            self._warm.add((engine, concurrency))
        self.call(engine, "flush")
        made: dict[str, Any] = self.call(engine, "run", requests=list(requests), concurrency=concurrency)
        return made

    def close(self) -> None:
        """End all engines at once."""
        if self._processes:
            with ThreadPoolExecutor(len(self._processes)) as pool:
                list(pool.map(EngineProcess.close, self._processes.values()))
        self._processes.clear()
