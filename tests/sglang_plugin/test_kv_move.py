"""KV compaction: any ascending path, however its rows overlap, ends up at the front of its window."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.sglang_plugin.kv_move import KVMover, move_accept_kv
from interpreter_kit import IS_INTERPRETER, run_interpreted


def make_case(bs: int, width: int, depth: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows [bs, W] of distinct slots, and ascending paths [bs, depth + 1] from column 0."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.randperm(bs * width * 2, generator=generator)[: bs * width].view(bs, width)
    paths = torch.full((bs, depth + 1), -1)
    for path in paths:
        length = int(torch.randint(1, depth + 2, (1,), generator=generator))
        columns = torch.randperm(width - 1, generator=generator)[: length - 1].sort().values + 1
        path[0] = 0
        path[1 : 1 + columns.shape[0]] = columns
    return window, paths


def make_buffers(num_slots: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_slots, 3, 4, generator=generator) for _ in range(4)]


def moved(buffers: list[torch.Tensor], window: torch.Tensor, paths: torch.Tensor) -> list[torch.Tensor]:
    """The buffers afterwards, by a loop that reads from a copy."""
    results = [buffer.clone() for buffer in buffers]
    for before, after in zip(buffers, results, strict=True):
        for slots, path in zip(window.tolist(), paths.tolist(), strict=True):
            for column, source in enumerate(path):
                if source >= 0:
                    after[slots[column]] = before[slots[source]]
    return results


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(8, 24), st.integers(1, 7), st.integers(0, 999))
def test_the_path_moves_to_the_front(bs: int, width: int, depth: int, seed: int) -> None:
    window, paths = make_case(bs, width, depth, seed)
    buffers = make_buffers(bs * width * 2, seed)
    expected = moved(buffers, window, paths)
    move_accept_kv(buffers, window, paths)
    assert all(torch.equal(*pair) for pair in zip(buffers, expected, strict=True))


def test_rows_of_several_sizes_and_fp8_bytes() -> None:
    window, paths = make_case(2, 9, 4, seed=5)
    buffers = [torch.randint(0, 255, (36, 2, 3), dtype=torch.uint8), torch.randn(36, 5).to(torch.bfloat16)]
    expected = moved(buffers, window, paths)
    KVMover(buffers).move(window, paths)
    assert all(torch.equal(*pair) for pair in zip(buffers, expected, strict=True))


@pytest.mark.skipif(not IS_INTERPRETER, reason="runs in a process of Triton's interpreter, see below")
@pytest.mark.parametrize("seed", range(3))
def test_interpreted_kernel_moves_what_torch_moves(seed: int) -> None:
    window, paths = make_case(3, 20, 7, seed)
    buffers = make_buffers(120, seed)
    expected = moved(buffers, window, paths)
    KVMover(buffers)._move_triton(window, paths)
    assert all(torch.equal(*pair) for pair in zip(buffers, expected, strict=True))


@pytest.mark.skipif(IS_INTERPRETER, reason="starts the process of the interpreter")
def test_the_kernel_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert run_interpreted(__file__) == 3
