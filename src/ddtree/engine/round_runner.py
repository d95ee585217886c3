"""Runs rounds: eagerly, or on CUDA as replays of captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ddtree.config import Mode
from ddtree.engine.decode_round import (
    Built,
    Round,
    VerifyPass,
    accept,
    build,
    commit,
    decode_round,
    draft,
    verify,
)
from ddtree.engine.logprobs import path_logprobs
from ddtree.engine.readout import Readout, pack, unpack
from ddtree.engine.sampling import TokenChooser
from ddtree.engine.sequence import ModelPair, Sequence
from ddtree.engine.stages import NO_CLOCK, StageClock
from ddtree.tree.budget import DraftPlan
from ddtree.tree.verify import VerifyResult

# Few extents, since each is captured anew for every plan; the fused kernels read only what is there.
SHORTEST_EXTENT, EXTENT_GROWTH = 1024, 4
MAX_GRAPHS = 256  # a caller that tries every budget must not fill the GPU with graphs


class RoundRunner(Protocol):
    """Runs one round and reads it; `has_captured` says that the last one captured a graph on the way."""

    last_round: Round
    has_captured: bool

    def run(
        self,
        plan: DraftPlan,
        chooser: TokenChooser,
        budgets: tuple[int, ...],
        top_logprobs: int | None = None,
        clock: StageClock = NO_CLOCK,
    ) -> Readout: ...


class EagerRunner:
    """Calls `decode_round` as it is written, or another function of its kind."""

    last_round: Round
    has_captured = False

    def __init__(
        self, pair: ModelPair, sequence: Sequence, round_fn: Callable[..., Round] = decode_round
    ) -> None:
        self._pair, self._sequence, self._round_fn = pair, sequence, round_fn

    def run(
        self,
        plan: DraftPlan,
        chooser: TokenChooser,
        budgets: tuple[int, ...],
        top_logprobs: int | None = None,
        clock: StageClock = NO_CLOCK,
    ) -> Readout:
        """One round, and the host's knowledge of where the sequence stands brought up to date."""
        finished = self._round_fn(self._pair, self._sequence, plan, chooser, top_logprobs, clock)
        vector = pack(finished, budgets)
        readout = unpack(
            vector,
            self._pair.block_size,
            has_draft=plan.mode != Mode.AR,
            logprobs_shape=finished.logprobs_shape,
        )
        assert self._sequence.start is not None
        self._sequence.start += len(readout.accept_tokens)
        self.last_round = finished
        return readout


class GraphRunner:
    """The same steps as `decode_round`, captured as CUDA graphs once for each plan and key extent.

    A round of a greedy request without penalties or log-probabilities is one graph. Other requests
    accept eagerly between two graphs, draft to verify and commit, since their processing varies. A round
    whose steps are timed is a graph a step, and accepts eagerly, too.
    """

    last_round: Round
    has_captured = False

    def __init__(self, pair: ModelPair, sequence: Sequence) -> None:
        self._pair, self._sequence = pair, sequence
        self._graphs: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None
        row = torch.zeros(1, pair.block_size, dtype=torch.int64, device=sequence.root_token.device)
        # Where an eager accept leaves the path for the commit graph to read.
        self._path = VerifyResult(row, row.clone(), row[:, 0].clone(), row[:, 0].clone())

    def run(
        self,
        plan: DraftPlan,
        chooser: TokenChooser,
        budgets: tuple[int, ...],
        top_logprobs: int | None = None,
        clock: StageClock = NO_CLOCK,
    ) -> Readout:
        """Replay one round; the first round of a plan or of a longer extent captures it."""
        start = self._sequence.start
        assert start is not None
        extent = self._extent(start + max(plan.node_budget + 1, self._pair.block_size))
        is_plain_greedy = chooser.params.is_greedy and not chooser.params.changes_logits
        is_one_graph = is_plain_greedy and top_logprobs is None and clock is NO_CLOCK
        self._sequence.start, self._sequence.kv_extent = None, extent
        self.has_captured = False
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.clear()
        if is_one_graph:
            key = ("round", plan, extent, budgets)
            finished, vector = self._replay(key, lambda: self._whole_round(plan, chooser, budgets))
        else:
            finished = self._accept_between(plan, extent, chooser, top_logprobs, clock)
            vector = pack(finished, budgets)
        readout = unpack(
            vector,
            self._pair.block_size,
            has_draft=plan.mode != Mode.AR,
            logprobs_shape=finished.logprobs_shape,
        )
        self._sequence.start = start + len(readout.accept_tokens)
        self.last_round = finished
        return readout

    def _whole_round(
        self, plan: DraftPlan, chooser: TokenChooser, budgets: tuple[int, ...]
    ) -> tuple[Round, Tensor]:
        finished = decode_round(self._pair, self._sequence, plan, chooser)
        return finished, pack(finished, budgets)

    def _draft_to_verify(self, plan: DraftPlan) -> tuple[Built, VerifyPass]:
        built = build(draft(self._pair, self._sequence, plan), self._sequence, plan)
        return built, verify(self._pair, self._sequence, built)

    def _draft_and_build(
        self, plan: DraftPlan, extent: int, clock: StageClock
    ) -> Callable[[], tuple[Built, VerifyPass]]:
        """Run the steps before verify, each timed; returns the verify step of what they built."""
        pair, sequence = self._pair, self._sequence
        marginals = None
        if plan.mode != Mode.AR:  # a graph of nothing is warned about
            marginals = self._replay(("draft", plan, extent), lambda: draft(pair, sequence, plan))
        clock.mark("draft")
        built = self._replay(("build", plan, extent), lambda: build(marginals, sequence, plan))
        clock.mark("build")
        return lambda: (built, verify(pair, sequence, built))

    def _accept_between(
        self,
        plan: DraftPlan,
        extent: int,
        chooser: TokenChooser,
        top_logprobs: int | None,
        clock: StageClock,
    ) -> Round:
        is_timed = clock is not NO_CLOCK
        step: Callable[[], tuple[Built, VerifyPass]] = partial(self._draft_to_verify, plan)
        if is_timed:
            step = self._draft_and_build(plan, extent, clock)
        verify_key, commit_key = ("verify", plan, extent, is_timed), ("commit", plan, extent, is_timed)
        verify_graph, (built, verified) = self._captured(verify_key, step)
        # Captured before the verify graph runs: warming up a commit moves KV, which may happen only once.
        if commit_key not in self._graphs:
            # An earlier plan's path may name columns that a narrower tree does not have.
            for part in self._path:
                part.zero_()
        commit_graph, _ = self._captured(
            commit_key, lambda: commit(self._pair, self._sequence, verified, self._path)
        )
        verify_graph.replay()
        clock.mark("verify")
        result = accept(built, verified, chooser, self._pair.block_size - 1)
        logprobs = path_logprobs(verified.output.logits, result, top_logprobs)
        for kept, new in zip(self._path, result, strict=True):
            kept.copy_(new)
        clock.mark("accept")
        commit_graph.replay()
        clock.mark("commit")
        return Round(built, result, logprobs)

    def _extent(self, needed: int) -> int:
        """The step that holds `needed` key slots, at most the cache."""
        extent = SHORTEST_EXTENT
        while extent < needed:
            extent *= EXTENT_GROWTH
        return min(extent, self._pair.kv_cache.capacity_tokens)

    def _replay(self, key: tuple[Any, ...], step: Callable[[], Any]) -> Any:
        graph, output = self._captured(key, step)
        graph.replay()
        return output

    def _captured(self, key: tuple[Any, ...], step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        if key not in self._graphs:
            self._graphs[key] = self._capture(step)
            self.has_captured = True
        return self._graphs[key]

    def _capture(self, step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Warm up a step (kernels compile), put the sequence back where it stood, capture the step."""
        sequence = self._sequence
        root_token, prefix_len = sequence.root_token.clone(), sequence.prefix_len.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
                sequence.root_token.copy_(root_token)
                sequence.prefix_len.copy_(prefix_len)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = step()
        self._pool = self._pool or graph.pool()
        return graph, output
