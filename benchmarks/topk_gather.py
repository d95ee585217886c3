"""What ranks exchange for the drafter's K best tokens, against gathering the logits of the same positions.

Bytes are counted from what `gather_marginals` hands to the group. Times are of one process a rank, joined by
NCCL, or by gloo where there are not as many GPUs: of the exchange alone, and of the whole step from a rank's
logits to candidates. On GPUs the calls are queued behind a kernel that sleeps, so that it is the device's
time that is measured and not the host's.

    python benchmarks/topk_gather.py --ranks 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from ddtree.sglang_plugin.draft_sampler import Gatherer, gather_marginals
from ddtree.tree import DraftMarginals

VOCAB_SIZE, DRAFT_DEPTH = 151_936, 15  # of Qwen3 and a drafter with blocks of 16
CALLS, REPEATS, WARM_UP_CALLS = 20, 7, 10
SLEEP_CYCLES = 60_000_000  # some 30 ms, longer than the host takes to queue the calls
LOGIT_BYTES = 2  # bfloat16


class CountingGroup:
    """A group of alike ranks that counts what one of them hands over."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.sent_bytes = world_size, 0

    def all_gather_into_tensor(self, output: Tensor, input: Tensor) -> None:
        self.sent_bytes += input.nbytes
        output.copy_(input.repeat(self.world_size, *(1,) * (input.dim() - 1)))


class DistributedGroup:
    """The default group of torch.distributed, as SGLang's groups are called."""

    def __init__(self) -> None:
        self.world_size = dist.get_world_size()

    def all_gather_into_tensor(self, output: Tensor, input: Tensor) -> None:
        dist.all_gather_into_tensor(output, input)


def topk_bytes(num_ranks: int, batch: int, draft_depth: int, candidate_topk: int) -> int:
    """Bytes that a rank hands over for the candidates of a round."""
    group = CountingGroup(num_ranks)
    # What is exchanged does not depend on the size of a rank's vocabulary.
    logits = torch.zeros(batch, draft_depth, 2 * candidate_topk)
    gather_marginals(logits, candidate_topk, 0, group)
    return group.sent_bytes


def logits_bytes(num_ranks: int, batch: int, draft_depth: int, vocab_size: int) -> int:
    """Bytes that a rank hands over for the logits of a round's draft positions."""
    return batch * draft_depth * -(-vocab_size // num_ranks) * LOGIT_BYTES


def gather_logits(logits: Tensor, group: Gatherer) -> Tensor:
    """Every rank's logits [bs, L, shard], as [ranks * bs, L, shard]."""
    gathered = logits.new_empty(group.world_size * logits.shape[0], *logits.shape[1:])
    group.all_gather_into_tensor(gathered, logits)
    return gathered


def marginals_of_logits(logits: Tensor, candidate_topk: int, group: Gatherer) -> DraftMarginals:
    """The candidates of the gathered logits."""
    gathered = gather_logits(logits, group).view(group.world_size, *logits.shape)
    return DraftMarginals.from_logits(gathered.movedim(0, -2).flatten(-2), candidate_topk)


def exchange_topk(values: Tensor, tokens: Tensor, group: Gatherer) -> None:
    """The two exchanges of `gather_marginals` without what stands around them."""
    for local in (values, tokens):
        group.all_gather_into_tensor(
            local.new_empty(group.world_size * local.shape[0], *local.shape[1:]), local
        )


def call_us(work: Callable[[], Any], device: torch.device) -> float:
    """Median microseconds of a call."""
    for _ in range(WARM_UP_CALLS):
        work()
    times = [_device_us(work) if device.type == "cuda" else _host_us(work) for _ in range(REPEATS)]
    return round(statistics.median(times), 2)


def _device_us(work: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(SLEEP_CYCLES)
    begin.record()
    for _ in range(CALLS):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / CALLS


def _host_us(work: Callable[[], Any]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(CALLS):
        work()
    return (time.perf_counter() - begin) * 1e6 / CALLS


def time_case(
    batch: int, candidate_topk: int, vocab_size: int, rank: int, device: torch.device
) -> dict[str, Any]:
    """Microseconds of both ways for a batch and a number of candidates."""
    group = DistributedGroup()
    shard = -(-vocab_size // group.world_size)
    generator = torch.Generator(device=device).manual_seed(rank)
    logits = torch.randn(batch, DRAFT_DEPTH, shard, generator=generator, device=device).bfloat16()
    values = torch.zeros(batch, DRAFT_DEPTH, candidate_topk + 1, device=device)
    tokens = torch.zeros(batch, DRAFT_DEPTH, candidate_topk, dtype=torch.int64, device=device)
    return {
        "batch": batch,
        "candidates": candidate_topk,
        "topk_sent_bytes": topk_bytes(group.world_size, batch, DRAFT_DEPTH, candidate_topk),
        "logits_sent_bytes": logits_bytes(group.world_size, batch, DRAFT_DEPTH, vocab_size),
        "topk_exchange_us": call_us(lambda: exchange_topk(values, tokens, group), device),
        "logits_exchange_us": call_us(lambda: gather_logits(logits, group), device),
        "topk_step_us": call_us(
            lambda: gather_marginals(logits, candidate_topk, rank * shard, group), device
        ),
        "logits_step_us": call_us(lambda: marginals_of_logits(logits, candidate_topk, group), device),
    }


def run_rank(rank: int, num_ranks: int, folder: str, cases: Sequence[tuple[int, int]], vocab: int) -> None:
    """Time all cases on a rank; rank 0 writes them down."""
    on_gpus = torch.cuda.device_count() >= num_ranks
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo", init_method=f"file://{folder}/rendezvous", rank=rank,
        world_size=num_ranks,
    )  # fmt: skip
    rows = [time_case(batch, candidates, vocab, rank, device) for batch, candidates in cases]
    if rank == 0:
        backend = dist.get_backend()
        report = {"ranks": num_ranks, "backend": backend, "vocab_size": vocab, "rows": rows}
        (Path(folder) / "report.json").write_text(json.dumps(report), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(num_ranks: int, batches: Sequence[int], candidates: Sequence[int], vocab: int) -> dict[str, Any]:
    """Bytes and times of every batch and number of candidates."""
    cases = [(batch, topk) for batch in batches for topk in candidates]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            run_rank, (num_ranks, folder, cases, vocab), nprocs=num_ranks, start_method="spawn"
        )
        report: dict[str, Any] = json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--candidates", type=int, nargs="+", default=[15, 31, 32])
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    from common import write_results  # the ranks, which import this module, need no engine

    write_results(args.output, measure(args.ranks, args.batches, args.candidates, args.vocab_size))


if __name__ == "__main__":
    main()
