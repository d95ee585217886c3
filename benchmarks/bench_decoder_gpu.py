"""Time of the fused decoder stack on one GPU, with random weights of SmolLM2-135M's shapes.

First the Triton stack is held against the plain one (hidden states, taps, cache; bf16 and fp32); a
mismatch ends the run with exit 1. Then CUDA graphs are timed: whole stack, whole step (stack, final
norm, head, argmax), a 4-layer draft pass, time per kernel, and a few tiles per kernel and width.
Figures are medians of replays; the 269 MB of weights are more than the L2, so they come from memory.

    PYTHONPATH=src python benchmarks/bench_decoder_gpu.py --output results/decoder_gpu.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ddtree.layers.decoder import DecoderLayer, DecoderSpec, DecoderStack, rms_norm
from ddtree.layers.linear import GateUp, Linear
from ddtree.layers.rotary import RotaryTable
from ddtree.layers.triton_argmax import argmax_rows
from ddtree.layers.triton_decoder import TritonDecoderStack
from ddtree.layers.triton_tiles import StackTiles, Tile, tiles_for
from ddtree.layers.window import Window

HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 576, 1536, 9, 3, 64
NUM_LAYERS, VOCAB, CAPACITY, EPS = 30, 49152, 2048, 1e-5
WIDTHS = (1, 16, 17, 33, 65, 129)
DEVICE = torch.device("cuda")

ONE_ROW_TILES = {
    "qkv": (Tile(1, 8, 1024, 4, 1), Tile(1, 8, 1024, 8, 1), Tile(1, 16, 1024, 8, 1)),
    "out": (Tile(1, 4, 1024, 4, 1), Tile(1, 8, 1024, 8, 1), Tile(1, 4, 1024, 8, 1)),
    "gate_up": (Tile(1, 16, 1024, 4, 1), Tile(1, 16, 1024, 8, 1), Tile(1, 32, 1024, 8, 1)),
    "down": (Tile(1, 4, 512, 4, 1), Tile(1, 4, 2048, 4, 1), Tile(1, 8, 2048, 8, 1)),
}
ROWS_TILES = {
    "qkv": (Tile(16, 16, 64, 4, 5), Tile(32, 16, 64, 4, 5), Tile(16, 16, 128, 4, 5), Tile(16, 32, 128, 4, 5)),
    "out": (Tile(16, 16, 64, 4, 5), Tile(16, 16, 128, 4, 5), Tile(32, 16, 128, 4, 5), Tile(16, 16, 64, 2, 8)),
    "gate_up": (
        Tile(16, 32, 64, 4, 5),
        Tile(32, 32, 64, 4, 5),
        Tile(16, 32, 128, 4, 5),
        Tile(32, 64, 64, 4, 5),
    ),
    "down": (
        Tile(16, 16, 128, 4, 5),
        Tile(16, 16, 256, 4, 5),
        Tile(32, 16, 128, 4, 5),
        Tile(16, 16, 128, 8, 6),
    ),
}
# (attention tile, key splits, out tile that merges them)
ONE_ROW_ATTENTION = (
    (Tile(16, 64, 0, 4, 2), 4, Tile(1, 4, 1024, 4, 1)),
    (Tile(16, 64, 0, 4, 2), 8, Tile(1, 4, 1024, 4, 1)),
    (Tile(16, 128, 0, 4, 2), 4, Tile(1, 4, 1024, 4, 1)),
    (Tile(16, 32, 0, 2, 2), 16, Tile(1, 8, 1024, 8, 1)),
)
ROWS_ATTENTION = (
    (Tile(16, 64, 0, 4, 2), 1, Tile(16, 16, 64, 4, 5)),
    (Tile(16, 64, 0, 4, 3), 1, Tile(16, 16, 64, 4, 5)),
    (Tile(16, 128, 0, 8, 2), 1, Tile(16, 16, 64, 4, 5)),
    (Tile(32, 64, 0, 4, 2), 1, Tile(16, 16, 64, 4, 5)),
    (Tile(16, 64, 0, 4, 2), 2, Tile(16, 16, 64, 4, 3)),
    (Tile(16, 64, 0, 4, 2), 4, Tile(16, 16, 256, 8, 2)),
)


def build(
    num_layers: int, dtype: torch.dtype, *, head_norm: bool
) -> tuple[DecoderSpec, list[DecoderLayer], RotaryTable]:
    """Random layers of SmolLM2's widths; scaled so that activations keep their size."""
    torch.manual_seed(0)

    def weight(rows: int, cols: int) -> Linear:
        return Linear((torch.randn(rows, cols, device=DEVICE) * cols**-0.5).to(dtype))

    def norm(features: int) -> Tensor:
        return (1 + 0.1 * torch.randn(features, device=DEVICE)).to(dtype)

    layers = [
        DecoderLayer(
            input_norm=norm(HIDDEN),
            qkv=weight((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, HIDDEN),
            q_norm=norm(HEAD_DIM) if head_norm else None,
            k_norm=norm(HEAD_DIM) if head_norm else None,
            out=weight(HIDDEN, NUM_HEADS * HEAD_DIM),
            post_norm=norm(HIDDEN),
            gate_up=GateUp(weight(2 * INTERMEDIATE, HIDDEN).weight),
            down=weight(HIDDEN, INTERMEDIATE),
        )
        for _ in range(num_layers)
    ]
    spec = DecoderSpec(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, EPS, (None,) * num_layers)
    inv_freq = 100000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=DEVICE) / HEAD_DIM)
    return spec, layers, RotaryTable(inv_freq, CAPACITY + 256, dtype)


def make_window(n: int, prefix_len: int, mask_kind: str, kv_extent: int) -> Window:
    """A window as inside a CUDA graph: `start` unknown to the host."""
    mask, positions = None, torch.arange(n, device=DEVICE)
    if mask_kind == "tree":
        parents = [-1, *(int(torch.randint(0, i, (1,))) for i in range(1, n))]
        seen, depths = torch.eye(n, dtype=torch.bool), [0] * n
        for i in range(1, n):
            seen[i] |= seen[parents[i]]
            depths[i] = depths[parents[i]] + 1
        mask, positions = seen.to(DEVICE), torch.tensor(depths, device=DEVICE)
    elif mask_kind == "full":
        mask = torch.ones(n, n, dtype=torch.bool, device=DEVICE)
    return Window(prefix_len + positions, torch.tensor([prefix_len], device=DEVICE), kv_extent, mask, None)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    difference: Tensor = (actual.double() - expected.double()).norm() / expected.double().norm()
    return float(difference)


def check(
    stack: TritonDecoderStack, n: int, prefix_len: int, mask_kind: str, limits: tuple[float, float]
) -> list[str]:
    """Compare one pass of both stacks; returns what is out of bounds.

    `limits` bounds the relative error of the last hidden states and of the first layer's.
    """
    dtype, taps = stack.rotary.cos.dtype, (0, len(stack.layers) - 1)
    torch.manual_seed(n * 7919 + prefix_len)
    window = make_window(n, prefix_len, mask_kind, CAPACITY)
    hidden = torch.randn(n, HIDDEN, device=DEVICE).to(dtype)
    kv = torch.randn(len(stack.layers), 2, NUM_KV_HEADS, CAPACITY, HEAD_DIM, device=DEVICE).to(dtype)
    reference_kv, before = kv.clone(), hidden.clone()
    reference = DecoderStack(stack.spec, stack.layers, stack.rotary)
    expected, expected_taps = reference.forward(hidden, window, reference_kv, taps)
    actual, actual_taps = stack.forward(hidden, window, kv, taps)
    assert expected_taps is not None
    assert actual_taps is not None
    inside = slice(prefix_len, prefix_len + n)
    errors = {
        "hidden": (relative_error(actual, expected), limits[0]),
        "first tap": (relative_error(actual_taps[:, :HIDDEN], expected_taps[:, :HIDDEN]), limits[1]),
        "last tap": (relative_error(actual_taps[:, HIDDEN:], expected_taps[:, HIDDEN:]), limits[0]),
        "cache layer 0": (relative_error(kv[0, :, :, inside], reference_kv[0, :, :, inside]), limits[1]),
        "cache": (relative_error(kv[..., inside, :], reference_kv[..., inside, :]), limits[0]),
    }
    case = f"n={n} prefix={prefix_len} mask={mask_kind} {dtype}"
    failures = [
        f"{case}: {name} off by {e:.2e} > {top:.0e}" for name, (e, top) in errors.items() if not e <= top
    ]
    kv[..., inside, :] = reference_kv[..., inside, :]
    if not torch.equal(kv, reference_kv) or not torch.equal(hidden, before):
        failures.append(f"{case}: wrote outside of the window's slots or its input")
    print(case, " ".join(f"{name} {e:.1e}" for name, (e, _) in errors.items()), flush=True)
    return failures


def check_all() -> list[str]:
    """Every mask at several widths and prefixes; few layers, since bf16 noise grows with depth."""
    failures = []
    for dtype, limits in ((torch.float32, (2e-5, 2e-5)), (torch.bfloat16, (2e-2, 1e-2))):
        cases = [
            (1, 0, "causal"),
            (1, 1500, "causal"),
            (16, 200, "full"),
            (17, 1, "tree"),
            (33, 1500, "tree"),
        ]
        if dtype == torch.bfloat16:
            cases += [
                (1, 1, "causal"),
                (1, 200, "tree"),
                (16, 0, "full"),
                (65, 200, "tree"),
                (129, 1500, "tree"),
            ]
            cases += [(17, 0, "causal"), (129, 0, "tree")]
        for head_norm in (False, True):
            stack = TritonDecoderStack(*build(3, dtype, head_norm=head_norm))
            for n, prefix_len, mask_kind in cases[: None if not head_norm else 4]:
                failures += check(stack, n, prefix_len, mask_kind, limits)
    logits = torch.randn(65, VOCAB, device=DEVICE).bfloat16()
    best = argmax_rows(logits)
    if not torch.equal(logits.gather(1, best[:, None])[:, 0], logits.amax(1)):
        failures.append("argmax_rows does not point at the largest logit")
    return failures


def graph_us(run: Callable[[], object], repeats: int = 9, replays: int = 20) -> float:
    """Median microseconds of one replay of `run` captured in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(5):
        graph.replay()
    times: list[float] = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / replays)
    return statistics.median(times)


class Bench:
    """Weights, cache and inputs that all timings share."""

    def __init__(self) -> None:
        self.parts = build(NUM_LAYERS, torch.bfloat16, head_norm=False)
        self.kv = torch.randn(NUM_LAYERS, 2, NUM_KV_HEADS, CAPACITY, HEAD_DIM, device=DEVICE).bfloat16()
        self.embedding = (torch.randn(VOCAB, HIDDEN, device=DEVICE) * HIDDEN**-0.5).bfloat16()
        self.final_norm = torch.ones(HIDDEN, device=DEVICE).bfloat16()

    def inputs(self, n: int, prefix_len: int) -> tuple[Tensor, Window]:
        kind = "causal" if n == 1 else "full" if n == 16 else "tree"
        return torch.randn(n, HIDDEN, device=DEVICE).bfloat16(), make_window(n, prefix_len, kind, CAPACITY)

    def stack_us(self, n: int, prefix_len: int, tiles: StackTiles, *, pdl: bool = True) -> float:
        stack = TritonDecoderStack(*self.parts, tiles=lambda num_tokens, kv_extent: tiles)
        stack.pdl = stack.pdl and pdl
        hidden, window = self.inputs(n, prefix_len)
        return graph_us(lambda: stack.forward(hidden, window, self.kv))

    def reference_us(self, n: int, prefix_len: int) -> float:
        hidden, window = self.inputs(n, prefix_len)
        stack = DecoderStack(*self.parts)
        return graph_us(lambda: stack.forward(hidden, window, self.kv), repeats=3, replays=5)

    def step_us(self, n: int, prefix_len: int, tiles: StackTiles) -> float:
        stack = TritonDecoderStack(*self.parts, tiles=lambda num_tokens, kv_extent: tiles)
        hidden, window = self.inputs(n, prefix_len)
        return graph_us(lambda: argmax_rows(self.head(stack.forward(hidden, window, self.kv)[0])))

    def head(self, hidden: Tensor) -> Tensor:
        return F.linear(rms_norm(hidden, self.final_norm, EPS), self.embedding)

    def draft_us(self, tiles: StackTiles) -> tuple[float, float]:
        """A 4-layer pass of 16 tokens with head norms: with and without the head."""
        stack = TritonDecoderStack(*build(4, torch.bfloat16, head_norm=True), tiles=lambda n, extent: tiles)
        hidden, window = self.inputs(16, 300)
        bare = graph_us(lambda: stack.forward(hidden, window, self.kv[:4]))
        return graph_us(lambda: self.head(stack.forward(hidden, window, self.kv[:4])[0])), bare

    def head_us(self, n: int) -> dict[str, float]:
        hidden = torch.randn(n, HIDDEN, device=DEVICE).bfloat16()
        logits = self.head(hidden)
        return {
            "norm_and_head": graph_us(lambda: self.head(hidden)),
            "argmax_torch": graph_us(lambda: logits.argmax(-1)),
            "argmax_rows": graph_us(lambda: argmax_rows(logits)),
        }

    def kernels_us(self, n: int, prefix_len: int, tiles: StackTiles) -> dict[str, float]:
        """Profiled microseconds of each kernel, without dependent launch so that none counts its wait."""
        stack = TritonDecoderStack(*self.parts, tiles=lambda num_tokens, kv_extent: tiles)
        stack.pdl = False
        hidden, window = self.inputs(n, prefix_len)
        stack.forward(hidden, window, self.kv)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            stack.forward(hidden, window, self.kv)
            torch.cuda.synchronize()
        times = defaultdict(list)
        position: dict[str, int] = defaultdict(int)
        for event in sorted(profiler.events(), key=lambda e: e.time_range.start):
            if event.device_type.name == "CUDA" and event.name.endswith("_kernel"):
                position[event.name] += 1
                part = ""
                if event.name == "project_add_kernel":
                    part = (" down", " out")[position[event.name] % 2]
                times[event.name + part].append(event.time_range.elapsed_us())
        return {name: statistics.median(values) for name, values in times.items()}


def search(bench: Bench, n: int, prefix_len: int, deadline: float) -> tuple[StackTiles, dict[str, float]]:
    """Best tile of each kernel in turn, the others as they are best so far."""
    best = tiles_for(n, CAPACITY)
    best_us = bench.stack_us(n, prefix_len, best)
    tried = {"table": best_us}

    def attempt(label: str, tiles: StackTiles) -> None:
        nonlocal best, best_us
        if time.perf_counter() > deadline:
            tried.setdefault("out of time at " + label, 0.0)
            return
        tried[label] = bench.stack_us(n, prefix_len, tiles)
        if tried[label] < best_us:
            best, best_us = tiles, tried[label]

    for attention, num_splits, out in ONE_ROW_ATTENTION if n == 1 else ROWS_ATTENTION:
        tiles = replace(best, attention=attention, num_splits=num_splits, out=out)
        attempt(f"attention {show(attention)} splits {num_splits} out {show(out)}", tiles)
    for name, options in (ONE_ROW_TILES if n == 1 else ROWS_TILES).items():
        if name == "out" and best.num_splits > 1 and n > 1:
            continue
        for tile in options:
            attempt(f"{name} {show(tile)}", with_tile(best, name, tile))
    return best, tried


def with_tile(tiles: StackTiles, name: str, tile: Tile) -> StackTiles:
    changes: dict[str, Any] = {name: tile}
    return replace(tiles, **changes)


def show(tile: Tile) -> str:
    return f"{tile.block_m}x{tile.block_n}x{tile.block_k}/w{tile.num_warps}s{tile.num_stages}"


def measure(
    bench: Bench, widths: Sequence[int], prefixes: Sequence[int], deadline: float
) -> dict[str, object]:
    rows: dict[str, object] = {}
    for n in widths:
        table = tiles_for(n, CAPACITY)
        row: dict[str, object] = {"head": bench.head_us(n)}
        for prefix_len in prefixes:
            row[f"stack_us@{prefix_len}"] = bench.stack_us(n, prefix_len, table)
            row[f"step_us@{prefix_len}"] = bench.step_us(n, prefix_len, table)
        row["stack_without_pdl_us"] = bench.stack_us(n, prefixes[0], table, pdl=False)
        row["reference_us"] = bench.reference_us(n, prefixes[0])
        row["kernels_us"] = {f"@{p}": bench.kernels_us(n, p, table) for p in prefixes}
        print(f"n={n}", json.dumps(row), flush=True)
        rows[str(n)] = row
    for n in widths:
        best, tried = search(bench, n, prefixes[0], deadline)
        print(f"\nn={n} tiles at prefix {prefixes[0]}, whole-stack us:")
        for label, us in tried.items():
            print(f"  {us:8.1f}  {label}")
        row = {f"best_us@{p}": bench.stack_us(n, p, best) for p in prefixes}
        print(f"  best {best}\n  {row}", flush=True)
        rows[f"search {n}"] = {"tried_us": tried, "best": str(best), **row}
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--prefixes", type=int, nargs="+", default=[300, 1500])
    parser.add_argument("--search-s", type=float, default=90.0, help="seconds the tile search may take")
    parser.add_argument("--check-only", action="store_true")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    failures = check_all()
    if failures:
        print("\n".join(failures))
        return 1
    if args.check_only:
        return 0
    bench = Bench()
    draft_us, draft_stack_us = bench.draft_us(tiles_for(16, CAPACITY))
    print(
        f"draft pass, 4 layers, n=16: {draft_us:.1f} us with head, {draft_stack_us:.1f} without", flush=True
    )
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": " ".join(sys.argv),
        "draft_us": draft_us,
        "draft_stack_us": draft_stack_us,
        "widths": measure(bench, args.widths, args.prefixes, time.perf_counter() + args.search_s),
    }
    line = json.dumps(result)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
