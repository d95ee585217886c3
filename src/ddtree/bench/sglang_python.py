"""Whether the Python that is to run SGLang's servers has what they need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from ddtree.bench.run_format import Arm
from ddtree.bench_config import BenchConfig
from ddtree.config import Mode
from ddtree.errors import ConfigError, short_repr

# `-c` looks for packages where `-m sglang.launch_server` does; nothing of them is imported.
PROBE = (
    "import sys, importlib.util as u; print('missing:', *(n for n in sys.argv[1:] if u.find_spec(n) is None))"
)
LIMIT_S = 60.0


def server_python(config: BenchConfig) -> str:
    """The Python that runs the servers of a run."""
    return config.sglang_python or sys.executable


def check_python(config: BenchConfig, arms: Sequence[Arm]) -> None:
    """Make sure that the servers' Python has SGLang, and for trees this package.

    Args:
        arms: of the engine `sglang`, that are to be measured.

    Raises:
        ConfigError: it has not, or does not run.
    """
    python = server_python(config)
    needed = ["sglang", *(["ddtree"] if any(arm.mode is Mode.TREE for arm in arms) else [])]
    try:
        done = subprocess.run(
            [python, "-c", PROBE, *needed], capture_output=True, stdin=subprocess.DEVNULL, timeout=LIMIT_S,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _no_python(python, getattr(error, "strerror", None) or "it does not end") from error
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    said = lines[-1].split() if lines else []  # before it may stand what a start-up file writes
    if done.returncode or said[:1] != ["missing:"]:
        raise _no_python(python, f"it ends with {done.returncode} where a Python lists packages")
    if missing := said[1:]:
        raise ConfigError(
            f"the engine sglang cannot start, since {python} has no {' and no '.join(missing)}: install what "
            "is missing there (docs/sglang.md), or name a Python that has SGLang and this package with "
            "--sglang-python"
        )


def _no_python(python: str, why: str) -> ConfigError:
    return ConfigError(
        f"sglang_python={short_repr(python)} is not allowed: a Python that has SGLang and this package; {why}"
    )
