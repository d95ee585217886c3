"""Counters of DDTREE's rounds for Prometheus, in the multiprocess mode that SGLang's /metrics collects.

They are fed on the host with numbers SGLang has copied already, and with `DeviceCounters`, which never wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ddtree.config import Mode, PluginConfig

READ_EVERY = 32


class DeviceCounters:
    """Counts on the device what the host does not see, and reads the sum back now and then without waiting.

    One copy to pinned memory is under way at most; its event is asked, never waited for.
    """

    def __init__(self, device: torch.device, read_every: int = READ_EVERY) -> None:
        is_cuda = device.type == "cuda"
        self._total = torch.zeros((), dtype=torch.int64, device=device)
        self._copy = torch.zeros((), dtype=torch.int64, pin_memory=is_cuda)
        self._event = torch.cuda.Event() if is_cuda else None
        self._is_copying = False
        self._read_every = read_every
        self._adds_since_copy = 0
        self._taken = 0

    def add(self, accept_indices: Tensor) -> None:
        """Count the root-sibling hits of a round: paths that leave the root by another child than column 1.

        `accept_indices` is [bs, draft_depth + 1] int64: tree columns along the path, -1 beyond its end.
        Column 1 is the most likely child, as nodes stand best first.
        """
        self._total += (accept_indices[:, 1] > 1).sum()
        self._adds_since_copy += 1
        if self._adds_since_copy >= self._read_every and not self._is_copying:
            self._copy.copy_(self._total, non_blocking=True)
            if self._event is not None:
                self._event.record()
            self._is_copying, self._adds_since_copy = True, 0

    def take_root_sibling_hits(self) -> int:
        """Hits that reached the host since the last call; late by up to `read_every` rounds."""
        if not self._is_copying or (self._event is not None and not self._event.query()):
            return 0
        self._is_copying = False
        new = int(self._copy) - self._taken
        self._taken += new
        return new


class RoundMetrics:
    """The plugin's Prometheus metrics, for one scheduler process.

    Args:
        labels: names and values of labels on every metric, as SGLang's own have.
        num_nodes: nodes of a tree, the root not counted.
        verify_width: tokens of a request in a verify pass.
        draft_depth: levels below the root.
        device_counters: what the rounds count on the device.
        registry: where to register, the default of `prometheus_client` if None.
    """

    def __init__(
        self,
        labels: dict[str, str],
        *,
        num_nodes: int,
        verify_width: int,
        draft_depth: int,
        device_counters: DeviceCounters,
        registry: Any = None,
    ) -> None:
        # It looks at PROMETHEUS_MULTIPROC_DIR when it is first imported, and SGLang sets that late.
        prometheus: Any = import_module("prometheus_client")
        registry, names = registry or prometheus.REGISTRY, list(labels)

        def counter(name: str, text: str, *more: str) -> Any:
            return prometheus.Counter(f"ddtree_{name}", text, [*names, *more], registry=registry)

        self.device_counters = device_counters
        self.num_nodes = num_nodes
        self.rounds = counter("rounds", "Rounds: one a request in a verify pass.").labels(**labels)
        self.nodes = counter("nodes_verified", "Nodes verified, roots not counted.").labels(**labels)
        self.tokens = counter("committed_tokens", "Correct drafts and bonus tokens.").labels(**labels)
        self.root_sibling_hits = counter(
            "root_sibling_hits", "Rounds that left the root by another child than the most likely one."
        ).labels(**labels)
        correct = counter("correct_drafts", "Rounds whose draft at this depth was correct.", "depth")
        self.correct_drafts = [
            correct.labels(**labels, depth=str(depth)) for depth in range(1, draft_depth + 1)
        ]
        width = prometheus.Gauge(
            "ddtree_verify_width", "Tokens of a request in a verify pass.", names,
            registry=registry, multiprocess_mode="mostrecent",
        )  # fmt: skip
        width.labels(**labels).set(verify_width)

    def observe(self, num_correct_drafts: Sequence[int]) -> None:
        """Count one verify pass, a number of correct drafts a request (the bonus token not counted)."""
        rounds = len(num_correct_drafts)
        self.rounds.inc(rounds)
        self.nodes.inc(rounds * self.num_nodes)
        self.tokens.inc(rounds + sum(num_correct_drafts))
        for depth, counter in enumerate(self.correct_drafts, start=1):
            if not (correct := sum(number >= depth for number in num_correct_drafts)):
                break
            counter.inc(correct)
        if hits := self.device_counters.take_root_sibling_hits():
            self.root_sibling_hits.inc(hits)


def make_round_metrics(
    config: PluginConfig, *, tp_rank: int, block_size: int, device: torch.device
) -> RoundMetrics | None:
    """The metrics of this scheduler process, or None where SGLang reports none from it."""
    from sglang.srt.runtime_context import get_observability, get_serving

    observability = get_observability()
    is_reporting = tp_rank == 0 or observability.enable_metrics_for_all_schedulers
    if not (config.metrics and observability.enable_metrics and is_reporting):
        return None
    return RoundMetrics(
        {"model_name": str(get_serving().served_model_name), "tp_rank": str(tp_rank)},
        num_nodes=block_size - 1 if config.mode == Mode.CHAIN else config.node_budget,
        verify_width=config.verify_width(block_size),
        draft_depth=block_size - 1,
        device_counters=DeviceCounters(device),
    )
