"""Measures engines side by side over prompt sets, reports what came out and says which budget to set.

    from ddtree.bench import BenchConfig, read_run, run_bench

Names are loaded on first use, so that reading a run needs neither torch nor a server's packages.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree.bench.run_format import Run, read_run
    from ddtree.bench.runner import BenchResult, run_bench
    from ddtree.bench_config import BenchConfig

__all__ = ["BenchConfig", "BenchResult", "Run", "read_run", "run_bench"]

_MODULE_OF = {
    "BenchConfig": "ddtree.bench_config",
    "BenchResult": "ddtree.bench.runner",
    "Run": "ddtree.bench.run_format",
    "read_run": "ddtree.bench.run_format",
    "run_bench": "ddtree.bench.runner",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
