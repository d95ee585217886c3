"""What detail `full` of the plugin's trace adds: trees and the target's figures (docs/traces.md)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddtree.sglang_plugin.accept_path import AcceptPath
from ddtree.tree.draft_tree import DraftTree

FIGURE_ROWS = 256  # rows of float32 logits in memory at once


class FullRows(NamedTuple):
    """What detail `full` adds to a batch's round."""

    tokens: Tensor  # [bs, W] int64, of the trees' nodes
    parents: Tensor  # [bs, W] int64
    log_probs: Tensor  # [bs, W] float32; -inf is padding
    figures: Tensor | None  # [bs, block, 2] float32: log-probability and margin of the path's tokens

    def to_host(self) -> FullRows:
        """The same on its way to the host; no device wait."""
        tokens, parents, log_probs = (part.to("cpu", non_blocking=True) for part in self[:3])
        figures = None if self.figures is None else self.figures.to("cpu", non_blocking=True)
        return FullRows(tokens, parents, log_probs, figures)

    def of(self, row: int, num_accept_tokens: int) -> dict[str, Any]:
        """A request's part, by the fields of a trace's round."""
        log_probs = self.log_probs[row]
        nodes = slice(0, int((log_probs > float("-inf")).sum()))  # padding is behind all nodes
        figures = [] if self.figures is None else self.figures[row, :num_accept_tokens].tolist()
        return {
            "tokens": tuple(self.tokens[row, nodes].tolist()),
            "parents": tuple(self.parents[row, nodes].tolist()),
            "log_probs": tuple(round(value, 6) for value in log_probs[nodes].tolist()),
            "target": tuple((round(log_prob, 6), round(margin, 6)) for log_prob, margin in figures),
        }


def full_rows(
    tree: DraftTree,
    path: AcceptPath,
    logits: Tensor | None,  # [bs * W, V], None where they are not the target's raw ones any more
) -> FullRows:
    """What detail `full` says of a batch's round, on its device; no device wait."""
    figures = None
    if logits is not None:
        rows = path.rows(tree.num_verify_tokens).clamp(min=0).flatten()  # [bs * block]
        parts = zip(rows.split(FIGURE_ROWS), path.tokens.flatten().split(FIGURE_ROWS), strict=True)
        figures = torch.cat([_figures(logits[some], tokens) for some, tokens in parts])
        figures = figures.view(*path.tokens.shape, 2)
    return FullRows(tree.tokens, tree.parents, tree.log_probs, figures)


def _figures(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability and margin [n, 2] float32 of tokens [n] by logits [n, V]."""
    scores = logits.float()
    log_probs = scores.gather(1, tokens.unsqueeze(1)).squeeze(1) - scores.logsumexp(1)
    best = scores.topk(2, dim=1).values  # [n, 2]
    return torch.stack([log_probs, best[:, 0] - best[:, 1]], 1)
