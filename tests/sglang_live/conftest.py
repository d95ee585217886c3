"""One tiny pair a family for all tests of a process, and the double that transformers needs."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

DOUBLES = Path(__file__).parents[1] / "sglang_kit" / "doubles"
if find_spec("sglang") is not None:
    # transformers looks for torchvision, and the installed one does not load beside a CPU torch.
    sys.path.insert(0, str(DOUBLES))


@pytest.fixture(scope="session")
def qwen3_pair(tmp_path_factory):
    from sglang_kit.models import write_pair

    return write_pair(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def llama_pair(tmp_path_factory):
    from sglang_kit.models import write_pair

    return write_pair(tmp_path_factory.mktemp("llama"), "llama")
