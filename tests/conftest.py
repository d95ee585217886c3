"""What all tests share: one thread a process, and the marks that skip a test where it cannot run."""

import os
from importlib.util import find_spec

# Read by torch when it is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def skip_reason(item: pytest.Item) -> str | None:
    """Why a test cannot run here, from its marks."""
    marks = {mark.name for mark in item.iter_markers()}
    if "slow" in marks and not item.config.getoption("--slow"):
        return "slow: run with --slow"
    if "sglang" in marks and find_spec("sglang") is None:
        return "needs an installed SGLang"
    if "multi_gpu" in marks and num_gpus() < 2:
        return "needs two CUDA GPUs or more"
    if "gpu" in marks and num_gpus() < 1:
        return "needs a CUDA GPU"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := skip_reason(item):
            item.add_marker(pytest.mark.skip(reason=reason))
