"""From target logits to the target's own choice at a position, the same in every mode.

Order: logit bias, repetition penalty (prompt and output), presence and frequency penalty (output),
temperature, top-k, top-p, min-p, one draw with keyed noise. Penalties at a tree node count the
committed tokens and the tokens on the node's own path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddtree.config import SamplingParams
from ddtree.errors import ConfigError
from ddtree.tree.draft_tree import DraftTree
from ddtree.tree.layout import TreeLayout
from ddtree.tree.noise import draw
from ddtree.tree.triton_choice import prefers_triton


def apply_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Keep the k largest logits of each row [n, vocab]; ties with the k-th stay."""
    if top_k == 0 or top_k >= logits.shape[-1]:
        return logits
    threshold = logits.topk(top_k, -1).values[:, -1:]  # [n, 1]
    return logits.masked_fill(logits < threshold, float("-inf"))


def apply_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens of each row that reaches probability top_p."""
    if top_p >= 1:
        return logits
    ordered, order = torch.softmax(logits, -1).sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered  # probability of the tokens ahead, [n, vocab]
    is_past = before >= top_p
    is_past[:, 0] = False  # where float32 rounds top_p to 0
    drop = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, is_past)
    return logits.masked_fill(drop, float("-inf"))


def apply_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Drop tokens of each row less likely than min_p times the most likely one."""
    if min_p == 0:
        return logits
    probs = torch.softmax(logits, -1)
    return logits.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), float("-inf"))


class TokenChooser:
    """The target's choice at a position of one request; remembers committed tokens for penalties.

    Args:
        params: the request's sampling parameters.
        prompt_tokens: prompt token ids.
        vocab_size: width of the logits.
        device: where the logits are.
    """

    def __init__(
        self, params: SamplingParams, prompt_tokens: Sequence[int], vocab_size: int, device: torch.device
    ) -> None:
        self.params = params
        out_of_range = [t for t in params.logit_bias if t >= vocab_size]
        if out_of_range:
            raise ConfigError(
                f"logit_bias has token ids {out_of_range} that are not allowed: 0 to {vocab_size - 1}"
            )
        self.bias = torch.zeros(vocab_size, device=device)
        for token, bias in params.logit_bias.items():
            self.bias[token] = bias
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_prompt[torch.tensor(prompt_tokens, device=device)] = True
        self.output_counts = torch.zeros(vocab_size, device=device)
        self.seeds = torch.tensor([params.seed], device=device)

    def count(self, tokens: Tensor) -> None:
        """Count committed output tokens [m]; -1 is none."""
        if self.params.counts_tokens:
            self.output_counts.index_add_(0, tokens.clamp(min=0), (tokens >= 0).float())

    def choose(self, logits: Tensor, positions: Tensor, path_counts: Tensor | None = None) -> Tensor:
        """The target's own next token after each of n nodes.

        Args:
            logits: [n, vocab] raw target logits.
            positions: [n] absolute positions of the tokens being chosen (node position + 1).
            path_counts: [n, vocab] occurrences on each node's path, root excluded, or None for no path.

        Returns: tokens [n] int64.
        """
        if self.params.is_greedy:
            return self.most_likely(logits, path_counts)
        log_probs = self.node_log_probs(logits, path_counts)
        return draw(log_probs, self.seeds.expand(logits.shape[0]), positions)

    def most_likely(self, logits: Tensor, path_counts: Tensor | None = None) -> Tensor:
        """The greedy choice, the lowest token among equals; arguments as of `choose`."""
        logits = self._penalise(logits, path_counts)
        if prefers_triton(logits):
            from ddtree.layers.triton_argmax import argmax_rows

            return argmax_rows(logits)
        # In float32, exact for both, since argmax over half floats is several times slower on a CPU.
        return logits.float().argmax(-1)

    def node_log_probs(self, logits: Tensor, path_counts: Tensor | None = None) -> Tensor:
        """Log-probabilities [n, vocab] that nodes sample from; arguments as of `choose`."""
        params = self.params
        logits = self._penalise(logits, path_counts).float() / params.temperature
        logits = apply_top_k(logits, params.top_k)
        logits = apply_top_p(logits, params.top_p)
        logits = apply_min_p(logits, params.min_p)
        return torch.log_softmax(logits, -1)

    def _penalise(self, logits: Tensor, path_counts: Tensor | None) -> Tensor:
        params = self.params
        if not params.changes_logits:
            return logits
        logits = logits.float() + self.bias
        if not params.counts_tokens:
            return logits
        counts = self.output_counts if path_counts is None else self.output_counts + path_counts
        occurs = counts > 0
        penalised = torch.where(
            logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
        )
        logits = torch.where(occurs | self.in_prompt, penalised, logits)
        return logits - params.presence_penalty * occurs - params.frequency_penalty * counts


def count_paths(tokens: Tensor, ancestor_mask: Tensor, vocab_size: int) -> Tensor:
    """Occurrences of each token on each node's own path, root excluded since it is committed.

    Args:
        tokens: [W] node tokens.
        ancestor_mask: [W, W] bool.

    Returns: [W, vocab] float32.
    """
    width = tokens.shape[0]
    counts = torch.zeros(width, vocab_size, device=tokens.device)
    on_path = ancestor_mask[:, 1:].to(counts.dtype)  # [W, W - 1]
    return counts.scatter_add_(1, tokens[1:].expand(width, -1), on_path)


def choose_along_path(chooser: TokenChooser, logits: Tensor, tree: DraftTree, layout: TreeLayout) -> Tensor:
    """The target's choice after the nodes on the accept path of one tree, -1 after others, [W] int64.

    On a CPU looking at a choice costs nothing, while processing the logits of every node does.
    """
    children = {
        (parent, token): column
        for column, (parent, token) in enumerate(
            zip(tree.parents[0].tolist(), tree.tokens[0].tolist(), strict=True)
        )
        if parent >= 0
    }
    target_tokens = torch.full_like(tree.tokens[0], -1)
    column: int | None = 0
    path: list[int] = []
    while column is not None:
        path_counts = None
        if chooser.params.counts_tokens:
            path_counts = torch.bincount(tree.tokens[0, path], minlength=logits.shape[-1])[None]
        position = layout.positions[0, column : column + 1] + 1
        token = chooser.choose(logits[column : column + 1], position, path_counts)
        target_tokens[column] = token
        column = children.get((column, int(token)))
        if column is not None:
            path.append(column)
    return target_tokens
