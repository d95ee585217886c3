"""Runs the kernels' interpreted tests: Triton reads TRITON_INTERPRET once, so they have their own process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FILES = ("test_build_triton.py", "test_triton_draw.py", "test_triton_topk.py", "test_verify.py")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is the interpreter's own process")
def test_kernels_through_the_interpreter():
    pytest.importorskip("triton")
    here = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider",
         "-k", "interpreted", *(str(here / name) for name in FILES)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=here.parents[1], capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None, run.stdout
    assert int(passed[1]) > 0
    assert not re.search(r"\d+ (failed|error|skipped)", run.stdout), run.stdout
