"""The target's own greedy answers to prompts, many at once: the texts on which acceptance is measured."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ddtree.config import check
from ddtree.train.acceptance import Ints, Text

STEPS_A_CHECK = 16  # between two looks at the device for whether all texts have ended


class StepDecoder(Protocol):
    """Reads one token a slot and says what comes after it, as `BatchDecoder` does."""

    @property
    def slots(self) -> int:
        """Sequences side by side."""

    @property
    def max_tokens(self) -> int:
        """Longest sequence of a slot."""

    @property
    def device(self) -> torch.device:
        """Where it takes its tokens."""

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [slots, vocab] after tokens [slots] int64 at positions [slots] int64 of their slots."""


def greedy_texts(
    decoder: StepDecoder, prompts: Sequence[Sequence[int]], max_tokens: int, end_tokens: Collection[int]
) -> list[Text]:
    """Prompts with the likeliest token after each token, until an end token or `max_tokens` new ones.

    Prompts go through the decoder token by token, those of like length together. The end token belongs to
    the text, as in the engine. Of equal logits `argmax` decides, and near ties may part from another
    engine's text: acceptance is measured on this one.

    Args:
        decoder: with room for the longest prompt and `max_tokens` in each slot.
        prompts: tokens of each, none empty; texts come back in this order.

    Raises:
        ConfigError: an empty prompt, or one for which the decoder has no room.
    """
    room = decoder.max_tokens - max_tokens
    for index, prompt in enumerate(prompts):
        check(
            1 <= len(prompt) <= room, f"tokens of prompt {index}", len(prompt),
            f"from 1 to {room}, the decoder's {decoder.max_tokens} less {max_tokens} new ones",
            "lower max_tokens or leave the prompt out",
        )  # fmt: skip
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    texts: dict[int, Text] = {}
    for first in range(0, len(order), decoder.slots):
        group = order[first : first + decoder.slots]
        rows = _decode([prompts[index] for index in group], decoder, max_tokens, end_tokens)
        for index, row in zip(group, rows, strict=True):
            texts[index] = _cut(row, len(prompts[index]), max_tokens, end_tokens)
    return [texts[index] for index in range(len(prompts))]


@torch.no_grad()
def _decode(
    prompts: Sequence[Sequence[int]], decoder: StepDecoder, max_tokens: int, end_tokens: Collection[int]
) -> Ints:
    """Prompts and what comes after them, [prompts, longest prompt + max_tokens]; texts are not cut yet."""
    slots, device = decoder.slots, decoder.device
    lengths = [len(prompt) for prompt in prompts]
    grid = np.zeros((slots, max(lengths) + max_tokens), np.int64)
    for row, prompt in zip(grid, prompts, strict=False):
        row[: len(prompt)] = prompt
    tokens = torch.from_numpy(grid).to(device)  # [slots, longest prompt + max_tokens]
    # Slots without a prompt decode along with the longest one.
    starts = torch.tensor(lengths + [max(lengths)] * (slots - len(lengths)), device=device)  # [slots]
    ends = torch.tensor(sorted(end_tokens), dtype=torch.int64, device=device)
    is_done = torch.arange(slots, device=device) >= len(lengths)
    for place in range(1, tokens.shape[1]):
        logits = decoder.step(tokens[:, place - 1], torch.full_like(starts, place - 1))
        is_answer = starts <= place
        tokens[:, place] = torch.where(is_answer, logits.argmax(-1), tokens[:, place])
        is_done |= is_answer & torch.isin(tokens[:, place], ends)
        is_done |= starts + max_tokens <= place + 1
        if place % STEPS_A_CHECK == 0 and bool(is_done.all()):  # the one wanted sync
            break
    rows: Ints = tokens[: len(lengths)].cpu().numpy()
    return rows


def _cut(row: Ints, start: int, max_tokens: int, end_tokens: Collection[int]) -> Text:
    answer = row[start : start + max_tokens]
    found = np.flatnonzero(np.isin(answer, list(end_tokens)))
    length = int(found[0]) + 1 if len(found) else len(answer)
    return Text(row[: start + length], start)
