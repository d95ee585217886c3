"""Does the plugin's KV move always put the accept path's KV in front, and touch nothing else? Bit for bit.

Random pools, windows and paths, 1,000 of them: pools of random bytes, windows of slots in random order, paths
of random columns and lengths, all requests at once. The whole pool is compared with one whose rows were all
gathered before any was scattered, and moving twice must give the same bits as a race would not. A move in the
wrong order is planted once and must differ. The last line is JSON; exits 1 where a bit differs. Needs a GPU.

    python benchmarks/check_sglang_kv_move.py --output results/sglang_kv_move.json
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common import progress, write_results
from ddtree.sglang_plugin.kv_move import move_accept_kv

# KV heads and head size of small and large targets; the last has rows of an odd number of words.
ROWS = ((3, 64), (8, 128), (1, 256), (4, 80), (1, 34))
DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)


class Case(NamedTuple):
    """A pool and what is to be moved in it."""

    buffers: list[Tensor]  # each [num_slots, heads, head size]
    window: Tensor  # [bs, W] int64 slots
    accept_indices: Tensor  # [bs, draft_depth + 1] int64 columns, -1 beyond the path


def random_case(draw: random.Random, device: torch.device) -> Case:
    """A case of random sizes and contents."""
    block, width = draw.choice([(4, 9), (8, 8), (8, 33), (16, 16), (16, 32), (16, 64)])
    requests, layers = draw.choice([1, 2, 7, 32, 64]), draw.randint(1, 4)
    heads, head_size = draw.choice(ROWS)
    dtype = draw.choice(DTYPES)
    num_slots = requests * width + draw.randint(1, 500)
    generator = torch.Generator(device=device).manual_seed(draw.getrandbits(60))
    bytes_a_slot = heads * head_size * dtype.itemsize
    buffers = [
        torch.randint(
            0, 256, (num_slots, bytes_a_slot), dtype=torch.uint8, device=device, generator=generator
        )
        .view(dtype)
        .view(num_slots, heads, head_size)
        for _ in range(2 * layers)
    ]
    slots = torch.randperm(num_slots, device=device, generator=generator)[: requests * width]
    paths = []
    for _ in range(requests):
        length = draw.randint(0, block - 1)
        columns = sorted(draw.sample(range(1, width), min(length, width - 1)))
        paths.append([0, *columns] + [-1] * (block - 1 - len(columns)))
    accept_indices = torch.tensor(paths, dtype=torch.int64, device=device)
    return Case(buffers, slots.view(requests, width), accept_indices)


def gathered_then_scattered(case: Case) -> list[Tensor]:
    """The pool as it must be: every row is read before any is written. Bytes, [num_slots, bytes]."""
    is_node = case.accept_indices >= 0
    columns = torch.arange(case.accept_indices.shape[1], device=case.window.device)
    sources = case.window.gather(1, case.accept_indices.clamp_min(0))[is_node]
    targets = case.window[:, : columns.shape[0]][is_node]
    moved = []
    for buffer in case.buffers:
        raw = as_bytes(buffer).clone()
        rows = raw[sources].clone()
        raw[targets] = rows
        moved.append(raw)
    return moved


def backwards(case: Case) -> list[Tensor]:
    """The planted fault: path order reversed, so that a node may be overwritten before it is read."""
    raws = [as_bytes(buffer).clone() for buffer in case.buffers]
    for row in range(case.window.shape[0]):
        for column in reversed(range(case.accept_indices.shape[1])):
            source = int(case.accept_indices[row, column])
            if source >= 0:
                for raw in raws:
                    raw[case.window[row, column]] = raw[case.window[row, source]]
    return raws


def as_bytes(buffer: Tensor) -> Tensor:
    """A buffer's bytes, [num_slots, bytes]."""
    return buffer.view(buffer.shape[0], -1).view(torch.uint8)


def differs(buffers: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether any byte of any buffer differs."""
    return not all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(buffers, expected, strict=True))


def check(cases: int, seed: int, device: torch.device, step: Any) -> dict[str, Any]:
    """Compare random cases; the numbers of those that differ."""
    draw, different, moved = random.Random(seed), [], 0
    planted_found = False
    for number in range(cases):
        case = random_case(draw, device)
        expected = gathered_then_scattered(case)
        if not planted_found:
            planted_found = differs(backwards(case), expected)
        copies = [buffer.clone() for buffer in case.buffers]
        for buffers in (case.buffers, copies):
            move_accept_kv(buffers, case.window, case.accept_indices)
            if differs(buffers, expected):
                different.append(number)
        moved += int((case.accept_indices > 0).sum())
        step()
    return {"cases": cases, "rows_moved": moved, "different": different, "planted_fault_found": planted_found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with progress("moves", args.cases) as step:
        found = check(args.cases, args.seed, torch.device(args.device), step)
    write_results(args.output, {"device": args.device, **found})
    sys.exit(int(bool(found["different"]) or not found["planted_fault_found"]))


if __name__ == "__main__":
    main()
