"""Conversations packed into rows of one length, with anchors drawn in their answers.

Everything about a batch follows from (seed, step), so that a resumed run sees the batches it would
have seen, and each of several processes takes its rows of the same batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddtree.errors import ConfigError
from ddtree.train.corpus import Conversation, Corpus
from ddtree.train.packed_batch import NO_LABEL, PackedBatch
from ddtree.train.recipe import TrainSettings

# Rows that stay open while conversations are placed; more fill rows better and take longer to search.
OPEN_ROWS = 16
MIN_ROOM_TOKENS = 16

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class World:
    """The processes that train together: this one is number `rank` of `size`, from 0."""

    rank: int = 0
    size: int = 1

    def rows(self, num_rows: int) -> slice:
        """This process's rows of a batch of `num_rows`: equal parts."""
        share = num_rows // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


def pack_rows(lengths: NDArray[Any], order: Indices, row_tokens: int) -> list[list[int]]:
    """Conversations of `order`, indices into `lengths`, placed into rows of at most `row_tokens` tokens.

    Each goes to the open row that it fills best; a row closes when it is full or too many are open.
    """
    closed: list[list[int]] = []
    rooms: list[int] = []
    rows: list[list[int]] = []
    for index in order.tolist():
        length = min(int(lengths[index]), row_tokens)
        fitting = [(room, place) for place, room in enumerate(rooms) if room >= length]
        if fitting:
            place = min(fitting)[1]
            rows[place].append(index)
            rooms[place] -= length
        else:
            place = len(rows)
            rows.append([index])
            rooms.append(row_tokens - length)
        if rooms[place] < MIN_ROOM_TOKENS or len(rows) > OPEN_ROWS:
            fullest = min(range(len(rows)), key=rooms.__getitem__)
            closed.append(rows.pop(fullest))
            rooms.pop(fullest)
    return closed + rows


def row_order(corpus: Corpus, indices: Indices, settings: TrainSettings, epoch: int) -> list[list[int]]:
    """The rows of one pass over the conversations, in the order of training."""
    generator = np.random.default_rng((settings.seed, 1, epoch))
    rows = pack_rows(corpus.lengths, generator.permutation(indices), settings.row_tokens)
    return [rows[i] for i in generator.permutation(len(rows))]


def batch_rows(corpus: Corpus, indices: Indices, settings: TrainSettings) -> Iterator[list[list[int]]]:
    """The rows of each step's batch, without end; an epoch's last rows that fill no batch are left out."""
    epoch = 0
    while True:
        rows = row_order(corpus, indices, settings, epoch)
        if len(rows) < settings.rows:
            raise ConfigError(
                f"train.rows={settings.rows} is not allowed: the {len(indices)} training conversations fill "
                f"only {len(rows)} rows of {settings.row_tokens} tokens; generate more, or lower train.rows"
            )
        for first in range(0, len(rows) - settings.rows + 1, settings.rows):
            yield rows[first : first + settings.rows]
        epoch += 1


def batches(
    corpus: Corpus,
    indices: Indices,
    settings: TrainSettings,
    draft_depth: int,
    first_step: int = 0,
    world: World | None = None,
) -> Iterator[tuple[int, PackedBatch]]:
    """(step, batch) from `first_step` on, without end; on the CPU.

    Args:
        corpus, indices: the conversations, and which of them are trained on.
        settings: rows, row_tokens, num_anchors and seed.
        draft_depth: labels of an anchor.
        world: the rows of this process, of all where None.

    Raises:
        ConfigError: too few conversations for one batch, or rows that do not divide by the processes.
    """
    world = world or World()
    if settings.rows % world.size:
        raise ConfigError(
            f"train.rows={settings.rows} is not allowed with {world.size} processes: "
            "it must be a multiple of their number"
        )
    all_rows = islice(enumerate(batch_rows(corpus, indices, settings)), first_step, None)
    for step, rows in all_rows:
        mine = range(settings.rows)[world.rows(settings.rows)]
        packed = [
            _pack_row([corpus[i] for i in rows[r]], settings, draft_depth, (settings.seed, 2, step, r))
            for r in mine
        ]
        yield step, PackedBatch(*(torch.from_numpy(np.stack(column)) for column in zip(*packed, strict=True)))


def conversation_ids(corpus: Corpus, indices: Indices, settings: TrainSettings, step: int) -> list[int]:
    """Ids of the conversations in the batch of a step, for messages."""
    rows = next(islice(batch_rows(corpus, indices, settings), step, None))
    return [corpus[i].id for row in rows for i in row]


def _pack_row(
    conversations: Sequence[Conversation], settings: TrainSettings, draft_depth: int, key: tuple[int, ...]
) -> tuple[Indices, Indices, Indices, Indices, Indices]:
    """Tokens, positions, document starts [row_tokens], anchors [num_anchors], labels of one row."""
    size = settings.row_tokens
    tokens, positions = np.zeros(size, np.int64), np.zeros(size, np.int64)
    starts = np.arange(size)
    ends, roots = np.full(size, 0), []
    first = 0
    for conversation in conversations:
        text = conversation.tokens[: size - first]
        last = first + len(text)
        tokens[first:last], positions[first:last] = text, np.arange(len(text))
        starts[first:last], ends[first:last] = first, last
        # The first root a decoder meets is the first answer token; the last one has a token after it.
        roots.append(np.arange(first + conversation.answer_start, last - 1))
        first = last
    drawn = np.random.default_rng(key).permutation(np.concatenate(roots))[: settings.num_anchors]
    # Where a row has fewer roots than anchors, the rest point at its start and have no labels.
    anchors = np.sort(np.pad(drawn, (0, settings.num_anchors - len(drawn))))
    targets = anchors[:, None] + 1 + np.arange(draft_depth)  # [num_anchors, draft_depth]
    is_known = targets < ends[anchors][:, None]
    is_known[: settings.num_anchors - len(drawn)] = False
    labels = np.where(is_known, tokens[np.minimum(targets, size - 1)], NO_LABEL)
    return tokens, positions, starts, anchors, labels
