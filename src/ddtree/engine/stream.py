"""A running request: iterate to run it, round by round."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddtree.config import Mode
from ddtree.engine.inference import inference
from ddtree.engine.planner import Planner
from ddtree.engine.readout import Readout
from ddtree.engine.request import Chunk, FinishReason, Generation, TokenLogprobs
from ddtree.engine.sampling import TokenChooser
from ddtree.engine.stages import NO_CLOCK, StageClock, start_clock
from ddtree.engine.text import TextStream
from ddtree.errors import DDTreeError
from ddtree.stats import GenerationStats, RoundObserver, RoundStats
from ddtree.tree.budget import DraftPlan

if TYPE_CHECKING:
    from ddtree.engine.engine import Engine
    from ddtree.engine.request import Request


class TokenStream:
    """Chunks of committed text and tokens of one request.

    Iterating runs the request; leaving the loop early, `cancel` and errors all release the engine.
    """

    def __init__(self, engine: Engine, request: Request, planner: Planner, chooser: TokenChooser) -> None:
        self._engine, self._request = engine, request
        self._planner, self._chooser = planner, chooser
        is_plain = request.mode == Mode.AR
        self._pair = engine.plain_pair if is_plain else engine.pair
        self._runner = engine.plain_runner if is_plain else engine.runner
        self._text = TextStream(engine.tokenizer, request.sampling.stop)
        self._stats = GenerationStats(prompt_tokens=len(request.prompt_tokens))
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finish: FinishReason | None = None
        self._cancelled = threading.Event()
        self._started = False
        room = engine.max_context_tokens - len(request.prompt_tokens)
        self._max_tokens = min(request.sampling.max_tokens, room)
        eos_tokens = frozenset() if request.sampling.ignore_eos else engine.eos_tokens
        self._stop_tokens = eos_tokens | set(request.sampling.stop_token_ids)

    def cancel(self) -> None:
        """End the request after the round in progress; safe to call from another thread."""
        self._cancelled.set()

    def result(self) -> Generation:
        """What was generated, once the iteration has ended; a stream left early counts as cancelled."""
        finish = self._finish or FinishReason.CANCEL
        return Generation(self._text.text, tuple(self._tokens), finish, self._stats, tuple(self._logprobs))

    def __iter__(self) -> Iterator[Chunk]:
        if self._started:
            raise DDTreeError("a stream runs once; start another one for the same request")
        self._engine.acquire()
        self._started = True
        try:
            yield from self._run()
        finally:
            self._engine.lock.release()

    def _run(self) -> Iterator[Chunk]:
        request, begin = self._request, time.perf_counter()
        with inference(self._engine.device):
            first, logprobs = self._engine.prefill(
                self._pair, request.prompt_tokens, self._chooser, request.top_logprobs
            )
        self._stats.prefill_s = time.perf_counter() - begin
        yield self._take((first,), logprobs)
        while self._finish is None:
            begin = time.perf_counter()
            readout = self._round()
            chunk = self._take(readout.accept_tokens, readout.logprobs)
            # Text and stop checks are part of decoding; what the consumer does with a chunk is not.
            self._stats.decode_s += time.perf_counter() - begin
            yield chunk

    def _round(self) -> Readout:
        plan = self._planner.next_plan()
        prefix_len = len(self._request.prompt_tokens) + len(self._tokens) - 1
        observer, top_logprobs = self._request.observer, self._request.top_logprobs
        is_timed = observer is not None and observer.wants_stages
        begin = time.perf_counter()
        # Entered anew each round: inference mode must not leak to observers and consumers.
        with inference(self._engine.device):
            clock = start_clock(self._engine.device) if is_timed else NO_CLOCK
            readout = self._runner.run(plan, self._chooser, self._planner.budgets, top_logprobs, clock)
            self._chooser.count(self._runner.last_round.result.accept_tokens[0])
        round_s = time.perf_counter() - begin
        self._stats.verify_ct += 1
        self._stats.accept_histogram[len(readout.accept_tokens)] += 1
        if not self._runner.has_captured:  # a capture's time says nothing of the plan
            self._planner.learn(plan, readout, round_s * 1e3)
        if observer is not None:
            observer.on_round(self._stats_of(observer, plan, readout, prefix_len, round_s * 1e3, clock))
        return readout

    def _stats_of(
        self,
        observer: RoundObserver,
        plan: DraftPlan,
        readout: Readout,
        prefix_len: int,
        round_ms: float,
        clock: StageClock,
    ) -> RoundStats:
        draft_tokens, parents, log_probs = self._tree() if observer.wants_trees else ((), (), ())
        return RoundStats(
            mode=plan.mode,
            node_budget=plan.node_budget,
            num_nodes=readout.num_nodes,
            prefix_len=prefix_len,
            accept_tokens=readout.accept_tokens,
            round_ms=round_ms,
            root_token=self._tokens[-1],
            accept_indices=readout.accept_indices,
            draft_tokens=draft_tokens,
            parents=parents,
            log_probs=log_probs,
            stages_ms=None if self._runner.has_captured else clock.read_ms(),
        )

    def _tree(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
        tree = self._runner.last_round.built.tree
        columns = slice(0, int(tree.num_nodes) + 1)
        return (
            tuple(tree.tokens[0, columns].tolist()),
            tuple(tree.parents[0, columns].tolist()),
            tuple(tree.log_probs[0, columns].tolist()),
        )

    def _take(self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> Chunk:
        """Keep committed tokens, and their log-probabilities, up to the one that ends the request."""
        taken = 0
        for token in tokens:
            taken += 1
            self._tokens.append(token)
            self._finish = self._finish_reason(token)
            if self._finish is not None:
                break
        if self._finish is None and self._cancelled.is_set():
            self._finish = FinishReason.CANCEL
        self._logprobs += logprobs[:taken]
        self._stats.new_tokens = len(self._tokens)
        text = self._text.take() if self._finish is None else self._text.finish()
        return Chunk(text, tokens[:taken], self._finish, logprobs[:taken])

    def _finish_reason(self, token: int) -> FinishReason | None:
        if token in self._stop_tokens:
            return FinishReason.STOP
        self._text.push(token)
        if self._text.stopped:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self._tokens) >= self._max_tokens else None
