"""Exact acceptance of a drafter on finished texts, without an engine.

A text is a prompt and the target's own greedy continuation. The drafter's logits at every place of the
answer where a round could begin come in batches; from them the correct drafts of the chain and of the
tree of each node budget; then the rounds are walked from the first answer token, which prefill makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ddtree.config import check
from ddtree.train.attention import draft_mask
from ddtree.train.drafter import TrainableDrafter
from ddtree.train.packed_batch import NO_LABEL, PackedBatch
from ddtree.train.target_features import FrozenTarget
from ddtree.tree import DraftMarginals, build_trees_with_layout, follow

Ints = NDArray[np.integer[Any]]
Column = Literal["chain"] | int  # what is drafted: the chain, or the tree of a node budget
PackedLogits = Callable[[PackedBatch], Tensor]

CHUNK_BYTES = 1 << 30  # of float32 logits that one call of the tree builder works on
ROW_STEP_TOKENS = 256  # lengths of rows are rounded up, so that few shapes are compiled


class Text(NamedTuple):
    """A prompt and its answer; `tokens` is [n], the answer's first token stands at `answer_start`."""

    tokens: Ints
    answer_start: int

    @property
    def num_roots(self) -> int:
        """Answer tokens with an answer token after them: where a round can begin."""
        return max(0, len(self.tokens) - 1 - self.answer_start)


class AcceptanceRow(NamedTuple):
    """What the rounds of some texts did, pooled.

    `correct_by_depth[d]` counts the rounds with more than d correct drafts, so `tokens` is `rounds` plus
    their sum.
    """

    rounds: int
    tokens: int
    correct_by_depth: tuple[int, ...]

    @property
    def accept_length(self) -> float:
        """Tokens a round (tau, correct drafts and bonus); NaN without rounds."""
        return self.tokens / self.rounds if self.rounds else float("nan")


@dataclass(frozen=True, slots=True)
class AcceptanceTable:
    """Accept length of each whole round, by what is drafted and by text."""

    draft_depth: int
    accept_lengths: Mapping[Column, tuple[Ints, ...]]  # each text's: [rounds] int64

    def pooled(self, column: Column) -> AcceptanceRow:
        """All texts' rounds together."""
        lengths = np.concatenate((*self.accept_lengths[column], np.zeros(0, np.int64)))  # [rounds]
        deeper = lengths[:, None] > np.arange(1, self.draft_depth + 1)  # [rounds, draft_depth]
        return AcceptanceRow(len(lengths), int(lengths.sum()), tuple(deeper.sum(0).tolist()))

    def interval(self, column: Column, repeats: int = 10_000, seed: int = 0) -> tuple[float, float]:
        """95 % bootstrap interval of the pooled accept length, over texts."""
        texts = self.accept_lengths[column]
        tokens, rounds = ([int(count(text)) for text in texts] for count in (np.sum, len))
        return bootstrap_interval(np.array(tokens), np.array(rounds), repeats, seed)


def bootstrap_interval(tokens: Ints, rounds: Ints, repeats: int, seed: int) -> tuple[float, float]:
    """95 % interval of sum(tokens) / sum(rounds) over texts drawn with replacement.

    Both are [texts]. Texts without a round count for nothing and are left out; NaN if none is left.
    """
    tokens, rounds = tokens[rounds > 0], rounds[rounds > 0]
    if not len(rounds):
        return float("nan"), float("nan")
    drawn = np.random.default_rng(seed).integers(len(rounds), size=(repeats, len(rounds)))
    low, high = np.quantile(tokens[drawn].sum(1) / rounds[drawn].sum(1), (0.025, 0.975))
    return float(low), float(high)


def accept_counts(logits: Tensor, labels: Tensor, budgets: Sequence[int]) -> dict[Column, Tensor]:
    """Correct drafts of each root by the chain and by the tree of each budget, each [n] int64.

    The best-first tree of a smaller budget is a prefix of a larger one's (`DraftTree`), so one tree is
    built and the path of correct drafts in it is cut. On CUDA trees of up to 256 nodes take Triton
    kernels (arXiv 2604.12989, Algorithm 1).

    Args:
        logits: [n, draft_depth, vocab], the drafter's.
        labels: [n, draft_depth] int64, the text after the root; -100 beyond its end, which no draft meets.
        budgets: node budgets of 1 or more; none for the chain alone.

    Raises:
        ConfigError: a budget below 1.
    """
    for budget in budgets:
        check(
            budget >= 1, "budgets", budget, "whole numbers of 1 or more", "leave it out for the chain alone"
        )
    chunk_roots = max(1, CHUNK_BYTES // (4 * logits.shape[1] * logits.shape[2]))
    chunks = [
        _chunk_counts(*chunk, budgets)
        for chunk in zip(logits.split(chunk_roots), labels.split(chunk_roots), strict=True)
    ]
    return {column: torch.cat([chunk[column] for chunk in chunks]) for column in chunks[0]}


def _chunk_counts(logits: Tensor, labels: Tensor, budgets: Sequence[int]) -> dict[Column, Tensor]:
    largest = max(budgets, default=1)
    marginals = DraftMarginals.from_logits(logits, largest)  # [n, draft_depth, K]
    best_tokens, best_log_probs = marginals.tokens[:, :, 0], marginals.log_probs[:, :, 0]
    is_correct = (best_tokens == labels) & (best_log_probs > float("-inf"))  # [n, draft_depth]
    counts: dict[Column, Tensor] = {"chain": is_correct.cumprod(1).sum(1)}
    if budgets:
        path = correct_path(marginals, labels, largest)
        counts |= {budget: ((path > 0) & (path <= budget)).sum(1) for budget in budgets}
    return counts


def correct_path(marginals: DraftMarginals, labels: Tensor, node_budget: int) -> Tensor:
    """Columns of the nodes that spell the text, the root first, then -1: [n, draft_depth + 1] int64.

    `marginals` is [n, draft_depth, K], `labels` [n, draft_depth].
    """
    roots, draft_depth = torch.zeros_like(labels[:, 0]), labels.shape[1]
    tree, layout, _ = build_trees_with_layout(marginals, roots, roots, node_budget)
    after = F.pad(labels, (0, 1), value=NO_LABEL)  # [n, draft_depth + 1], by depth
    expected = after.gather(1, tree.depths)  # [n, num_verify_tokens]
    return follow(tree, layout.ancestor_mask, expected, draft_depth).accept_indices


def walk_rounds(correct: Ints) -> Ints:
    """Accept length of each whole round of a text: their number is its rounds, their sum its tokens.

    `correct` [num_roots] holds the correct drafts of a round that began at each answer token but the
    last. A last round that would pass the text's end is left out: it might have been longer.
    """
    lengths, root = [], 0
    while root < len(correct):
        accept_length = int(correct[root]) + 1
        root += accept_length
        if root <= len(correct):
            lengths.append(accept_length)
    return np.array(lengths, np.int64)


def drafter_texts_logits(drafter: TrainableDrafter, target: FrozenTarget) -> PackedLogits:
    """A drafter in training as `measure_acceptance` wants it; logits in the dtype of the target's head.

    Products are made in that dtype too, as at inference. Dense masks, and no compiled layers: the shapes are
    others than in training, and compiling for them would take longer than they do.
    """
    target = target.with_kind("dense")
    config, head_weight = drafter.config, target.head_weight
    device, dtype = head_weight.device, head_weight.dtype
    mask_token = torch.tensor([config.mask_token_id], device=device)

    @torch.no_grad()
    def logits(batch: PackedBatch) -> Tensor:
        mask = draft_mask(batch, config.block_size, target.kind)
        embeds = target.embed(batch.root_tokens), target.embed(mask_token)[0]
        with (
            torch.compiler.set_stance("force_eager"),
            torch.autocast(device.type, dtype, enabled=dtype != torch.float32),
        ):
            drafted = drafter(batch, target.taps(batch), *embeds, mask)
        return F.linear(drafted.to(dtype), head_weight)

    return logits


class RootSpan(NamedTuple):
    """Neighbouring roots of one text that share a row, counted from the answer's first token."""

    text: int
    first_root: int
    num_roots: int

    @property
    def roots(self) -> slice:
        return slice(self.first_root, self.first_root + self.num_roots)


def measure_acceptance(
    drafter_logits: PackedLogits,
    texts: Sequence[Text],
    budgets: Sequence[int],
    draft_depth: int,
    device: torch.device,
    rows: int = 4,
    num_anchors: int = 128,
) -> AcceptanceTable:
    """Accept length of every round of every text, by the chain and by the tree of each budget.

    Args:
        drafter_logits: a batch to logits [rows, num_anchors, draft_depth, vocab] on `device`.
        texts: with the target's own greedy answers.
        budgets: node budgets; the chain is always measured.
        draft_depth: positions drafted a pass, block_size - 1.
        device: where the batches are made.
        rows, num_anchors: of each batch; they bound the memory for logits. A text with more roots takes
            several rows.

    Raises:
        ConfigError: no text has an answer of two tokens, or a budget is below 1.
    """
    num_roots = max((text.num_roots for text in texts), default=0)
    check(num_roots > 0, "texts", len(texts), "one answer of two tokens or more", "raise max_tokens")
    columns: list[Column] = ["chain", *budgets]
    correct = {column: [np.zeros(text.num_roots, np.int64) for text in texts] for column in columns}
    spans = list(root_spans(texts, num_anchors))
    for first in range(0, len(spans), rows):
        used = spans[first : first + rows]
        batch = pack_roots(texts, used, rows, num_anchors, draft_depth).to(device)
        logits = drafter_logits(batch).flatten(0, 1)  # [rows * num_anchors, draft_depth, vocab]
        for column, counts in accept_counts(logits, batch.labels.flatten(0, 1), budgets).items():
            by_row = counts.view(rows, num_anchors).cpu().numpy()  # the one wanted sync of a column
            for span, row in zip(used, by_row, strict=False):
                correct[column][span.text][span.roots] = row[: span.num_roots]
    lengths = {column: tuple(walk_rounds(text) for text in by_text) for column, by_text in correct.items()}
    return AcceptanceTable(draft_depth, lengths)


def root_spans(texts: Sequence[Text], num_anchors: int) -> Iterator[RootSpan]:
    """All roots of all texts, at most `num_anchors` at a time."""
    for index, text in enumerate(texts):
        for first in range(0, text.num_roots, num_anchors):
            yield RootSpan(index, first, min(num_anchors, text.num_roots - first))


def pack_roots(
    texts: Sequence[Text], spans: Sequence[RootSpan], rows: int, num_anchors: int, draft_depth: int
) -> PackedBatch:
    """One text a row with the roots of a span as anchors, on the CPU; rows beyond the spans are padding.

    Rows are as long as the longest of all texts needs, so that all batches have one shape.
    """
    row_tokens = round_up(max(len(text.tokens) for text in texts), ROW_STEP_TOKENS)
    tokens, positions = np.zeros((2, rows, row_tokens), np.int64)
    starts = np.tile(np.arange(row_tokens), (rows, 1))
    anchors = np.full((rows, num_anchors), row_tokens - 1)
    labels = np.full((rows, num_anchors, draft_depth), NO_LABEL)
    for row, span in enumerate(spans):
        text, start = texts[span.text]
        size = len(text)
        tokens[row, :size], positions[row, :size], starts[row, :size] = text, np.arange(size), 0
        roots = start + span.first_root + np.arange(span.num_roots)
        places = roots[:, None] + 1 + np.arange(draft_depth)  # [num_roots, draft_depth]
        anchors[row, : span.num_roots] = roots
        known = np.where(places < size, text[np.minimum(places, size - 1)], NO_LABEL)
        labels[row, : span.num_roots] = known
    return PackedBatch(*map(torch.from_numpy, (tokens, positions, starts, anchors, labels)))


def round_up(number: int, step: int) -> int:
    """The least multiple of `step` from `number` up."""
    return -(-number // step) * step
