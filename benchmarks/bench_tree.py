"""What does a round spend on the draft tree: top-K, build, mask, links and accept walk?

On CUDA each step is captured in a CUDA graph and replayed back to back (warm caches, groups of
replays between two events), so that figures are device time a call; the `eager` row is launched
without a graph. `torch` rows are the references that the kernels replace. On a CPU it is wall time a
call, on one thread. Before timing, every kernel is compared with its torch reference on the GPU and on
the CPU over random cases, and at the timed shapes; a difference makes the exit status 1. Needs torch,
numpy and, on CUDA, Triton. The last line is JSON.

    PYTHONPATH=src python benchmarks/bench_tree.py --output results/tree_build_gpu.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddtree.provenance import provenance
from ddtree.tree import (
    DraftMarginals,
    DraftTree,
    RetrieveLinks,
    TreeLayout,
    ancestor_mask,
    build_chain,
    build_draft_trees,
    draw,
    follow,
    keyed_gumbel,
    retrieve_links,
    tree_layout,
    verify_greedy,
    verify_sampled,
)
from ddtree.tree.build_triton import build_draft_trees_with_layout, triton_refusal
from ddtree.tree.marginals import marginals_torch
from ddtree.tree.noise import draw_torch
from ddtree.tree.verify import follow_torch

DRAFT_DEPTH = 15
NUM_GROUPS, CALLS_PER_GROUP = 25, 20
Step = Callable[[], object]
Built = tuple[DraftTree, TreeLayout, RetrieveLinks]


def random_logits(bs: int, draft_depth: int, vocab: int, seed: int, kind: str = "continuous") -> Tensor:
    """[bs, draft_depth, vocab] on the CPU: bf16, or heavily quantised, or with -inf and NaN."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(bs, draft_depth, vocab, generator=generator) * 4
    if kind == "ties":
        logits = logits.round()
    elif kind == "trouble":
        logits[torch.rand(logits.shape, generator=generator) < 0.5] = float("-inf")
        logits[..., 3] = float("nan")
        logits[0, draft_depth // 2] = float("-inf")
    return logits.bfloat16()


def torch_reference(marginals: DraftMarginals, roots: Tensor, prefix_lens: Tensor, node_budget: int) -> Built:
    tree = build_draft_trees(marginals, roots, node_budget)
    return tree, tree_layout(tree, prefix_lens), retrieve_links(tree)


def tensors_of(built: Built) -> list[Tensor]:
    tree, layout, links = built
    return [
        tree.tokens, tree.parents, tree.depths, tree.log_probs,
        layout.positions, layout.ancestor_mask, links.next_token, links.next_sibling,
    ]  # fmt: skip


def random_cases(num_cases: int) -> Iterator[tuple[int, int, int, int]]:
    """(draft_depth, K, node_budget, bs): the limits first, then random ones."""
    yield from [(15, 64, 63, 8), (31, 127, 127, 4), (1, 1, 1, 1), (15, 16, 127, 3)]
    generator = torch.Generator().manual_seed(0)
    # Shapes come from a small set, since each one is a compilation.
    shapes = [(15, 63, 63), (7, 8, 31), (31, 32, 100), (3, 127, 64), (2, 5, 9)]
    for _ in range(num_cases - 4):
        shape = shapes[int(torch.randint(len(shapes), (), generator=generator))]
        yield (*shape, int(torch.randint(1, 9, (), generator=generator)))


def agreeing_targets(tree: DraftTree, seed: int) -> Tensor:
    """Target choices [bs, W] of which some carry a child's token, so that walks go down the tree."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 300, tree.tokens.shape, generator=generator)
    for b in range(tree.tokens.shape[0]):
        for column in torch.randperm(tree.num_verify_tokens - 1, generator=generator)[::2] + 1:
            if tree.parents[b, column] >= 0:
                targets[b, tree.parents[b, column]] = tree.tokens[b, column]
    return targets


def same_draws(log_probs: Tensor, seeds: Tensor, positions: Tensor) -> bool:
    """Whether GPU and CPU draw the same, or tokens whose totals are as good up to float64's last bits."""
    expected = draw_torch(log_probs, seeds, positions)
    tokens = draw(log_probs.cuda(), seeds.cuda(), positions.cuda()).cpu()
    if torch.equal(tokens, expected):
        return True
    totals = keyed_gumbel(seeds, positions, torch.arange(log_probs.shape[-1])) + log_probs
    ours, theirs = (totals.gather(-1, t.unsqueeze(-1)) for t in (tokens, expected))
    return torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def same_marginals(ours: DraftMarginals, logits: Tensor, topk: int) -> dict[str, bool]:
    """What `from_logits` promises on CUDA, part by part, of `ours` made from `logits` [bs, L, V] there.

    A row's log-sum is within 1e-6 of the exact one, and given that log-sum tokens and log-probabilities
    are those of torch on the CPU bit for bit. The CPU's own log-sum is no reference: it is rounded too.
    """
    from ddtree.tree.triton_topk import top_tokens  # needs Triton, which a CPU run does not

    log_sums = top_tokens(logits.cuda().flatten(0, 1), topk).log_sums.cpu().view(*logits.shape[:-1], 1)
    expected = marginals_torch(logits, topk, log_sums)
    values = torch.where(logits.isnan(), float("-inf"), logits.double())
    exact = (values - values.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True).log()
    return {
        "marginals log_sum": torch.allclose(log_sums.double(), exact, rtol=1e-7, atol=1e-6, equal_nan=True),
        "marginals tokens": torch.equal(ours.tokens.cpu(), expected.tokens),
        "marginals log_probs": torch.equal(ours.log_probs.cpu(), expected.log_probs),
    }


def settle_cpu_functions() -> None:
    """Call `exp` and `log` once on one thread, since the CPU references need all their digits.

    MKL picks a function's code at its first call, and where several threads make that call together one
    of them can run a variant with half the digits (PyTorch: "MKL VML first-call kernel dispatch race").
    """
    for dtype in (torch.float32, torch.float64):
        torch.ones(1, dtype=dtype).exp_().log_()


def same_steps(logits: Tensor, topk: int, node_budget: int, seed: int) -> dict[str, bool]:
    """Whether each step does on the GPU what its reference does on the CPU, for `logits` [bs, L, V]."""
    bs, draft_depth, _ = logits.shape
    on_gpu = DraftMarginals.from_logits(logits.cuda(), topk)
    same = same_marginals(on_gpu, logits, topk)
    # The same values on both from here on, since the normaliser may differ in its last bit.
    on_cpu = DraftMarginals(on_gpu.tokens.cpu(), on_gpu.log_probs.cpu())
    roots, prefix_lens = torch.arange(bs), torch.arange(bs) * 100
    built = torch_reference(on_cpu, roots, prefix_lens, node_budget)
    arguments = (on_gpu, roots.cuda(), prefix_lens.cuda(), node_budget)
    for name, build in (("torch", torch_reference), ("triton", build_draft_trees_with_layout)):
        pairs = zip(tensors_of(build(*arguments)), tensors_of(built), strict=True)
        same[f"tree {name}"] = all(torch.equal(ours.cpu(), theirs) for ours, theirs in pairs)
    tree, layout, _ = built
    targets, mask = agreeing_targets(tree, seed), ancestor_mask(tree)
    moved = DraftTree(tree.tokens.cuda(), tree.parents.cuda(), tree.depths.cuda(), tree.log_probs.cuda())
    walks = (
        follow(moved, mask.cuda(), targets.cuda(), draft_depth),
        follow_torch(tree, mask, targets, draft_depth),
    )
    same["follow"] = all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(*walks, strict=True))
    log_probs = torch.log_softmax(random_logits(bs, node_budget + 1, logits.shape[-1], seed).float(), -1)
    same["draw"] = same_draws(log_probs, roots.unsqueeze(1) - seed, layout.positions + 1)
    return same


def failed(same: dict[str, bool]) -> str:
    return ", ".join(name for name, is_same in same.items() if not is_same)


def count_differences(num_cases: int) -> int:
    """Cases in which the kernels, torch on CUDA and torch on the CPU do not all say the same."""
    settle_cpu_functions()
    num_different = 0
    for seed, (draft_depth, topk, node_budget, bs) in enumerate(random_cases(num_cases)):
        kind = ("continuous", "ties", "trouble")[seed % 3]
        logits = random_logits(bs, draft_depth, 300, seed, kind)
        same = same_steps(logits, topk, node_budget, seed)
        if not all(same.values()):
            num_different += 1
            shape = f"depth={draft_depth} K={topk} B={node_budget} bs={bs}"
            print(f"DIFFERENT in {failed(same)}: case {seed} {kind} {shape}")
    for dtype in (torch.bfloat16, torch.float32):
        same = same_steps(random_logits(1, DRAFT_DEPTH, 49152, 7).to(dtype), 64, 63, 7)
        if not all(same.values()):
            num_different += 1
            print(f"DIFFERENT in {failed(same)}: full vocabulary, {dtype}")
    return num_different


def captured(step: Step) -> Step:
    """The step as a replay of its CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def cuda_times_us(step: Step) -> list[float]:
    """Microseconds a call, one figure a group of back-to-back calls."""
    times = []
    for group in range(NUM_GROUPS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(CALLS_PER_GROUP):
            step()
        end.record()
        end.synchronize()
        if group >= 2:
            times.append(start.elapsed_time(end) * 1e3 / CALLS_PER_GROUP)
    return times


def cpu_times_us(step: Step) -> list[float]:
    times = []
    for call in range(NUM_GROUPS * 4 + 5):
        start_s = time.perf_counter()
        step()
        if call >= 5:
            times.append((time.perf_counter() - start_s) * 1e6)
    return times


def steps_of(device: str, bs: int, node_budget: int, topk: int, vocab: int) -> dict[str, Step]:
    """The steps of a round for one shape, by name."""
    logits = random_logits(bs, DRAFT_DEPTH, vocab, seed=1).to(device)
    marginals = DraftMarginals.from_logits(logits, topk)
    roots, prefix_lens = torch.arange(bs, device=device), torch.arange(bs, device=device) * 100
    tree, layout, _ = torch_reference(marginals, roots, prefix_lens, node_budget)
    targets = agreeing_targets(
        DraftTree(tree.tokens.cpu(), tree.parents.cpu(), tree.depths, tree.log_probs), 0
    )
    targets = targets.to(device)
    target_logits = random_logits(bs, node_budget + 1, vocab, seed=2).to(device).float()
    threshold = target_logits.topk(50).values[..., -1:]
    kept_logits = target_logits.masked_fill(target_logits < threshold, float("-inf"))
    seeds, mask = torch.arange(bs, device=device), layout.ancestor_mask
    steps: dict[str, Step] = {
        "from_logits": lambda: DraftMarginals.from_logits(logits, topk),
        "from_logits torch": lambda: marginals_torch(logits, topk),
        "build_chain": lambda: build_chain(marginals, roots),
        "build_torch": lambda: build_draft_trees(marginals, roots, node_budget),
        "tree_layout": lambda: tree_layout(tree, prefix_lens),
        "retrieve_links": lambda: retrieve_links(tree),
        "build+layout+links torch": lambda: torch_reference(marginals, roots, prefix_lens, node_budget),
        "follow": lambda: follow(tree, mask, targets, DRAFT_DEPTH),
        "follow torch": lambda: follow_torch(tree, mask, targets, DRAFT_DEPTH),
        "draw": lambda: draw(target_logits, seeds.unsqueeze(1), layout.positions),
        "draw top-k 50": lambda: draw(kept_logits, seeds.unsqueeze(1), layout.positions),
        "draw torch": lambda: draw_torch(target_logits, seeds.unsqueeze(1), layout.positions),
        "verify_greedy": lambda: verify_greedy(tree, mask, target_logits, DRAFT_DEPTH),
        "verify_sampled": lambda: verify_sampled(
            tree, mask, target_logits, seeds, layout.positions, DRAFT_DEPTH
        ),
    }
    if device == "cuda" and triton_refusal(DRAFT_DEPTH, topk, node_budget) is None:
        steps["build+layout+links triton"] = lambda: build_draft_trees_with_layout(
            marginals, roots, prefix_lens, node_budget
        )
        steps["from_logits+build+layout+links triton"] = lambda: build_draft_trees_with_layout(
            DraftMarginals.from_logits(logits, topk), roots, prefix_lens, node_budget
        )
    return steps


def measure(device: str, bs: int, node_budget: int, topk: int, vocab: int) -> Iterator[dict[str, Any]]:
    shape = {"bs": bs, "node_budget": node_budget, "candidate_topk": topk, "vocab": vocab}
    for name, step in steps_of(device, bs, node_budget, topk, vocab).items():
        runs = {"": cpu_times_us}
        if device == "cuda":
            runs = {"": lambda step: cuda_times_us(captured(step))}
            if name == "build+layout+links triton":
                runs[" eager"] = cuda_times_us
        for suffix, times_of in runs.items():
            times = times_of(step)
            deciles = statistics.quantiles(times, n=10)
            yield {"step": name + suffix, **shape, "median_us": round(statistics.median(times), 1),
                   "p10_us": round(deciles[0], 1), "p90_us": round(deciles[-1], 1)}  # fmt: skip


def print_row(row: dict[str, Any]) -> None:
    print(f"{row['step']:40} bs={row['bs']:<3} B={row['node_budget']:<5} K={row['candidate_topk']:<5} "
          f"V={row['vocab']:<7} {row['median_us']:>9.1f} us  ({row['p10_us']:.1f} to {row['p90_us']:.1f})",
          flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default=None)
    parser.add_argument("--cases", type=int, default=300, help="random cases compared before timing (CUDA)")
    parser.add_argument("--quick", action="store_true", help="one shape only")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        torch.set_num_threads(1)
    num_different = count_differences(arguments.cases) if device == "cuda" else 0
    print(f"{arguments.cases if device == 'cuda' else 0} cases compared, {num_different} differ")
    shapes = [(1, 63, 64, 49152)]
    if not arguments.quick:
        shapes += [(1, 16, 16, 49152), (1, 31, 32, 49152), (1, 127, 127, 49152), (1, 256, 256, 49152)]
        shapes += [(8, 63, 64, 49152), (1, 63, 64, 151936)]
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        for row in measure(device, *shape):
            print_row(row)
            rows.append(row)
    result = {
        "device": device,
        "draft_depth": DRAFT_DEPTH,
        "cases_compared": arguments.cases if device == "cuda" else 0,
        "cases_different": num_different,
        "rows": rows,
        "provenance": provenance(),
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
