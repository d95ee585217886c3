"""Conversations written side by side, each in a slot, one token a step, all state on the device.

A slot's text is the template's prefix, a user's turn, the template's bridge and an answer. Tokens that
are given (prefix, opening, bridge) go through the same step as those that are sampled. The keys and
values of the prefix are the same for all conversations and written once a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree.config import GREEDY_BELOW
from ddtree.train.batch_decoder import BatchDecoder
from ddtree.train.conversation_plan import Plan
from ddtree.train.template import TemplatePieces
from ddtree.tree.noise import draw

RUNNING, DONE, DROPPED, IDLE = range(4)
TEXT, END_OF_TURN, NO_TEXT = range(3)  # what a token is in a user's turn
MIN_TURN_TOKENS = 3
WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """Lengths and tokens that end a turn or an answer.

    Attributes:
        max_prompt_tokens: a written turn that has as many without its end is dropped.
        max_answer_tokens: an answer is cut there.
        prompt_temperature: temperature of the user's turns.
        end_tokens: end an answer.
        special_tokens: no text; a written turn with one is dropped, the token that ends it excepted.
    """

    max_prompt_tokens: int
    max_answer_tokens: int
    prompt_temperature: float
    end_tokens: frozenset[int]
    special_tokens: frozenset[int]

    def max_tokens(self, pieces: TemplatePieces) -> int:
        """Tokens of the longest conversation."""
        around = len(pieces.prefix) + len(pieces.bridge)
        return around + self.max_prompt_tokens + self.max_answer_tokens


class Look(NamedTuple):
    """What the host sees of the slots, each [slots] int64."""

    statuses: NDArray[np.int64]
    lengths: NDArray[np.int64]
    answer_starts: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SlotState:
    """The slots' state, changed in place; all [slots] int64 unless noted.

    Attributes:
        tokens, positions: what the next step reads.
        statuses: RUNNING, DONE, DROPPED or IDLE.
        lengths: tokens of the text so far.
        given_ends: the text before this index is given.
        answer_starts: index of the answer's first token, 0 while the user's turn is written.
        seeds: of the noise.
        temperatures: of the answers, float32.
        text: [slots, max_tokens + bridge tokens]; the last columns take what must not be kept.
    """

    tokens: Tensor
    positions: Tensor
    statuses: Tensor
    lengths: Tensor
    given_ends: Tensor
    answer_starts: Tensor
    seeds: Tensor
    temperatures: Tensor
    text: Tensor


class DecodeStream:
    """Steps all slots; the host looks, takes finished texts and starts new ones between steps.

    Args:
        model: a decoder-only causal LM in inference mode.
        pieces: its chat template.
        limits: what ends turns and answers.
        slots: conversations side by side.
        use_graph: capture the step in a CUDA graph.
    """

    def __init__(
        self, model: Any, pieces: TemplatePieces, limits: Limits, slots: int, *, use_graph: bool
    ) -> None:
        self.slots, self.pieces, self.limits = slots, pieces, limits
        self._spare = limits.max_tokens(pieces)  # first column of the text that is not kept
        self.decoder = BatchDecoder(model, slots, self._spare)
        device = self.decoder.device
        self._bridge = torch.tensor(pieces.bridge, device=device)  # [bridge]
        self._bridge_columns = torch.arange(len(pieces.bridge), device=device)
        self._kinds, self._is_end = self._token_tables(device)
        self.state = self._idle_state(device)
        self._write_prefix()
        self._graph = self._capture() if use_graph else None

    def run(self, num_steps: int) -> None:
        """Advance every running slot by that many tokens, without waiting for the device."""
        for _ in range(num_steps):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()

    def look(self) -> Look:
        """What the slots hold now; waits for the device."""
        state = self.state
        seen = torch.stack([state.statuses, state.lengths, state.answer_starts])
        return Look(*seen.cpu().numpy())  # the one wanted sync of many steps

    def texts(self, slots: Sequence[int], max_length: int) -> NDArray[np.int64]:
        """The first `max_length` columns of these slots' texts, [len(slots), max_length]."""
        rows = torch.tensor(slots, dtype=torch.int64, device=self.state.text.device)
        taken: NDArray[np.int64] = self.state.text[:, :max_length].index_select(0, rows).cpu().numpy()
        return taken

    def start(self, slots: Sequence[int], started: Sequence[Plan]) -> None:
        """Begin these conversations in these slots, one each."""
        state, prefix = self.state, self.pieces.prefix
        given = [self._given_text(plan) for plan in started]
        width = max(map(len, given))
        text = torch.tensor([row + [0] * (width - len(row)) for row in given])  # [n, width]
        ends = torch.tensor([len(row) for row in given])
        whole = torch.tensor([plan.is_whole for plan in started])
        columns: list[tuple[Tensor, Tensor]] = [
            (state.given_ends, ends),
            (state.answer_starts, ends * whole),
            (state.seeds, torch.tensor([plan.seed for plan in started])),
            (state.temperatures, torch.tensor([plan.temperature for plan in started])),
            (state.text[:, :width], text),
        ]
        rows = torch.tensor(slots, dtype=torch.int64, device=state.text.device)
        for column, values in columns:
            column.index_copy_(0, rows, values.to(column.device, column.dtype, non_blocking=True))
        state.tokens.index_fill_(0, rows, prefix[-1])
        state.positions.index_fill_(0, rows, len(prefix) - 1)
        state.lengths.index_fill_(0, rows, len(prefix))
        state.statuses.index_fill_(0, rows, RUNNING)

    def _given_text(self, plan: Plan) -> list[int]:
        bridge = self.pieces.bridge if plan.is_whole else ()
        return [*self.pieces.prefix, *plan.given, *bridge]

    def _token_tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """What each token is in a user's turn, [vocab] int64, and whether it ends an answer, [vocab] bool."""
        vocab = self.decoder.vocab_size
        kinds = torch.zeros(vocab, dtype=torch.int64)
        is_end = torch.zeros(vocab, dtype=torch.bool)
        known = self.limits.special_tokens | self.limits.end_tokens
        kinds[[token for token in known if token < vocab]] = NO_TEXT
        kinds[self.pieces.end_of_turn] = END_OF_TURN
        is_end[[token for token in self.limits.end_tokens if token < vocab]] = True
        return kinds.to(device), is_end.to(device)

    def _idle_state(self, device: torch.device) -> SlotState:
        """Slots that are empty: they read the prefix's first token at position 0 again and again."""

        def full(value: int) -> Tensor:
            return torch.full((self.slots,), value, dtype=torch.int64, device=device)

        width = self._spare + len(self.pieces.bridge)
        return SlotState(
            tokens=full(self.pieces.prefix[0]),
            positions=full(0),
            statuses=full(IDLE),
            lengths=full(0),
            given_ends=full(0),
            answer_starts=full(0),
            seeds=full(0),
            temperatures=torch.ones(self.slots, device=device),
            text=torch.zeros(self.slots, width, dtype=torch.int64, device=device),
        )

    def _write_prefix(self) -> None:
        """Keys and values of the prefix in every slot, its last token excepted: each start reads that one."""
        for position, token in enumerate(self.pieces.prefix[:-1]):
            tokens = torch.full_like(self.state.tokens, token)
            self.decoder.step(tokens, torch.full_like(tokens, position))

    def _capture(self) -> torch.cuda.CUDAGraph:
        """One step as a graph. All slots are empty, so the steps before change nothing that is kept."""
        device = self.decoder.device
        with torch.cuda.device(device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_STEPS):
                    self._step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
        return graph

    @torch.no_grad()
    def _step(self) -> None:
        """Read one token in every slot, choose the next, and note where turns and answers end."""
        state = self.state
        logits = self.decoder.step(state.tokens, state.positions)  # [slots, vocab]
        nexts = state.positions + 1  # [slots], the position of the token chosen now
        is_given = nexts < state.given_ends
        given = state.text.gather(1, nexts[:, None])[:, 0]
        tokens = torch.where(is_given, given, self._choose(logits, nexts))
        is_running = state.statuses == RUNNING
        kept_at = nexts.masked_fill(~is_running, self._spare)
        state.text.scatter_(1, kept_at[:, None], tokens[:, None])
        self._end_turns(tokens, nexts, is_running & ~is_given)
        state.lengths.copy_(torch.where(is_running, nexts + 1, state.lengths))
        has_stopped = state.statuses != RUNNING
        state.tokens.copy_(tokens.masked_fill(has_stopped, self.pieces.prefix[0]))
        state.positions.copy_(nexts.masked_fill(has_stopped, 0))

    def _choose(self, logits: Tensor, nexts: Tensor) -> Tensor:
        """Tokens [slots] drawn from logits [slots, vocab] with the slots' temperatures and keyed noise."""
        state = self.state
        temperatures = state.temperatures.masked_fill(
            state.answer_starts == 0, self.limits.prompt_temperature
        )
        is_greedy = temperatures < GREEDY_BELOW
        scaled = logits / temperatures.masked_fill(is_greedy, 1.0)[:, None]  # float32
        return torch.where(is_greedy, logits.argmax(-1), draw(scaled, state.seeds, nexts))

    def _end_turns(self, tokens: Tensor, nexts: Tensor, is_sampled: Tensor) -> None:
        """Set statuses, and write the bridge where a user's turn has ended; all [slots]."""
        state, limits = self.state, self.limits
        in_turn = is_sampled & (state.answer_starts == 0)
        in_answer = is_sampled & (state.answer_starts > 0)
        kinds = self._kinds[tokens]
        turn_tokens = nexts - len(self.pieces.prefix)  # before this token
        has_ended = in_turn & (kinds == END_OF_TURN)
        is_short = turn_tokens < MIN_TURN_TOKENS
        is_long = turn_tokens + 1 >= limits.max_prompt_tokens
        is_dropped = (has_ended & is_short) | (in_turn & ~has_ended & ((kinds == NO_TEXT) | is_long))
        answer_tokens = nexts + 1 - state.answer_starts
        is_done = in_answer & (self._is_end[tokens] | (answer_tokens >= limits.max_answer_tokens))
        state.statuses.copy_(state.statuses.masked_fill(is_dropped, DROPPED).masked_fill(is_done, DONE))
        self._write_bridges(nexts, has_ended & ~is_short)

    def _write_bridges(self, nexts: Tensor, is_bridged: Tensor) -> None:
        """Put the bridge at `nexts` [slots] where `is_bridged` [slots]; the answer follows it."""
        state = self.state
        begins = nexts.masked_fill(~is_bridged, self._spare)
        columns = begins[:, None] + self._bridge_columns  # [slots, bridge]
        state.text.scatter_(1, columns, self._bridge.expand_as(columns))
        answer_starts = nexts + len(self.pieces.bridge)
        state.answer_starts.copy_(torch.where(is_bridged, answer_starts, state.answer_starts))
        state.given_ends.copy_(torch.where(is_bridged, answer_starts, state.given_ends))
