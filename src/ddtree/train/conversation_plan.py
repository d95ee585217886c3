"""What a conversation is before it is generated: everything that follows from (seed, id)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ddtree.errors import ConfigError, short_repr
from ddtree.train.corpus import hash_ids
from ddtree.train.prompts import normalised_prompt_hash
from ddtree.train.recipe import DataSettings
from ddtree.train.template import TemplatePieces, encode_turn
from ddtree.tree.noise import keyed_uniform

logger = logging.getLogger(__name__)

CHUNK_IDS = 4096
# Columns of the uniforms that are drawn for an id.
TEMPERATURE, SOURCE, BEGINS, WHICH, NOISE_SEED = range(5)
Turn = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One conversation to generate.

    Attributes:
        id: its number.
        seed: of its sampling noise.
        temperature: of its answer.
        given: tokens of the user's turn that are not sampled: none, an opening, or the whole turn.
        is_whole: whether `given` is the whole turn.
    """

    id: int
    seed: int
    temperature: float
    given: Turn
    is_whole: bool

    def num_given_tokens(self, pieces: TemplatePieces) -> int:
        """Tokens of the finished conversation that are not sampled."""
        # The token that ends a turn is the bridge's first, and sampled where the target writes the turn.
        bridge = len(pieces.bridge) - (not self.is_whole)
        return len(pieces.prefix) + len(self.given) + bridge


@dataclass(frozen=True, slots=True)
class UserPrompts:
    """The user's own prompts that can be used, and how many cannot: excluded ones, and too long ones."""

    turns: tuple[Turn, ...]
    num_excluded: int
    num_unusable: int


def usable_prompts(
    texts: Sequence[str], tokenizer: Any, pieces: TemplatePieces, excluded: frozenset[str], max_tokens: int
) -> UserPrompts:
    """The prompts as turns of at most `max_tokens` tokens, without those whose hash is excluded."""
    allowed = [text for text in texts if normalised_prompt_hash(text) not in excluded]
    turns = [encode_turn(tokenizer, pieces, text) for text in allowed]
    usable = tuple(turn for turn in turns if turn is not None and len(turn) <= max_tokens)
    num_excluded, num_unusable = len(texts) - len(allowed), len(turns) - len(usable)
    if num_excluded or num_unusable:
        logger.warning(
            "of %d prompts, %d are excluded and %d do not fit %d tokens; they are left out",
            len(texts), num_excluded, num_unusable, max_tokens,
        )  # fmt: skip
    return UserPrompts(usable, num_excluded, num_unusable)


def encode_openings(settings: DataSettings, tokenizer: Any, pieces: TemplatePieces) -> tuple[Turn, ...]:
    """The openings as tokens; `ConfigError` for one that leaves the turn no room."""
    turns = []
    for text in settings.openings:
        turn = encode_turn(tokenizer, pieces, text)
        if turn is None or len(turn) >= settings.max_prompt_tokens:
            raise ConfigError(
                f"openings: {short_repr(text)} is not allowed: an opening has at least one token and fewer "
                f"than max_prompt_tokens={settings.max_prompt_tokens}; shorten it"
            )
        turns.append(turn)
    return tuple(turns)


def plans(settings: DataSettings, openings: Sequence[Turn], prompts: Sequence[Turn]) -> Iterator[Plan]:
    """The conversations from id 0 on.

    Each prompt is used once; when all are, the target writes those turns too, unless it was to write none.
    """
    seed = torch.tensor(settings.seed)
    edges = np.cumsum(settings.temperature_weights)[:-1]
    order = iter(np.argsort(hash_ids(np.arange(len(prompts)), settings.seed), kind="stable").tolist())
    for first in itertools.count(0, CHUNK_IDS):
        ids = torch.arange(first, first + CHUNK_IDS)
        drawn = keyed_uniform(seed, ids, torch.arange(NOISE_SEED + 1)).numpy()  # [CHUNK_IDS, 5] float64
        kinds = np.searchsorted(edges, drawn[:, TEMPERATURE], side="right").tolist()
        for row, (kind, uniforms) in enumerate(zip(kinds, drawn.tolist(), strict=True)):
            given: Turn = ()
            which = next(order, None) if uniforms[SOURCE] < settings.prompt_share else None
            if which is not None:
                given = prompts[which]
            elif settings.prompt_share == 1:
                return
            elif uniforms[BEGINS] < settings.opening_share:
                given = openings[int(uniforms[WHICH] * len(openings))]
            yield Plan(
                id=first + row,
                seed=int(uniforms[NOISE_SEED] * 2**52),
                temperature=settings.temperatures[kind],
                given=given,
                is_whole=which is not None,
            )
