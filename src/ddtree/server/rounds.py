"""What every round of a request did: for the metrics, and as the stream tells it."""

from __future__ import annotations

from typing import Any

from ddtree.server.metrics import ServerMetrics
from ddtree.server.token_texts import TokenTexts
from ddtree.stats import RoundStats


class RoundWatch:
    """Observes one request's rounds.

    Attributes:
        wants_trees: whether the rounds are described, which takes reading their trees.
        rounds_s: seconds of all rounds so far.
    """

    wants_stages = False

    def __init__(self, metrics: ServerMetrics, texts: TokenTexts, *, wants_trees: bool) -> None:
        self._metrics, self._texts, self.wants_trees = metrics, texts, wants_trees
        self._round_ct = 0
        self._last: dict[str, Any] | None = None
        self.rounds_s = 0.0

    def on_round(self, stats: RoundStats) -> None:
        self._metrics.on_round(stats)
        self.rounds_s += stats.round_ms / 1e3
        self._round_ct += 1
        if self.wants_trees:
            self._last = describe_round(stats, self._round_ct, self._texts)

    def take(self) -> dict[str, Any] | None:
        """The description of the round since the last call, where there was one and they are wanted."""
        last, self._last = self._last, None
        return last


def describe_round(stats: RoundStats, number: int, texts: TokenTexts) -> dict[str, Any]:
    """A round as a JSON object: the tree's nodes, the root first, and the path that was accepted."""
    nodes = zip(stats.draft_tokens, stats.parents, stats.log_probs, strict=True)
    return {
        "round": number,
        "mode": str(stats.mode),
        "node_budget": stats.node_budget,
        "round_ms": round(stats.round_ms, 3),
        "root": texts[stats.root_token].text,
        "nodes": [
            {"text": texts[token].text, "parent": parent, "log_prob": round(log_prob, 4)}
            for token, parent, log_prob in nodes
        ],
        "accept_indices": list(stats.accept_indices),
        "accept_text": texts.text_of(stats.accept_tokens),
    }
