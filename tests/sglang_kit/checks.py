"""What a run's rounds must be, worked out from the drafter's candidates that were written down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddtree.tree.build_reference import build_draft_tree


def heap_accept_len(round_: dict[str, Any], text: Sequence[int], node_budget: int) -> int:
    """Tokens that a round commits by the paper's heap, walked along `text`, prompt and output together."""
    nodes = build_draft_tree(np.array(round_["log_probs"]), node_budget)
    tokens = round_["tokens"]
    children = {
        (node.parent, tokens[node.depth - 1][node.ranks[-1]]): column for column, node in enumerate(nodes, 1)
    }
    column, accept_len = 0, 1
    for token in text[round_["prefix_len"] + 1 :]:
        if (column, token) not in children:
            break
        column = children[column, token]
        accept_len += 1
    return accept_len


def check_rounds(
    rounds: list[dict[str, Any]], text: Sequence[int], node_budget: int, block_size: int
) -> None:
    """Every round commits what the heap says, and starts where the one before it ended."""
    assert rounds
    for round_, following in zip(rounds, [*rounds[1:], None], strict=True):
        at = round_["prefix_len"]
        assert round_["root_token"] == text[at]
        assert len(text) > at + block_size, "the reference is too short to check this round"
        assert round_["accept_len"] == heap_accept_len(round_, text, node_budget), f"round at {at}"
        if following is not None:
            assert following["prefix_len"] == at + round_["accept_len"]


def path_ranks(round_: dict[str, Any], text: Sequence[int]) -> list[int]:
    """The drafter's rank of each correct draft of a round: all 0 on the chain."""
    first = round_["prefix_len"] + 1
    return [round_["tokens"][j].index(text[first + j]) for j in range(round_["accept_len"] - 1)]
