"""Time of the fused decoder stack on one GPU, with random weights of SmolLM2-135M's shapes.

First the Triton stack is held against the plain one (hidden states, taps, cache; bf16 and fp32, every
launch mode); a mismatch ends the run with exit 1. Then tiles are searched: each kernel alone, launched
once for each of 30 layers in a CUDA graph so that weights come from memory (269 MB are more than the L2),
over lists of tiles that a pool of processes compiles first. Last the whole stack, with the tiles of the
table and with the best found, in each launch mode. The table to paste stands at the end.

    PYTHONPATH=src python benchmarks/bench_decoder_gpu.py --output results/decoder_gpu.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, get_args

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ddtree.layers.decoder import rms_norm
from ddtree.layers.triton_argmax import argmax_rows
from ddtree.layers.triton_decoder import TritonDecoderStack
from ddtree.layers.triton_tiles import Launch, StackTiles, Tile, tiles_for
from decoder_kit import (
    CAPACITY,
    DEVICE,
    EPS,
    HEAD_DIM,
    HIDDEN,
    INTERMEDIATE,
    KERNELS,
    Case,
    CompilePool,
    KernelBench,
    build,
    graph_us,
    random_kv,
    usual_window,
)

NUM_LAYERS, VOCAB = 30, 49152
WIDTHS = (1, 16, 17, 33, 65, 129)
IN_FEATURES = {
    "qkv": HIDDEN,
    "qkv_whole_heads": HIDDEN,
    "out": HIDDEN,
    "gate_up": HIDDEN,
    "down": INTERMEDIATE,
}
MAX_SHARED_BYTES = 200_000
LAUNCHES: tuple[Launch, ...] = get_args(Launch)
Choice = tuple[Tile, int]  # and, for attention, its key splits


def check_cases() -> list[Case]:
    """Every mask, both dtypes, with and without head norms, each launch mode at the main widths."""
    bf16, fp32 = torch.bfloat16, torch.float32
    windows = [(1, 0, "causal"), (1, 1500, "causal"), (16, 200, "full"), (17, 1, "tree"), (33, 1500, "tree")]
    more = [(1, 127, "tree"), (16, 0, "full"), (65, 200, "tree"), (129, 1500, "tree"), (129, 0, "tree")]
    cases = [
        Case(*window, dtype, norm, tiles_for(window[0], CAPACITY))
        for window, dtype, norm in itertools.product(windows, (bf16, fp32), (False, True))
    ]
    cases += [Case(*window, bf16, False, tiles_for(window[0], CAPACITY)) for window in more]
    for window, launch in itertools.product((windows[1], windows[2], windows[4], more[2]), LAUNCHES):
        cases.append(Case(*window, bf16, False, replace(tiles_for(window[0], CAPACITY), launch=launch)))
    return cases


def projection_tiles(kernel: str, n: int) -> list[Tile]:
    """Tiles to try for a projection at a window of n tokens."""
    features = IN_FEATURES[kernel]
    if n == 1:
        shapes = [(bn, bk, w) for bn in (4, 8, 16, 32) for bk in (64, 128, 256, 512) for w in (1, 2, 4, 8)]
        if kernel == "qkv_whole_heads":
            shapes = [(HEAD_DIM, bk, w) for bk in (64, 128) for w in (4, 8, 16)]
        fits = [s for s in shapes if s[0] * s[1] // (32 * s[2]) in (8, 16, 32)]
        return [Tile(1, bn, bk, 1, w, 1) for bn, bk, w in fits if bn * bk * 4 >= 32 * w * 16]
    block_ms = {16: (16,), 17: (16, 32), 33: (16, 32), 65: (16, 32, 64), 129: (32, 64, 128)}
    block_ns: tuple[int, ...] = (16, 32, 64) if kernel == "gate_up" or n > 33 else (8, 16, 32)
    block_ns = (HEAD_DIM,) if kernel == "qkv_whole_heads" else block_ns
    steps = [(128, 4, 4), (256, 4, 4), (128, 4, 8), (256, 8, 8), (512, 8, 8), (64, 1, 4), (128, 1, 4)]
    if n <= 33:
        steps += [(64, 4, 4), (64, 2, 2), (128, 2, 2)]
    tiles = []
    for bm, bn, (bk, groups, warps) in itertools.product(block_ms[n], block_ns, steps):
        if bm * bn * groups > 32 * warps * 64 or (groups == 1 and bm * bn < 1024):
            continue  # accumulators would spill; or warps would stand idle
        num_steps = triton.cdiv(features, bk)
        fitting = MAX_SHARED_BYTES // ((bm + bn) * bk * 2)
        deep = min(num_steps, fitting, 12) + 1
        stages = {deep, min(deep, 4)} if groups == 1 else {deep}
        tiles += [Tile(bm, bn, bk, groups, warps, s) for s in sorted(stages) if fitting >= 1]
    return tiles


def attention_choices(n: int) -> list[Choice]:
    """Tiles and key splits to try for attention."""
    shapes = [(64, 4, 4), (128, 4, 4), (64, 2, 2), (128, 8, 8), (256, 8, 8)]
    block_ms = (16,) if n <= 16 else (16, 32)
    choices = []
    for bm, (bs, groups, warps), splits in itertools.product(block_ms, shapes, (1, 2, 4, 8, 16)):
        if bm == 32 and (warps == 2 or (bs, warps) == (128, 4)):
            continue  # spills
        choices += [
            (Tile(bm, bs, 0, groups, warps, stages), splits) for stages in ((1, 3) if splits < 4 else (2,))
        ]
    return choices


def choices_for(kernel: str, n: int) -> list[Choice]:
    """All to try, the table's own among them."""
    table = tiles_for(n, CAPACITY)
    own = (getattr(table, kernel), table.num_splits)
    if kernel == "attention":
        return [own, *(choice for choice in attention_choices(n) if choice != own)]
    tiles = projection_tiles(kernel, n)
    return [own, *((tile, table.num_splits) for tile in tiles if tile != own[0])]


def with_choice(tiles: StackTiles, kernel: str, choice: Choice) -> StackTiles:
    changes: dict[str, Any] = {kernel: choice[0]}
    if kernel == "attention":
        changes["num_splits"] = choice[1]
    return replace(tiles, **changes)


def show(kernel: str, choice: Choice) -> str:
    tile = choice[0]
    splits = f"/splits{choice[1]}" if kernel == "attention" else ""
    shape = f"{tile.block_m}x{tile.block_n}x{tile.block_k}"
    return f"{shape}/g{tile.k_groups}w{tile.num_warps}s{tile.num_stages}{splits}"


class Search:
    """Times each kernel alone and keeps the best tile of each width."""

    def __init__(self, bench: KernelBench, pool: CompilePool, prefixes: Sequence[int], log: TextIO) -> None:
        self.bench, self.pool, self.prefixes, self.log = bench, pool, prefixes, log
        self.faults: dict[tuple[str, Tile, int], str | None] = {}

    def compile(self, pairs: Sequence[tuple[int, str]]) -> None:
        """Compile every candidate once: a binary serves all widths of one mask kind."""
        wanted: dict[tuple[str, Tile, int, bool], tuple[str, int, StackTiles]] = {}
        for n, kernel in pairs:
            plain = replace(tiles_for(n, CAPACITY), launch="plain")
            for choice in choices_for(kernel, n):
                key = (kernel, *choice, n == 1)
                wanted.setdefault(key, (kernel, n, with_choice(plain, kernel, choice)))
        for key, fault in zip(wanted, self.pool.compile(list(wanted.values())), strict=True):
            self.faults[key[:3]] = fault
            if fault is not None:
                print(f"cannot run {key[0]} {show(key[0], key[1:3])}: {fault}", file=self.log)

    def best(self, kernel: str, n: int, deadline: float) -> tuple[Choice, dict[str, float]]:
        """The best choice, and microseconds of it and of the table's at each prefix."""
        plain = replace(tiles_for(n, CAPACITY), launch="plain")
        prefixes = self.prefixes if kernel == "attention" else self.prefixes[:1]
        times: dict[Choice, list[float]] = {}
        for choice in choices_for(kernel, n):
            if self.faults.get((kernel, *choice)) is not None or (times and time.perf_counter() > deadline):
                continue
            tiles = with_choice(plain, kernel, choice)
            times[choice] = [
                graph_us(self.bench.launcher(kernel, n, prefix_len, tiles), 3, 5) / NUM_LAYERS
                for prefix_len in prefixes
            ]
        # Attention: a short prefix counts twice, a long one once.
        ranked = sorted(times, key=lambda choice: 2 * times[choice][0] + times[choice][-1])
        for choice in ranked:
            row = " ".join(f"{us:6.2f}" for us in times[choice])
            print(f"n={n} {kernel:16s} {row} us  {show(kernel, choice)}", file=self.log, flush=True)
        own = choices_for(kernel, n)[0]
        figures = {f"best@{p}": us for p, us in zip(prefixes, times[ranked[0]], strict=True)}
        if own in times:
            figures |= {f"table@{p}": us for p, us in zip(prefixes, times[own], strict=True)}
        return ranked[0], figures


def head_us(n: int) -> dict[str, float]:
    """Final norm with head, and both ways to take an argmax."""
    embedding = (torch.randn(VOCAB, HIDDEN, device=DEVICE) * HIDDEN**-0.5).bfloat16()
    hidden, norm = (
        torch.randn(n, HIDDEN, device=DEVICE).bfloat16(),
        torch.ones(HIDDEN, device=DEVICE).bfloat16(),
    )
    logits = F.linear(hidden, embedding)
    return {
        "norm_and_head": graph_us(lambda: F.linear(rms_norm(hidden, norm, EPS), embedding)),
        "argmax_torch": graph_us(lambda: logits.argmax(-1)),
        "argmax_rows": graph_us(lambda: argmax_rows(logits)),
    }


def draft_us(tiles: StackTiles) -> tuple[float, float]:
    """A 4-layer pass of 16 tokens with head norms: with and without final norm and head."""
    stack = TritonDecoderStack(*build(4, torch.bfloat16, head_norm=True), tiles=lambda n, kv_extent: tiles)
    hidden, window, kv = (
        torch.randn(16, HIDDEN, device=DEVICE).bfloat16(),
        usual_window(16, 300),
        random_kv(4, torch.bfloat16),
    )
    embedding = (torch.randn(VOCAB, HIDDEN, device=DEVICE) * HIDDEN**-0.5).bfloat16()
    norm = torch.ones(HIDDEN, device=DEVICE).bfloat16()

    def with_head() -> Tensor:
        return F.linear(rms_norm(stack.forward(hidden, window, kv)[0], norm, EPS), embedding)

    return graph_us(with_head), graph_us(lambda: stack.forward(hidden, window, kv))


def stack_rows(
    bench: KernelBench, pool: CompilePool, tiles_of: dict[str, dict[int, StackTiles]], prefixes: Sequence[int]
) -> dict[str, dict[str, float]]:
    """Microseconds of the whole stack: tiles by name and width, in each launch mode at each prefix."""
    variants = [
        (name, n, replace(tiles, launch=launch))
        for name, by_width in tiles_of.items()
        for n, tiles in by_width.items()
        for launch in LAUNCHES
    ]
    pool.compile([("stack", n, tiles) for _, n, tiles in variants])
    rows: dict[str, dict[str, float]] = {}
    for name, n, tiles in variants:
        row = rows.setdefault(f"{name} n={n}", {})
        for prefix_len in prefixes:
            row[f"{tiles.launch}@{prefix_len}"] = graph_us(bench.stack_launcher(n, prefix_len, tiles))
    return rows


def fastest_launch(row: dict[str, float], prefix_len: int) -> Launch:
    return min(LAUNCHES, key=lambda launch: row[f"{launch}@{prefix_len}"])


def paste(n: int, tiles: StackTiles) -> str:
    """Source of a table entry."""
    lines = [f"# up to {n} tokens", "StackTiles("]
    for kernel in KERNELS:
        tile: Tile = getattr(tiles, kernel)
        fields = (tile.block_m, tile.block_n, tile.block_k, tile.k_groups, tile.num_warps, tile.num_stages)
        lines.append(f"    {kernel}=Tile{fields},")
    return "\n".join([*lines, f'    num_splits={tiles.num_splits}, launch="{tiles.launch}",', ")"])


def searched(widths: Sequence[int]) -> list[tuple[int, str]]:
    """Widths and kernels to search; only drafters, at 16 tokens, have head norms here."""
    pairs = itertools.product(widths, KERNELS)
    return [(n, kernel) for n, kernel in pairs if kernel != "qkv_whole_heads" or n == 16]


def search_tiles(
    search: Search, pairs: Sequence[tuple[int, str]], seconds: float
) -> tuple[dict[int, StackTiles], dict[str, dict[str, float]]]:
    """Best tiles of each width, and the figures of each kernel."""
    found: dict[int, StackTiles] = {}
    figures: dict[str, dict[str, float]] = {}
    start = time.perf_counter()
    for i, (n, kernel) in enumerate(pairs):
        found.setdefault(n, tiles_for(n, CAPACITY))
        deadline = start + seconds * (i + 1) / len(pairs)
        choice, figures[f"n={n} {kernel}"] = search.best(kernel, n, deadline)
        found[n] = with_choice(found[n], kernel, choice)
        row = " ".join(f"{name} {us:.2f}" for name, us in figures[f"n={n} {kernel}"].items())
        print(f"n={n:3d} {kernel:16s} {row}  {show(kernel, choice)}", flush=True)
    return found, figures


def run(args: argparse.Namespace, pool: CompilePool, log: TextIO) -> dict[str, Any] | None:
    """Everything there is to measure, or None where the check fails."""
    start = time.perf_counter()
    lines, failures = pool.checks(check_cases())
    print("\n".join(lines), file=log, flush=True)
    print(f"{len(lines)} checks, {len(failures)} failed, {time.perf_counter() - start:.0f} s", flush=True)
    if failures:
        print("\n".join(failures[:20]))
        return None
    if args.check_only:
        return {}
    bench = KernelBench(NUM_LAYERS)
    search = Search(bench, pool, args.prefixes, log)
    pairs = searched(args.widths)
    search.compile(pairs)
    num_faults = sum(fault is not None for fault in search.faults.values())
    took = f"{time.perf_counter() - start:.0f} s"
    print(f"{len(search.faults)} candidates compiled, {num_faults} cannot run, {took}", flush=True)
    found, kernels = search_tiles(search, pairs, args.search_s)
    print(f"searched, {time.perf_counter() - start:.0f} s", flush=True)
    table = {n: tiles_for(n, CAPACITY) for n in args.widths}
    rows = stack_rows(bench, pool, {"table": table, "best": found}, args.prefixes)
    for n in args.widths:
        found[n] = replace(found[n], launch=fastest_launch(rows[f"best n={n}"], args.prefixes[0]))
    result: dict[str, Any] = {"kernels_us": kernels, "stack_us": rows}
    result["head_us"] = {n: head_us(n) for n in args.widths}
    if 16 in found:
        pool.compile([("stack", 16, found[16])])
        result["draft_us"] = {"table": draft_us(table[16]), "best": draft_us(found[16])}
    result["tiles"] = {n: str(tiles) for n, tiles in found.items()}
    for n, tiles in found.items():
        print(paste(n, tiles))
    for name, row in rows.items():
        print(f"{name:12s} " + " ".join(f"{label} {us:.0f}" for label, us in row.items()))
    for n, row in result["head_us"].items():
        print(f"head n={n}: " + " ".join(f"{label} {us:.1f}" for label, us in row.items()))
    print(f"draft (with head, without): {result.get('draft_us')}, {time.perf_counter() - start:.0f} s")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write the JSON here, and a log of every tile beside it")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS), choices=WIDTHS)
    parser.add_argument("--prefixes", type=int, nargs="+", default=[300, 1500])
    parser.add_argument("--search-s", type=float, default=60.0, help="seconds the timing of tiles may take")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 1)))
    parser.add_argument("--check-only", action="store_true")
    args = parser.parse_args()
    log_path = Path(os.devnull)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        log_path = args.output.with_suffix(".log")
    pool = CompilePool(args.workers)
    with log_path.open("w", encoding="utf-8") as log, pool.executor:
        result = run(args, pool, log)
    if result is None:
        return 1
    result |= {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    result["command"] = " ".join(sys.argv)
    if args.output is not None:
        args.output.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
