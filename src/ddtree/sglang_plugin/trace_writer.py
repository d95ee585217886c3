"""The plugin's trace of its rounds, for debugging (docs/traces.md); nothing of it waits in a round.

A round's figures are copied to the host beside those that SGLang copies itself. When its scheduler has
waited for its own, ours have come; then the thread of the trace's writer makes the lines, and looks which
requests have ended. That thread asks nothing of the device: a graph may be captured meanwhile.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddtree.config import Mode, PluginConfig
from ddtree.provenance import provenance
from ddtree.sglang_plugin.accept_path import AcceptPath
from ddtree.sglang_plugin.batch_sampling import NO_TOP_K
from ddtree.sglang_plugin.trace_rows import FullRows
from ddtree.trace_format import (
    Detail,
    TraceEnd,
    TraceHeader,
    TraceInUseError,
    TraceRequest,
    TraceRound,
    TraceWriter,
    asdict_shallow,
    checkpoint_sha256,
)

logger = logging.getLogger(__name__)

# A request is kept alive so long after its last round, as the scheduler forgets it when it ends.
KEEP_S = 5.0
MAX_UNREAD = 10_000  # rounds of a batch
MAX_FILES = 64


class RoundBegin(NamedTuple):
    """When a round began: on the device, or on the host where that computes."""

    event: torch.cuda.Event | None
    host_s: float


class InFlight(NamedTuple):
    """A batch's round on its way to the host."""

    reqs: list[Any]
    rows: Tensor  # [bs, 3 + 2 * block] int64: root, position, length, the path's columns and tokens
    full: FullRows | None
    begin: RoundBegin
    end: torch.cuda.Event | None
    host_ms: float

    @property
    def is_ready(self) -> bool:
        return self.end is None or self.end.query()

    @property
    def round_ms(self) -> float:
        if self.end is None or self.begin.event is None:
            return self.host_ms
        return float(self.begin.event.elapsed_time(self.end))


class Arrived(NamedTuple):
    """A batch's round on the host; without `rows` a prefill, which only names its requests."""

    reqs: list[Any]
    rows: Tensor | None
    full: FullRows | None
    round_ms: float


@dataclass(slots=True)
class Watched:
    """A request whose end is not written yet.

    Attributes:
        kept: the request itself, until `KEEP_S` after its last round.
        tokens: what its rounds have committed, with the first one's root before it.
        newest: its last round, which is written when the next one or the end has come: under overlap a
            request may run once more after its end.
    """

    id: str
    ref: weakref.ref[Any]
    kept: Any
    seen_s: float
    prompt_len: int
    tokens: list[int] = field(default_factory=list)
    round_ct: int = 0
    commit_ct: int = 0
    newest: TraceRound | None = None
    has_finished: bool = False


class RoundTracer:
    """Traces the rounds of one scheduler process; `begin`, `see`, `add` and `arrive` are for its thread.

    Args:
        path: the trace file; where another process writes it, the first of path-1, path-2, ... that is free.
        header: the first line.
        mode, node_budget: of all rounds.
        seed_of: the seed of a request's noise.
        detail: whether `add` is to be given `full`.

    Raises:
        ConfigError: the file cannot be written, or is there and is no trace.
    """

    def __init__(
        self,
        path: Path,
        header: TraceHeader,
        mode: Mode,
        node_budget: int,
        seed_of: Callable[[Any], int],
        detail: Detail = Detail.SUMMARY,
    ) -> None:
        self.detail = detail
        self._mode, self._node_budget, self._seed_of = mode, node_budget, seed_of
        self._in_flight: deque[InFlight] = deque()
        self._unread: deque[Arrived] = deque()  # the one thing both threads touch
        self._watched: dict[str, Watched] = {}
        self._request_ct = 0
        self._writer = open_writer(path, self._poll)
        self._writer.write(header)

    # -- the scheduler's thread ------------------------------------------------------------------

    def begin(self, device: torch.device) -> RoundBegin:
        """Mark a round's begin."""
        return RoundBegin(_event(device), time.perf_counter())

    def see(self, reqs: Sequence[Any]) -> None:
        """Take note of a prefill's requests, SGLang's `Req`."""
        self._take(Arrived(list(reqs), None, None, 0.0))

    def add(
        self,
        reqs: Sequence[Any],
        roots: Tensor,  # [bs] int64
        positions: Tensor,  # [bs] int64, absolute, of the roots
        path: AcceptPath,
        begin: RoundBegin,
        full: FullRows | None = None,
    ) -> None:
        """Take a round that was queued on the current stream; no device wait."""
        if self._writer.has_failed:
            return
        columns = torch.stack([roots, positions, path.lens.to(torch.int64)], 1)
        rows = torch.cat([columns, path.indices, path.tokens], 1).to("cpu", non_blocking=True)
        on_host = None if full is None else full.to_host()
        end = _event(roots.device)
        host_ms = (time.perf_counter() - begin.host_s) * 1e3
        self._in_flight.append(InFlight(list(reqs), rows, on_host, begin, end, host_ms))

    def arrive(self) -> None:
        """Take over the rounds whose figures have come; to be called when the scheduler has a round's."""
        while self._in_flight and self._in_flight[0].is_ready:
            done = self._in_flight.popleft()
            self._take(Arrived(done.reqs, done.rows, done.full, round(done.round_ms, 4)))

    def _take(self, new: Arrived) -> None:
        if self._writer.has_failed:  # its thread reads no more: let the requests go
            self._unread.clear()
            self._watched = {}
            return
        self._unread.append(new)
        if len(self._unread) > MAX_UNREAD:
            self._writer.fail("rounds come faster than they can be written")

    def close(self) -> None:
        """Write what has come and close the file."""
        self._writer.close()

    # -- the writer's thread ---------------------------------------------------------------------

    def _poll(self, is_last: bool) -> None:
        # A request is ended a pass after it was found to have finished: by then the scheduler has set the
        # final length of its output, and its last rounds have come.
        finished = [watched for watched in self._watched.values() if watched.has_finished]
        now_s = time.monotonic()
        while self._unread:
            self._read(self._unread.popleft(), now_s)
        for watched in finished:
            self._end(watched)
        for watched in list(self._watched.values()):
            self._look(watched, now_s)
            if is_last and watched.has_finished:
                self._end(watched)

    def _read(self, new: Arrived, now_s: float) -> None:
        if new.rows is None:
            for req in new.reqs:
                self._watch(req, now_s)
            return
        block_size = (new.rows.shape[1] - 3) // 2
        for number, (req, row) in enumerate(zip(new.reqs, new.rows.tolist(), strict=True)):
            watched = self._watched.get(req.rid)
            # A request that has ended may run once more, and one may commit nothing.
            if watched is None or watched.ref() is not req or row[2] == 0:
                continue
            watched.seen_s, watched.kept = now_s, req
            path, tokens = row[3 : 3 + row[2]], row[3 + block_size :]
            full = {} if new.full is None else new.full.of(number, len(path))
            self._add_round(watched, row[0], row[1], path, tokens, new.round_ms, full)

    def _watch(self, req: Any, now_s: float) -> None:
        """Write the request's line, unless its prefill is one of several."""
        watched = self._watched.get(req.rid)
        if watched is not None and watched.ref() is req:
            watched.seen_s, watched.kept = now_s, req
            return
        if watched is not None:  # a client may use an id again
            self._end(watched)
        id, self._request_ct = f"r{self._request_ct}", self._request_ct + 1
        prompt_tokens = tuple(req.origin_input_ids)
        self._watched[req.rid] = Watched(id, weakref.ref(req), req, now_s, len(prompt_tokens))
        self._writer.write(
            TraceRequest(
                id=id,
                prompt_tokens=prompt_tokens,
                sampling=sampling_fields(req.sampling_params, self._seed_of(req)),
                mode=self._mode,
                node_budget=self._node_budget,
                server_id=req.rid,
            )
        )

    def _add_round(
        self,
        watched: Watched,
        root: int,
        position: int,
        path: list[int],
        tokens: list[int],
        round_ms: float,
        full: dict[str, Any],
    ) -> None:
        if watched.newest is not None:
            self._writer.write(watched.newest)
        accept_tokens = tuple(tokens[: len(path)])
        watched.round_ct += 1
        watched.commit_ct += len(path)
        watched.tokens[position - watched.prompt_len :] = (root, *accept_tokens)
        watched.newest = TraceRound(
            id=watched.id,
            round=watched.round_ct,
            position=position,
            root=root,
            mode=self._mode,
            node_budget=self._node_budget,
            accept_tokens=accept_tokens,
            accept_indices=tuple(path),
            round_ms=round_ms,
            **full,
        )

    def _look(self, watched: Watched, now_s: float) -> None:
        """See whether a request has ended."""
        req = watched.ref()
        if req is None:
            self._end(watched)
        elif req.finished_reason is not None:
            watched.has_finished, watched.kept = True, req
        elif now_s - watched.seen_s > KEEP_S:
            watched.kept = None

    def _end(self, watched: Watched) -> None:
        """Write a request's last round, unless it is one too many, and its end."""
        req, newest = watched.ref(), watched.newest
        self._watched = {rid: other for rid, other in self._watched.items() if other is not watched}
        # One that is gone without a reason was aborted while it waited.
        tokens, reason = tuple(watched.tokens), "abort"
        if req is not None and req.finished_reason is not None:
            tokens, reason = tuple(req.output_ids_through_stop), req.finished_reason.to_json()["type"]
        emitted = 0 if newest is None else len(tokens) - (newest.position - watched.prompt_len + 1)
        if newest is not None and emitted > 0:
            self._writer.write(replace(newest, target=newest.target[:emitted]))
        elif newest is not None:
            watched.round_ct -= 1
            watched.commit_ct -= len(newest.accept_tokens)
        stats = {
            "prompt_tokens": watched.prompt_len,
            "new_tokens": len(tokens),
            "rounds": watched.round_ct,
            "accept_length": round(watched.commit_ct / watched.round_ct, 4) if watched.round_ct else 0.0,
        }
        self._writer.write(TraceEnd(watched.id, tokens, reason, stats))


def open_writer(path: Path, poll: Callable[[bool], None]) -> TraceWriter:
    """A writer of the first of path, path-1, path-2, ... that no other process writes, as of data-parallel
    replicas."""
    for number in range(MAX_FILES - 1):
        try:
            return TraceWriter(path.with_name(f"{path.name}-{number}") if number else path, poll)
        except TraceInUseError:
            continue
    return TraceWriter(path.with_name(f"{path.name}-{MAX_FILES - 1}"), poll)


def make_round_tracer(
    config: PluginConfig, worker: Any, *, tp_rank: int, seed_of: Callable[[Any], int]
) -> RoundTracer | None:
    """The tracer of this scheduler process, on rank 0 where a trace is wanted.

    Raises:
        ConfigError: as `RoundTracer`.
    """
    if tp_rank != 0:
        return None
    detail = Detail(config.trace_detail)
    if not config.trace_file:
        if detail is not Detail.SUMMARY:
            logger.warning("trace_detail %s has no effect without trace_file", detail)
        return None
    origin, block_size = provenance(), worker.block_size
    header = TraceHeader(
        engine="sglang",
        target=model_fields(worker.model_runner),
        drafter=model_fields(worker.draft_model_runner),
        versions={name: origin[name] for name in ("ddtree", "python", "packages", "machine")},
        device=str(worker.device),
        dtype=str(worker.model_runner.dtype).removeprefix("torch."),
        settings=asdict_shallow(config) | {"block_size": block_size},
        time_utc=origin["time_utc"],
    )
    node_budget = block_size - 1 if config.mode == Mode.CHAIN else config.node_budget
    return RoundTracer(Path(config.trace_file), header, config.mode, node_budget, seed_of, detail)


def model_fields(model_runner: Any) -> dict[str, Any]:
    """A model of SGLang by name, with the checksum of its folder where it has one here."""
    name = str(model_runner.model_config.model_path)
    checksum = checkpoint_sha256(Path(name))
    return {"name": name} | ({} if checksum is None else {"folder_sha256": checksum})


def sampling_fields(params: Any, seed: int) -> dict[str, Any]:
    """SGLang's sampling parameters by the names of our `SamplingParams`, and those that only SGLang has."""
    is_greedy = params.top_k == 1
    return {
        "max_tokens": params.max_new_tokens,
        "temperature": 0.0 if is_greedy else params.temperature,
        "top_k": params.top_k if 1 < params.top_k < NO_TOP_K else 0,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": params.logit_bias or {},
        "seed": seed,
        "stop": list(params.stop_strs or ()),
        "stop_regex": list(params.stop_regex_strs or ()),
        "stop_token_ids": list(params.stop_token_ids or ()),
        "ignore_eos": params.ignore_eos,
        "min_new_tokens": params.min_new_tokens,
        "regex": params.regex,
        "json_schema": params.json_schema,
        "ebnf": params.ebnf,
        "structural_tag": params.structural_tag,
    }


def _event(device: torch.device) -> torch.cuda.Event | None:
    """An event recorded now on the current stream; None where the host computes."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
