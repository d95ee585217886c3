"""Runs the interpreted tests of the tree's kernels."""

from pathlib import Path

import pytest

from interpreter_kit import IS_INTERPRETER, run_interpreted

FILES = ("test_build_triton.py", "test_triton_draw.py", "test_triton_topk.py", "test_verify.py")


@pytest.mark.skipif(IS_INTERPRETER, reason="is the interpreter's own process")
def test_kernels_through_the_interpreter():
    pytest.importorskip("triton")
    assert run_interpreted(*(Path(__file__).parent / name for name in FILES)) > 0
