"""The fused decoder stack with random weights of SmolLM2-135M's shapes, for `bench_decoder_gpu.py`.

Kernels are launched one at a time here, as the stack launches them, so that tiles can be compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from torch import Tensor

from ddtree.layers.decoder import DecoderLayer, DecoderSpec, DecoderStack
from ddtree.layers.linear import GateUp, Linear
from ddtree.layers.rotary import RotaryTable
from ddtree.layers.triton_decoder import Buffers, TritonDecoderStack, WindowArgs
from ddtree.layers.triton_tiles import StackTiles
from ddtree.layers.window import Window

HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 576, 1536, 9, 3, 64
CAPACITY, EPS = 2048, 1e-5
KERNELS = ("qkv", "qkv_whole_heads", "attention", "out", "gate_up", "down")
DEVICE = torch.device("cuda")


def build(
    num_layers: int, dtype: torch.dtype, *, head_norm: bool
) -> tuple[DecoderSpec, list[DecoderLayer], RotaryTable]:
    """Random layers of SmolLM2's widths; scaled so that activations keep their size."""
    torch.manual_seed(0)

    def weight(rows: int, cols: int) -> Tensor:
        values: Tensor = torch.randn(rows, cols, device=DEVICE) * cols**-0.5
        return values.to(dtype)

    def norm(features: int) -> Tensor:
        return (1 + 0.1 * torch.randn(features, device=DEVICE)).to(dtype)

    layers = [
        DecoderLayer(
            input_norm=norm(HIDDEN),
            qkv=Linear(weight((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, HIDDEN)),
            q_norm=norm(HEAD_DIM) if head_norm else None,
            k_norm=norm(HEAD_DIM) if head_norm else None,
            out=Linear(weight(HIDDEN, NUM_HEADS * HEAD_DIM)),
            post_norm=norm(HIDDEN),
            gate_up=GateUp(weight(2 * INTERMEDIATE, HIDDEN)),
            down=Linear(weight(HIDDEN, INTERMEDIATE)),
        )
        for _ in range(num_layers)
    ]
    spec = DecoderSpec(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, EPS, (None,) * num_layers)
    inv_freq = 100000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=DEVICE) / HEAD_DIM)
    return spec, layers, RotaryTable(inv_freq, CAPACITY + 256, dtype)


def make_window(n: int, prefix_len: int, mask_kind: str) -> Window:
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
    return Window(prefix_len + positions, torch.tensor([prefix_len], device=DEVICE), CAPACITY, mask, None)


def usual_window(n: int, prefix_len: int) -> Window:
    """Plain decoding for one token, a draft block for 16, else a tree."""
    return make_window(n, prefix_len, "causal" if n == 1 else "full" if n == 16 else "tree")


def random_kv(num_layers: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_layers, 2, NUM_KV_HEADS, CAPACITY, HEAD_DIM, device=DEVICE).to(dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    difference: Tensor = (actual.double() - expected.double()).norm() / expected.double().norm()
    return float(difference)


@dataclass(frozen=True, slots=True)
class Case:
    """One pass to compare; the launch mode overrides that of the tiles, so that all are checked."""

    n: int
    prefix_len: int
    mask_kind: str
    dtype: torch.dtype
    head_norm: bool
    tiles: StackTiles

    def __str__(self) -> str:
        norm = " head-norm" if self.head_norm else ""
        what = f"{self.mask_kind} {self.dtype}{norm} {self.tiles.launch}"
        return f"n={self.n} prefix={self.prefix_len} {what}"


def check(case: Case) -> tuple[str, list[str]]:
    """Compare both stacks: a line of errors, and what is out of bounds.

    Three layers, since bf16 noise grows with depth; three passes on one cache, which must agree.
    """
    n, prefix_len, dtype = case.n, case.prefix_len, case.dtype
    parts = build(3, dtype, head_norm=case.head_norm)
    torch.manual_seed(n * 7919 + prefix_len)
    window, taps = make_window(n, prefix_len, case.mask_kind), (0, 2)
    hidden, kv = torch.randn(n, HIDDEN, device=DEVICE).to(dtype), random_kv(3, dtype)
    reference_kv, before = kv.clone(), hidden.clone()
    stack = TritonDecoderStack(*parts, tiles=lambda num_tokens, kv_extent: case.tiles)
    expected, expected_taps = DecoderStack(*parts).forward(hidden, window, reference_kv, taps)
    actual, actual_taps = stack.forward(hidden, window, kv, taps)
    again = [stack.forward(hidden, window, kv, taps)[0] for _ in range(2)]
    assert expected_taps is not None
    assert actual_taps is not None
    deep, shallow = (2e-5, 2e-5) if dtype == torch.float32 else (2e-2, 1e-2)
    inside = slice(prefix_len, prefix_len + n)
    errors = {
        "hidden": (relative_error(actual, expected), deep),
        "first tap": (relative_error(actual_taps[:, :HIDDEN], expected_taps[:, :HIDDEN]), shallow),
        "last tap": (relative_error(actual_taps[:, HIDDEN:], expected_taps[:, HIDDEN:]), deep),
        "cache 0": (relative_error(kv[0, :, :, inside], reference_kv[0, :, :, inside]), shallow),
        "cache": (relative_error(kv[..., inside, :], reference_kv[..., inside, :]), deep),
    }
    failures = [f"{case}: {name} off by {e:.2e}" for name, (e, top) in errors.items() if not e <= top]
    if not all(torch.equal(actual, other) for other in again):
        failures.append(f"{case}: repeated passes differ")
    kv[..., inside, :] = reference_kv[..., inside, :]
    if not torch.equal(kv, reference_kv) or not torch.equal(hidden, before):
        failures.append(f"{case}: wrote outside of the window's slots or its input")
    return f"{case}: " + " ".join(f"{name} {e:.1e}" for name, (e, _) in errors.items()), failures


class KernelBench:
    """Launches one of the stack's kernels on every layer in turn."""

    def __init__(self, num_layers: int) -> None:
        self.parts = {norm: build(num_layers, torch.bfloat16, head_norm=norm) for norm in (False, True)}
        self.stacks = {norm: TritonDecoderStack(*self.parts[norm]) for norm in (False, True)}
        self.kv = random_kv(num_layers, torch.bfloat16)

    def launcher(self, kernel: str, n: int, prefix_len: int, tiles: StackTiles) -> Callable[[], None]:
        """A function that launches `kernel` once a layer."""
        stack = self.stacks[kernel == "qkv_whole_heads"]
        hidden = torch.randn(n, HIDDEN, device=DEVICE).bfloat16()
        args = WindowArgs.of(usual_window(n, prefix_len))
        buffers = Buffers.empty(hidden, stack.spec, INTERMEDIATE, tiles, 0)
        buffers.middle.copy_(hidden)
        buffers.gated.normal_()
        stack._launch_start(hidden, args, buffers)

        def launch_layer(i: int) -> None:
            layer = stack.layers[i]
            if kernel.startswith("qkv"):
                stack._launch_qkv(i, args, self.kv[i], buffers, 36, tiles)
            elif kernel == "attention":
                stack._launch_attention(i, args, self.kv[i], buffers, tiles)
            elif kernel == "gate_up":
                stack._launch_swiglu(layer, buffers, 36, tiles)
            else:
                x, weight = buffers.gated, layer.down.weight
                if kernel == "out":
                    x, weight = buffers.attention, layer.out.weight
                tile = tiles.out if kernel == "out" else tiles.down
                stack._launch_project_add(
                    x, weight, hidden, layer.input_norm, buffers.hidden, buffers, tile, tiles.launch
                )

        def launch() -> None:
            for i in range(len(stack.layers)):
                launch_layer(i)

        return launch

    def stack_launcher(self, n: int, prefix_len: int, tiles: StackTiles) -> Callable[[], Tensor]:
        """A function that runs the whole stack."""
        stack = TritonDecoderStack(*self.parts[False], tiles=lambda num_tokens, kv_extent: tiles)
        hidden, window = torch.randn(n, HIDDEN, device=DEVICE).bfloat16(), usual_window(n, prefix_len)
        return lambda: stack.forward(hidden, window, self.kv)[0]


def graph_us(run: Callable[[], object], repeats: int = 5, replays: int = 10) -> float:
    """Median microseconds of one replay of `run` captured in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
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


_worker: KernelBench | None = None


def compile_kernel(kernel: str, n: int, tiles: StackTiles) -> str | None:
    """Run one kernel, or the "stack", once, which leaves its binary in the cache on disk; why it failed."""
    global _worker
    _worker = KernelBench(1) if _worker is None else _worker
    try:
        if kernel == "stack":
            _worker.stack_launcher(n, 300, tiles)()
        else:
            _worker.launcher(kernel, n, 300, tiles)()
        torch.cuda.synchronize()
    except Exception as error:  # whatever the compiler raises: this tile is out
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
    return None


class CompilePool:
    """Processes that compile kernels and check passes beside each other; each has a CUDA context."""

    def __init__(self, num_workers: int) -> None:
        self.executor = ProcessPoolExecutor(num_workers, mp_context=get_context("spawn"))

    def checks(self, cases: list[Case]) -> tuple[list[str], list[str]]:
        """Lines of all cases, and their failures."""
        lines, failures = [], []
        for case, future in [(case, self.executor.submit(check, case)) for case in cases]:
            try:
                line, more = future.result()
            except Exception as error:  # a crash of a check is a failure of it
                line, more = f"{case}: {error!r}", [f"{case}: {error!r}"]
            lines.append(line)
            failures += more
        return lines, failures

    def compile(self, wanted: list[tuple[str, int, StackTiles]]) -> list[str | None]:
        """For each, why it cannot run, or None."""
        futures: list[Future[str | None]] = [self.executor.submit(compile_kernel, *item) for item in wanted]
        return [future.result() for future in futures]
