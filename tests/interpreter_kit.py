"""Kernels on a CPU: Triton reads TRITON_INTERPRET once, so interpreted tests have a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

IS_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"


def run_interpreted(*files: str | Path) -> int:
    """Run the tests named "interpreted" in Triton's interpreter; returns how many there are, all passed."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider",
         "-k", "interpreted", *map(str, files)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert not re.search(r"\d+ (failed|error|skipped)", run.stdout), run.stdout
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None, run.stdout
    return int(passed[1])
