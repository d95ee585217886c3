"""The target writes its own training data: user turns and answers, many conversations side by side.

Everything about conversation `id` follows from (seed, id): its temperature, opening or prompt, and its
noise (`ddtree.tree.noise`). Conversations are committed in the order of their ids, so the corpus depends
neither on the number of slots nor on interruptions, save where a device rounds logits differently for
another batch size; and a corpus of fewer tokens is the beginning of a larger one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.errors import ModelError
from ddtree.train.batch_decoder import graph_unsupported_reason
from ddtree.train.conversation_plan import Plan, UserPrompts, encode_openings, plans, usable_prompts
from ddtree.train.corpus import Conversation, Corpus, CorpusWriter, shard_paths, token_dtype
from ddtree.train.decode_stream import DONE, DROPPED, RUNNING, DecodeStream, Limits, Look
from ddtree.train.prompts import load_excluded, load_prompts, normalised_prompt_hash
from ddtree.train.recipe import DataSettings
from ddtree.train.template import TemplatePieces, end_tokens, special_tokens, template_pieces

logger = logging.getLogger(__name__)

CHECK_EVERY_STEPS = 16
# So many conversations in a row without one to keep mean that the settings or the target are wrong.
MAX_LOST = 2000


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """How far a generation is: the sampled tokens in the corpus, of all runs and of this one."""

    new_tokens: int
    run_tokens: int
    tokens_per_s: float


# Called every few steps; generation ends early where it returns False.
OnProgress = Callable[[ProgressReport], bool]


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """What the corpus holds after one run of `generate_corpus`, and what that run did.

    Attributes:
        conversations, new_tokens: in the corpus, of all runs; new are the sampled tokens of user turns and
            answers.
        run_tokens: those of this run.
        duplicates: dropped since their user turn was there already.
        excluded: dropped since their user turn, or the user's prompt, must not occur.
        unfinished_prompts: dropped since their user turn was too long, too short or no text.
        seconds: from this run's first step to its last, start-up excluded.
    """

    conversations: int
    new_tokens: int
    run_tokens: int
    duplicates: int
    excluded: int
    unfinished_prompts: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished conversation: its plan, and its tokens [n] unless it was dropped."""

    plan: Plan
    tokens: NDArray[np.int64] | None
    answer_start: int


def generate_corpus(
    model: Any,
    tokenizer: Any,
    settings: DataSettings,
    folder: Path,
    fingerprint: str,
    on_progress: OnProgress,
) -> GenerationReport:
    """Generate conversations into a folder until `settings.new_tokens` sampled tokens are there.

    A folder that holds conversations of the same fingerprint is gone on with. Interrupted, it keeps
    what is finished.

    Args:
        model: a transformers causal LM in inference mode, on its device.
        tokenizer: its tokenizer, with a chat template.
        settings: what to generate.
        folder: of the corpus.
        fingerprint: what tells these settings from others.
        on_progress: called every few steps; generation ends early where it returns False.

    Raises:
        UnsupportedModelError: the model or its template cannot be used.
        ConfigError: the folder has other data, or a file of prompts is wrong.
        CheckpointError: a shard is broken.
        ModelError: the target writes no turns that can be kept.
    """
    pieces = template_pieces(tokenizer)
    excluded = load_excluded([Path(name) for name in settings.exclude])
    texts = load_prompts(Path(settings.prompts)) if settings.prompts else []
    prompts = usable_prompts(texts, tokenizer, pieces, excluded, settings.max_prompt_tokens)
    committer = Committer(
        CorpusWriter(folder, model.config.vocab_size, fingerprint, settings.shard_tokens),
        tokenizer, pieces, excluded, prompts,
    )  # fmt: skip
    source = PlanSource(settings, encode_openings(settings, tokenizer, pieces), prompts.turns)
    committer.resume(source)
    if committer.new_tokens >= settings.new_tokens:
        return committer.report(0.0)
    limits = Limits(
        settings.max_prompt_tokens, settings.max_answer_tokens, settings.prompt_temperature,
        end_tokens(model, tokenizer, pieces), special_tokens(tokenizer),
    )  # fmt: skip
    stream = DecodeStream(model, pieces, limits, settings.slots, use_graph=prefers_graph(model))
    started = time.perf_counter()
    try:
        Generation(stream, source, committer, settings.new_tokens).run(on_progress)
    finally:
        committer.close()
    report = committer.report(time.perf_counter() - started)
    logger.info("generated %s", report)
    return report


def prefers_graph(model: Any) -> bool:
    """Whether the step should be captured in a CUDA graph."""
    if model.device.type != "cuda":
        return False
    reason = graph_unsupported_reason(model.config)
    if reason is not None:
        logger.info("steps are launched one by one, without a CUDA graph: %s", reason)
    return reason is None


class PlanSource:
    """Hands out plans in the order of their ids, and knows when there are no more."""

    def __init__(
        self, settings: DataSettings, openings: Sequence[tuple[int, ...]], prompts: Sequence[tuple[int, ...]]
    ) -> None:
        self._plans = plans(settings, openings, prompts)
        self.is_empty = False

    def take(self, count: int) -> list[Plan]:
        """The next plans, fewer only at the end."""
        taken = [plan for _, plan in zip(range(count), self._plans, strict=False)]
        self.is_empty |= len(taken) < count
        return taken


class Committer:
    """Takes outcomes in any order and writes conversations in the order of their ids."""

    def __init__(
        self, writer: CorpusWriter, tokenizer: Any, pieces: TemplatePieces, excluded: frozenset[str],
        prompts: UserPrompts,
    ) -> None:  # fmt: skip
        self.new_tokens = 0  # of all runs
        self.held_tokens = 0  # sampled, waiting for conversations before theirs
        self._writer, self._tokenizer, self._pieces, self._excluded = writer, tokenizer, pieces, excluded
        self._held: dict[int, Outcome] = {}
        self._next_id = 0
        self._dtype = token_dtype(writer.vocab_size)
        self._earlier_tokens = self._num_lost = self._num_written = 0
        self._num_excluded, self._num_unfinished = prompts.num_excluded, prompts.num_unusable

    @property
    def run_tokens(self) -> int:
        """Sampled tokens that this run has written."""
        return self.new_tokens - self._earlier_tokens

    def resume(self, source: PlanSource) -> None:
        """Count what the folder holds, and take its plans and those before them from the source."""
        if not shard_paths(self._writer.folder):
            return
        corpus = Corpus.open(self._writer.folder)
        lengths = dict(zip(corpus.ids.tolist(), corpus.lengths.tolist(), strict=True))
        self._num_written = len(corpus)
        self._next_id = max(lengths) + 1
        for plan in source.take(self._next_id):
            if plan.id in lengths:
                self.new_tokens += lengths[plan.id] - plan.num_given_tokens(self._pieces)
        self._earlier_tokens = self.new_tokens

    def add(self, outcomes: Sequence[Outcome], goal_tokens: int) -> None:
        """Take finished conversations and write those whose turn it is, until the goal is reached."""
        for outcome in outcomes:
            self._held[outcome.plan.id] = outcome
            self.held_tokens += self._num_new(outcome)
        while self.new_tokens < goal_tokens and (ready := self._held.pop(self._next_id, None)) is not None:
            self.held_tokens -= self._num_new(ready)
            self._next_id += 1
            self._commit(ready)

    def close(self) -> None:
        self._writer.close()

    def report(self, seconds: float) -> GenerationReport:
        """What this run did, in that many seconds, and what is there now."""
        return GenerationReport(
            conversations=self._num_written,
            new_tokens=self.new_tokens,
            run_tokens=self.run_tokens,
            duplicates=self._writer.num_duplicates,
            excluded=self._num_excluded,
            unfinished_prompts=self._num_unfinished,
            seconds=seconds,
        )

    def _num_new(self, outcome: Outcome) -> int:
        if outcome.tokens is None:
            return 0
        return len(outcome.tokens) - outcome.plan.num_given_tokens(self._pieces)

    def _commit(self, outcome: Outcome) -> None:
        plan, tokens, start = outcome.plan, outcome.tokens, outcome.answer_start
        self._num_lost += 1
        if tokens is None:
            self._num_unfinished += 1
        elif self._is_excluded(tokens[len(self._pieces.prefix) : start - len(self._pieces.bridge)]):
            self._num_excluded += 1
        elif self._writer.add(Conversation(tokens.astype(self._dtype), start, plan.temperature, plan.id)):
            self.new_tokens += self._num_new(outcome)
            self._num_written += 1
            self._num_lost = 0
        if self._num_lost >= MAX_LOST:
            raise ModelError(
                f"the last {MAX_LOST} conversations had no user turn to keep (so far {self.report(0.0)}); "
                "check that the target is an instruct model, or raise max_prompt_tokens or prompt_temperature"
            )

    def _is_excluded(self, turn: NDArray[np.int64]) -> bool:
        if not self._excluded:
            return False
        return normalised_prompt_hash(self._tokenizer.decode(turn.tolist())) in self._excluded


class Generation:
    """Keeps a stream's slots filled until the corpus has its tokens."""

    def __init__(
        self, stream: DecodeStream, source: PlanSource, committer: Committer, goal_tokens: int
    ) -> None:
        self._stream, self._source, self._committer, self._goal = stream, source, committer, goal_tokens
        self._active: dict[int, Plan] = {}  # by slot
        self._free = list(range(stream.slots))
        self._outcomes: list[Outcome] = []
        self._started = 0.0

    def run(self, on_progress: OnProgress) -> None:
        """Step, harvest and refill until the goal is reached, nothing is left, or it is told to end."""
        self._started = time.perf_counter()
        self._refill(0)
        while self._active:
            self._stream.run(CHECK_EVERY_STEPS)
            self._settle()  # the host's work, while the device runs those steps
            if not on_progress(self._progress()) or self._committer.new_tokens >= self._goal:
                return
            self._refill(self._harvest())
            if not self._active:  # the last ones may be too few once duplicates are out
                self._settle()
                self._refill(0)
        on_progress(self._progress())

    def _settle(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        self._committer.add(outcomes, self._goal)

    def _refill(self, in_flight_tokens: int) -> None:
        """Start conversations in the free slots while fewer tokens than the goal are on their way."""
        promised = self._committer.new_tokens + self._committer.held_tokens + in_flight_tokens
        if promised >= self._goal or not self._free:
            return
        started = self._source.take(len(self._free))
        slots, self._free = self._free[: len(started)], self._free[len(started) :]
        if started:
            self._stream.start(slots, started)
            self._active.update(zip(slots, started, strict=True))

    def _harvest(self) -> int:
        """Take what has finished, and return how many sampled tokens are in flight or not yet settled."""
        look = self._stream.look()
        in_flight = self._in_flight_tokens(look)
        active = np.fromiter(self._active, np.int64, len(self._active))
        finished = active[look.statuses[active] != RUNNING]
        done = finished[look.statuses[finished] == DONE].tolist()
        texts = self._stream.texts(done, int(look.lengths[done].max())) if done else ()
        for slot, text in zip(done, texts, strict=True):
            tokens = text[: look.lengths[slot]]
            self._outcomes.append(Outcome(self._active.pop(slot), tokens, int(look.answer_starts[slot])))
        for slot in finished[look.statuses[finished] == DROPPED].tolist():
            self._outcomes.append(Outcome(self._active.pop(slot), None, 0))
        self._free.extend(finished.tolist())
        return in_flight

    def _in_flight_tokens(self, look: Look) -> int:
        """Sampled tokens in the slots, those of finished conversations included."""
        pieces, lengths, statuses = self._stream.pieces, look.lengths.tolist(), look.statuses.tolist()
        kept = [(slot, plan) for slot, plan in self._active.items() if statuses[slot] != DROPPED]
        return sum(max(0, lengths[slot] - plan.num_given_tokens(pieces)) for slot, plan in kept)

    def _progress(self) -> ProgressReport:
        seconds = time.perf_counter() - self._started
        done = self._committer
        return ProgressReport(done.new_tokens, done.run_tokens, done.run_tokens / seconds)
