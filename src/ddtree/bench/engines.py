"""Opens the engine of an arm: the one in this process, a server that is started, a server that runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ddtree import Engine, EngineConfig
from ddtree.bench.embedded import EmbeddedEngine
from ddtree.bench.measure import BenchEngine
from ddtree.bench.run_format import Arm
from ddtree.bench_config import EMBEDDED, SGLANG, BenchConfig

Load = Callable[[EngineConfig], Engine]


class Engines:
    """Opens arms; those of the embedded engine share one.

    Args:
        config: of the run.
        log_folder: where servers that are started write their logs.
        load: makes the embedded engine of its settings.
    """

    def __init__(self, config: BenchConfig, log_folder: Path, load: Load = Engine.load) -> None:
        self._config, self._log_folder, self._load = config, log_folder, load
        self._embedded: Engine | None = None

    def open(self, arm: Arm) -> BenchEngine:
        """The engine of an arm, ready for requests.

        Raises:
            DDTreeError: it cannot be loaded, started or reached.
        """
        if arm.engine == EMBEDDED:
            if self._embedded is None:
                self._embedded = self._load(self._config.engine_config())
            return EmbeddedEngine(self._embedded, arm)
        if arm.engine == SGLANG:
            from ddtree.bench.sglang_server import start_engine

            return start_engine(arm, self._config, self._log_folder)
        from ddtree.bench.openai_engine import open_engine

        return open_engine(arm, self._config)

    def arms_of_url(self, url: str) -> Sequence[Arm]:
        """The arms of a server that runs: itself as it is, or modes and budgets of one of ours."""
        from ddtree.bench.openai_engine import arms_of

        return arms_of(url, self._config)

    def served_model(self, url: str) -> str:
        """Name of the model that a server that runs gives."""
        from ddtree.bench.openai_engine import served_model

        return served_model(url, self._config)
