"""Tensor-parallel ranks on a CPU: processes joined by gloo, for the tests of what ranks exchange."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class GlooGroup:
    """What the plugin uses of SGLang's `GroupCoordinator`, over gloo."""

    def __init__(self) -> None:
        self.world_size = dist.get_world_size()
        self.rank_in_group = dist.get_rank()

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        dist.all_gather(list(output.chunk(self.world_size)), input)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        dist.broadcast(tensor, src)
        return tensor


def _run(
    rank: int, world_size: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )
    torch.save(work(GlooGroup(), *arguments), f"{folder}/result{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(world_size: int, folder: Path, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(group, *arguments)` returns on each of `world_size` ranks."""
    mp.start_processes(
        _run, (world_size, str(folder), work, arguments), nprocs=world_size, start_method="spawn"
    )
    return [torch.load(folder / f"result{rank}.pt", weights_only=False) for rank in range(world_size)]
