"""Prompts of random tokens, none of them special."""

from __future__ import annotations

import random

from sglang_kit.sizes import FIRST_PLAIN_TOKEN, VOCAB_SIZE


def prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(FIRST_PLAIN_TOKEN, VOCAB_SIZE) for _ in range(length)]
