"""Draws one round's draft tree in the terminal, the accept path marked."""

from __future__ import annotations

import math
from collections.abc import Callable

from rich.text import Text
from rich.tree import Tree

from ddtree.cli.console import plain_text
from ddtree.config import Mode
from ddtree.stats import RoundStats

MAX_NODES = 18
ACCEPT_STYLE = "bold green"
LEGEND = (
    "* accepted draft, + the target's own next token\n"
    "%: the drafter's probability of the text from the root to the node"
)

Decode = Callable[[int], str]


class LongestPath:
    """Observes a request and keeps the tree round with most correct drafts, the first of equals."""

    wants_trees = True
    wants_stages = False

    def __init__(self) -> None:
        self.best: RoundStats | None = None
        self.round_index = 0
        self._rounds_ct = 0

    def on_round(self, stats: RoundStats) -> None:
        self._rounds_ct += 1
        if stats.mode != Mode.TREE or len(stats.draft_tokens) < 2:
            return
        if self.best is None or stats.num_correct_drafts > self.best.num_correct_drafts:
            self.best, self.round_index = stats, self._rounds_ct


def draw_tree(stats: RoundStats, decode: Decode) -> Tree:
    """The round's tree: its likeliest nodes and all of the accept path; the rest is counted.

    `decode` gives a token's text.
    """
    shown = shown_nodes(stats)
    path = set(stats.accept_indices)
    drawing = Tree(_label("*", stats.draft_tokens[0], decode, " root"), guide_style="dim")
    branches = {0: drawing}
    for node in shown[1:]:
        share = f" {100 * math.exp(stats.log_probs[node]):.0f}%"
        label = _label("*" if node in path else " ", stats.draft_tokens[node], decode, share)
        branches[node] = branches[stats.parents[node]].add(label)
    branches[stats.accept_indices[-1]].add(_label("+", stats.accept_tokens[-1], decode, ""))
    num_hidden = len(stats.draft_tokens) - len(shown)
    if num_hidden:
        drawing.add(Text(f"... and {num_hidden} less likely nodes", style="dim"))
    return drawing


def shown_nodes(stats: RoundStats) -> list[int]:
    """Columns to draw, parents first: the accept path, then the likeliest others."""
    path = set(stats.accept_indices)
    others = [node for node in range(len(stats.draft_tokens)) if node not in path]
    return sorted(path | set(others[: max(0, MAX_NODES - len(path))]))


def _label(mark: str, token: int, decode: Decode, suffix: str) -> Text:
    label = Text(f"{mark} ", no_wrap=True, overflow="ellipsis")
    label.append_text(plain_text(repr(decode(token)))).append(suffix, style="dim")
    if mark != " ":
        label.stylize(ACCEPT_STYLE)
    return label
