"""When the tree's steps run as Triton kernels: on CUDA, with Triton installed, within a kernel's limits."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor

from ddtree.errors import MissingExtraError


@cache
def has_triton() -> bool:
    """Whether Triton is installed; it is not imported."""
    return find_spec("triton") is not None


def prefers_triton(tensor: Tensor) -> bool:
    """Whether kernels should work on `tensor`, of any shape."""
    return tensor.is_cuda and has_triton()


def require_triton() -> None:
    """Raise `MissingExtraError` without Triton."""
    if not has_triton():
        raise MissingExtraError("triton", "engine")


def power_of_two(count: int, at_least: int = 1) -> int:
    """The least power of two from `count` and `at_least` up, as tile sizes must be."""
    return max(at_least, 1 << (count - 1).bit_length())
