"""The embedded engine as an arm of a run: in this process, one request at a time."""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ddtree import Engine, Request, RoundStats, SamplingParams, TokenStream
from ddtree.bench.measure import Answer, Chat, Observed
from ddtree.bench.run_format import Arm
from ddtree.config import Mode, check, parse_budget
from ddtree.errors import ConfigError

Clock = Callable[[], float]


class EmbeddedEngine:
    """One mode and node budget of an engine that other arms may share.

    Args:
        engine: loaded; it stays so when the arm is closed.
        arm: with a mode.
        clock: seconds, for tests.
    """

    def __init__(self, engine: Engine, arm: Arm, clock: Clock = time.perf_counter) -> None:
        self._engine, self._arm, self._clock = engine, arm, clock
        self._peak_bytes: int | None = None

    def info(self) -> Mapping[str, Any]:
        """Where and as what the engine runs."""
        engine, is_cuda = self._engine, self._is_cuda
        return {
            "engine": self._arm.engine,
            "device": str(engine.device),
            "dtype": str(engine.pair.kv_cache.data.dtype).removeprefix("torch."),
            "threads": None if is_cuda else torch.get_num_threads(),
            "block_size": engine.pair.block_size,
            "max_context_tokens": engine.max_context_tokens,
            "runner": type(engine.runner).__name__,
            "peak_memory": "allocated on the device, of the cell's requests"
            if is_cuda
            else "resident in the process since its start, all arms together",
        }

    def run(
        self,
        prompts: Sequence[Chat],
        *,
        max_tokens: int,
        temperature: float,
        seeds: Sequence[int],
        concurrency: int,
    ) -> tuple[float, list[Answer]]:
        """Answer prompts one after the other; the wall seconds are the sum of their times.

        Raises:
            ConfigError: a concurrency other than 1, a prompt that is no single user turn or does not fit.
        """
        check(concurrency == 1, "concurrency", concurrency, "1: it runs one request at a time")
        answers = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            request = self._request(prompt, max_tokens, temperature, seed)
            self._forget_peak()
            answers.append(self._answer(request))
            self._keep_peak()
        return sum(answer.total_s for answer in answers), answers

    def observe(
        self, prompts: Sequence[Chat], *, max_tokens: int, temperature: float, seeds: Sequence[int]
    ) -> Observed | None:
        """Answer prompts with an observer of every round."""
        rounds = RoundTally()
        for prompt, seed in zip(prompts, seeds, strict=True):
            request = self._request(prompt, max_tokens, temperature, seed, rounds)
            self._engine.generate(request)
        return rounds.observed()

    def peak_memory_bytes(self) -> int | None:
        """Largest memory allocated on the device since `flush`; on a CPU the process's own peak."""
        return self._peak_bytes if self._is_cuda else process_peak_bytes()

    def flush(self) -> None:
        """Forget the peak of memory; no request leaves anything in a cache for another."""
        self._peak_bytes = None

    def close(self) -> None:
        """Nothing: the engine is the run's."""

    @property
    def _is_cuda(self) -> bool:
        return self._engine.device.type == "cuda"

    def _request(
        self, prompt: Chat, max_tokens: int, temperature: float, seed: int, observer: RoundTally | None = None
    ) -> Request:
        if len(prompt) != 1 or prompt[0].get("role") != "user":
            raise ConfigError(
                f"a prompt of {len(prompt)} messages is not allowed: one of the user; the embedded engine "
                "answers first turns"
            )
        assert self._arm.mode is not None
        return Request(
            self._engine.encode(prompt[0]["content"]),
            SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed),
            self._arm.mode,
            parse_budget(self._arm.node_budget) if self._arm.mode is Mode.TREE else "auto",
            observer,
        )

    def _answer(self, request: Request) -> Answer:
        begin_s = self._clock()
        stream = self._engine.stream(request)
        chunk_times = self._timed_chunks(stream)
        end_s = self._clock()
        made = stream.result()
        return Answer(
            tokens=made.tokens,
            text=made.text,
            prompt_tokens=made.stats.prompt_tokens,
            new_tokens=made.stats.new_tokens,
            finish_reason=made.finish_reason.value,
            begin_s=begin_s,
            first_s=chunk_times[0][0],
            end_s=end_s,
            decode_s=made.stats.decode_s,
            chunk_times=chunk_times,
            rounds=made.stats.verify_ct,
            accept_histogram=dict(made.stats.accept_histogram),
            prompt=request.prompt_tokens,
        )

    def _timed_chunks(self, stream: TokenStream) -> tuple[tuple[float, int], ...]:
        return tuple((self._clock(), len(chunk.tokens)) for chunk in stream)

    def _forget_peak(self) -> None:
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(self._engine.device)

    def _keep_peak(self) -> None:
        if self._is_cuda:
            now_bytes = torch.cuda.max_memory_allocated(self._engine.device)
            self._peak_bytes = max(self._peak_bytes or 0, now_bytes)


class RoundTally:
    """Observes rounds: ranks of correct drafts among their siblings, times of the steps."""

    wants_trees = wants_stages = True

    def __init__(self) -> None:
        self.ranks: Counter[int] = Counter()
        self._stages_ms: defaultdict[str, float] = defaultdict(float)
        self._timed_ct = 0

    def on_round(self, stats: RoundStats) -> None:
        self.ranks.update(path_ranks(stats.parents, stats.accept_indices))
        if stats.stages_ms is not None:
            self._timed_ct += 1
            for stage, stage_ms in stats.stages_ms.items():
                self._stages_ms[stage] += stage_ms

    def observed(self) -> Observed:
        """What was seen, stage times as means over the rounds that were timed."""
        means_ms = {stage: total_ms / self._timed_ct for stage, total_ms in self._stages_ms.items()}
        return Observed(dict(self.ranks), means_ms or None)


def path_ranks(parents: Sequence[int], path: Sequence[int]) -> list[int]:
    """The rank of each node of a path among its siblings, from 0, the root left out.

    Siblings stand in the tree by falling score, so that a node's rank is the number of its siblings
    before it.
    """
    return [list(parents[:node]).count(parents[node]) for node in path if node > 0]


def process_peak_bytes() -> int:
    """Largest resident memory of this process since its start."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
