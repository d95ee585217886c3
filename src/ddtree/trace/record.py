"""Records the rounds of an engine's requests in a trace (docs/traces.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ddtree.errors import ConfigError, DDTreeError
from ddtree.models import resolve_drafter
from ddtree.provenance import provenance
from ddtree.trace_format import (
    Detail,
    TraceEnd,
    TraceHeader,
    TraceRequest,
    TraceRound,
    TraceWriter,
    asdict_shallow,
    checkpoint_sha256,
    sampling_fields,
)

if TYPE_CHECKING:
    from ddtree import (
        Chunk,
        Engine,
        EngineConfig,
        Generation,
        GenerationStats,
        Request,
        RoundObserver,
        RoundStats,
        TokenLogprobs,
        TokenStream,
    )

MARGIN_TOP = 2  # log-probabilities a margin is made of


class TraceRecorder:
    """Runs requests on an engine and writes what they do to one file.

    Use it as a context manager; leaving it ends the file. Recording changes no token, and what comes
    back is what the request asked for.

    Args:
        path: the file; a trace that is there is replaced.
        detail: `summary` writes what each round committed. `full` adds its whole tree and the times of its
            steps, and has the target asked for log-probabilities, which takes time each round.

    Raises:
        ConfigError: the file cannot be made, or is there and is no trace.
    """

    def __init__(self, path: Path, detail: Detail = Detail.SUMMARY) -> None:
        self.detail = Detail(detail)
        self._writer = TraceWriter(path)
        self._engine: Engine | None = None
        self._request_ct = 0

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write what is left and close the file."""
        self._writer.close()

    def generate(self, engine: Engine, request: Request) -> Generation:
        """`Engine.generate`, recorded."""
        stream = self.stream(engine, request)
        for _ in stream:
            pass
        return stream.result()

    def stream(self, engine: Engine, request: Request) -> RecordedStream:
        """`Engine.stream`, recorded from its first round to its end.

        Raises:
            ConfigError: the request asks for something this engine cannot honour, or another engine's
                requests are in this trace.
        """
        if self._engine not in (None, engine):
            raise ConfigError("a trace is of one engine; give the other one a file of its own")
        rounds = RoundRecorder(f"r{self._request_ct}", self._writer, self.detail, request.observer)
        asked = replace(request, observer=rounds)
        if self.detail is Detail.FULL:
            asked = replace(asked, top_logprobs=max(request.top_logprobs or 0, MARGIN_TOP))
        stream = engine.stream(asked)
        if self._engine is None:
            self._engine = engine
            self._writer.write(header_of(engine))
        self._request_ct += 1
        self._writer.write(
            TraceRequest(
                id=rounds.id,
                prompt_tokens=tuple(request.prompt_tokens),
                sampling=sampling_fields(request.sampling),
                mode=request.mode,
                node_budget=request.node_budget,
            )
        )
        return RecordedStream(stream, request, rounds, self._writer)


class RoundRecorder:
    """Observes one request: keeps a round until its chunk has come, since the log-probabilities are there.

    Attributes:
        is_full: whether trees and target figures are recorded.
        wants_trees, wants_stages: whether that needs them, or the request's own observer does.
    """

    def __init__(self, id: str, writer: TraceWriter, detail: Detail, observer: RoundObserver | None) -> None:
        self.id, self._writer, self._observer = id, writer, observer
        self.is_full = detail is Detail.FULL
        self.wants_trees = self.is_full or (observer is not None and observer.wants_trees)
        self.wants_stages = self.is_full or (observer is not None and observer.wants_stages)
        self._round_ct = 0
        self._round: RoundStats | None = None

    def on_round(self, stats: RoundStats) -> None:
        self._round_ct += 1
        self._round = stats
        if self._observer is not None:
            self._observer.on_round(stats)

    def on_chunk(self, target: tuple[tuple[float, float], ...]) -> None:
        """Write the round of a chunk whose tokens the target held for so likely."""
        stats, self._round = self._round, None
        if stats is None:
            return
        self._writer.write(
            TraceRound(
                id=self.id,
                round=self._round_ct,
                position=stats.prefix_len,
                root=stats.root_token,
                mode=stats.mode,
                node_budget=stats.node_budget,
                accept_tokens=stats.accept_tokens,
                accept_indices=stats.accept_indices,
                round_ms=round(stats.round_ms, 4),
                tokens=stats.draft_tokens if self.is_full else (),
                parents=stats.parents if self.is_full else (),
                log_probs=rounded(stats.log_probs) if self.is_full else (),
                target=target,
                stages_ms=stages_of(stats) if self.is_full else None,
            )
        )


class RecordedStream:
    """A `TokenStream` that writes its rounds; chunks and result are those of the plain stream."""

    def __init__(
        self, stream: TokenStream, request: Request, rounds: RoundRecorder, writer: TraceWriter
    ) -> None:
        self._stream, self._request, self._rounds, self._writer = stream, request, rounds, writer

    def cancel(self) -> None:
        """As `TokenStream.cancel`."""
        self._stream.cancel()

    def result(self) -> Generation:
        """As `TokenStream.result`."""
        generation = self._stream.result()
        return replace(generation, logprobs=self._asked(generation.logprobs))

    def __iter__(self) -> Iterator[Chunk]:
        first_target: tuple[tuple[float, float], ...] = ()
        has_begun = has_failed = False
        try:
            for chunk in self._stream:
                target = target_of(chunk.logprobs) if self._rounds.is_full else ()
                if has_begun:
                    self._rounds.on_chunk(target)
                else:
                    has_begun, first_target = True, target
                yield replace(chunk, logprobs=self._asked(chunk.logprobs)) if chunk.logprobs else chunk
        except Exception:
            has_failed = True  # a request without an end
            raise
        finally:
            if has_begun and not has_failed:
                self._write_end(first_target)
            self._writer.flush()

    def _write_end(self, first_target: tuple[tuple[float, float], ...]) -> None:
        generation = self._stream.result()
        self._writer.write(
            TraceEnd(
                id=self._rounds.id,
                tokens=generation.tokens,
                finish_reason=generation.finish_reason,
                stats=stats_fields(generation.stats),
                first_target=first_target,
            )
        )

    def _asked(self, logprobs: tuple[TokenLogprobs, ...]) -> tuple[TokenLogprobs, ...]:
        """As many log-probabilities as the request asked for."""
        asked = self._request.top_logprobs
        if asked is None:
            return ()
        return tuple(replace(entry, top=entry.top[:asked]) for entry in logprobs)


def target_of(logprobs: Sequence[TokenLogprobs]) -> tuple[tuple[float, float], ...]:
    """Log-probability and margin of each token."""
    return tuple(
        (round(entry.log_prob, 6), round(entry.top[0][1] - entry.top[1][1], 6)) for entry in logprobs
    )


def rounded(log_probs: Sequence[float]) -> tuple[float, ...]:
    """Log-probabilities without the digits that float32 does not have."""
    return tuple(round(log_prob, 6) for log_prob in log_probs)


def stages_of(stats: RoundStats) -> dict[str, float] | None:
    """The milliseconds of a round's steps, where they were timed."""
    times = stats.stages_ms
    return None if times is None else {stage: round(taken_ms, 4) for stage, taken_ms in times.items()}


def stats_fields(stats: GenerationStats) -> dict[str, Any]:
    """The totals of a request as a trace holds them."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "rounds": stats.verify_ct,
        "accept_length": round(stats.accept_length, 4),
        "tokens_per_s": round(stats.tokens_per_s, 3),
        "prefill_ms": round(stats.prefill_s * 1e3, 3),
        "decode_ms": round(stats.decode_s * 1e3, 3),
    }


def header_of(engine: Engine) -> TraceHeader:
    """The header of a trace of this engine's requests."""
    config, origin = engine.config, provenance()
    drafter = None
    if engine.drafter is not None:
        folder = drafter_folder(config)
        name = folder.name if folder is not None and config.drafter == "auto" else config.drafter
        drafter = model_fields(name, folder)
    return TraceHeader(
        engine="embedded",
        target=model_fields(config.model, engine.folder),
        drafter=drafter,
        versions={name: origin[name] for name in ("ddtree", "python", "packages", "machine")},
        device=str(engine.device),
        dtype=str(engine.pair.kv_cache.data.dtype).removeprefix("torch."),
        settings=asdict_shallow(config),
        time_utc=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def drafter_folder(config: EngineConfig) -> Path | None:
    """Where the drafter of these settings lies; None where that is not known."""
    try:
        return resolve_drafter(config.drafter, config.model)
    except DDTreeError:
        return None


def model_fields(name: str, folder: Path | None) -> dict[str, Any]:
    """A model by name, with the checksum of its folder."""
    checksum = None if folder is None else checkpoint_sha256(folder)
    return {"name": name} | ({} if checksum is None else {"folder_sha256": checksum})
