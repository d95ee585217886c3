"""Random batches for the choice of target tokens, and a slow reference that works one node at a time."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ddtree.sglang_plugin.batch_sampling import BatchSampling, RequestSampling
from ddtree.sglang_plugin.target_choice import choose_target_tokens
from ddtree.sglang_plugin.token_counts import TokenCounts
from ddtree.tree import DraftTree, ancestor_mask
from ddtree.tree.noise import reference_uniform

NEAR = 1e-5  # a token's mass before it this near to a limit may be cut either way


@dataclass(frozen=True)
class Case:
    """A batch: what `choose_target_tokens` gets, and the output from which it counts."""

    logits: Tensor  # [bs, W, V]
    requests: tuple[RequestSampling, ...]
    outputs: tuple[tuple[int, ...], ...]  # committed so far, the root included
    tree: DraftTree | None
    positions: Tensor  # [bs, W]
    logit_bias: Tensor | None = None  # [bs, V]
    allowed: Tensor | None = None  # [bs * W, V] bool, the grammar's
    options: dict[str, object] = field(default_factory=dict)

    def select(self, rows: list[int]) -> Case:
        """The same for some of its requests, in that order."""
        width = self.positions.shape[1]
        allowed = None if self.allowed is None else self.allowed.unflatten(0, (-1, width))[rows].flatten(0, 1)
        return dataclasses.replace(
            self,
            logits=self.logits[rows],
            requests=tuple(self.requests[row] for row in rows),
            outputs=tuple(self.outputs[row] for row in rows),
            tree=None if self.tree is None else tree_rows(self.tree, rows),
            positions=self.positions[rows],
            logit_bias=None if self.logit_bias is None else self.logit_bias[rows],
            allowed=allowed,
        )


def tree_rows(tree: DraftTree, rows: list[int]) -> DraftTree:
    return DraftTree(tree.tokens[rows], tree.parents[rows], tree.depths[rows], tree.log_probs[rows])


def random_tree(generator: torch.Generator, bs: int, width: int, vocab: int) -> DraftTree:
    """Trees of random shape with repeated tokens; some have padding, of which the last columns are."""

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    parents = torch.full((bs, width), -1)
    depths = torch.zeros(bs, width, dtype=torch.int64)
    tokens = torch.randint(vocab, (bs, width), generator=generator)
    log_probs = torch.full((bs, width), float("-inf"))
    log_probs[:, 0] = 0.0
    for b in range(bs):
        num_nodes = width - 1 - (draw(3) if width > 4 else 0)
        for column in range(1, num_nodes + 1):
            parent = draw(column)
            parents[b, column], depths[b, column] = parent, depths[b, parent] + 1
            log_probs[b, column] = -float(column)
        tokens[b, num_nodes + 1 :] = 0
    return DraftTree(tokens, parents, depths, log_probs)


def counts_of(case: Case, device: str = "cpu") -> TokenCounts:
    counts = TokenCounts(max(r.slot for r in case.requests) + 2, case.logits.shape[2], device)
    rows = [row for row, request in enumerate(case.requests) if request.needs_counts]
    counts.reset([case.requests[r].slot for r in rows], [list(case.outputs[r]) for r in rows])
    return counts


def choose(case: Case, device: str = "cpu") -> Tensor:
    """What `choose_target_tokens` chooses, [bs, W]."""

    def apply_grammar(logits: Tensor) -> None:
        assert case.allowed is not None
        logits.masked_fill_(~case.allowed.to(device), float("-inf"))

    tree, mask = None, None
    if case.tree is not None:
        parts = (case.tree.tokens, case.tree.parents, case.tree.depths, case.tree.log_probs)
        tree, mask = DraftTree(*(part.to(device) for part in parts)), ancestor_mask(case.tree).to(device)
    return choose_target_tokens(
        case.logits.flatten(0, 1).clone().to(device),
        sampling=BatchSampling.from_requests(case.requests, device),
        positions=case.positions.to(device),
        tree=tree,
        ancestor_mask=mask,
        counts=counts_of(case, device),
        logit_bias=None if case.logit_bias is None else case.logit_bias.to(device),
        apply_grammar=None if case.allowed is None else apply_grammar,
        **case.options,
    ).cpu()


def output_at(case: Case, row: int, column: int) -> list[int]:
    """The output up to a node: what is committed, then the path from below the root to the node."""
    path: list[int] = []
    while column > 0 and case.tree is not None and int(case.tree.parents[row, column]) >= 0:
        path.insert(0, int(case.tree.tokens[row, column]))
        column = int(case.tree.parents[row, column])
    return [*case.outputs[row], *path]


def reference_logits(case: Case, row: int, column: int) -> np.ndarray:
    """A node's logits before the temperature, [V] float32, one token at a time."""
    request, output = case.requests[row], output_at(case, row, column)
    logits = case.logits[row, column].float().numpy().astype(np.float32).copy()
    for token in range(len(logits)):
        count = output.count(token)
        if count:
            additive = np.float32(-np.float32(count) * np.float32(request.frequency_penalty))
            logits[token] += np.float32(additive - np.float32(request.presence_penalty))
            scale = np.float32(request.repetition_penalty)
            logits[token] = logits[token] * scale if logits[token] < 0 else logits[token] / scale
        if token in request.stop_tokens and len(output) < request.min_new_tokens:
            logits[token] = -np.inf
        if case.allowed is not None and not case.allowed[row * case.positions.shape[1] + column, token]:
            logits[token] = -np.inf
        if case.logit_bias is not None:
            logits[token] += case.logit_bias[row, token].numpy()
        if np.isnan(logits[token]):
            logits[token] = -np.inf
    return logits


def reference_filter(
    scaled: np.ndarray, request: RequestSampling, *, is_sequential: bool, keeps_ties: bool
) -> tuple[np.ndarray, bool]:
    """Which tokens of a row stay, [V] bool, and whether rounding could decide otherwise."""
    stays = np.zeros(len(scaled), bool)
    if np.isneginf(scaled).all():
        return stays, False
    with np.errstate(invalid="ignore"):
        gaps = np.float32(scaled.max()) - scaled
    order = sorted(range(len(scaled)), key=lambda token: (gaps[token], token))
    weights = [math.exp(-float(gaps[token])) for token in order]
    places = list(range(len(order)))
    if keeps_ties:
        for place in range(1, len(order)):
            if gaps[order[place]] == gaps[order[place - 1]]:
                places[place] = places[place - 1]
    in_top_k = [place < request.top_k for place in places]
    mass = sum(w for w, kept in zip(weights, in_top_k, strict=True) if kept or not is_sequential)
    limit = float(np.float32(request.top_p)) * mass if request.top_p < 1 else math.inf
    max_gap = np.float32(-math.log(request.min_p)) if request.min_p > 0 else np.inf
    is_near = False
    for place, token in enumerate(order):
        before = sum(weights[: places[place]])
        is_near |= before != limit and abs(before - limit) < NEAR * mass
        stays[token] = in_top_k[place] and before <= limit and gaps[token] <= max_gap
    return stays, is_near


def reference_choice(case: Case, row: int, column: int) -> tuple[int, bool]:
    """The token of one node, and whether rounding could decide otherwise."""
    request = case.requests[row]
    logits = reference_logits(case, row, column)
    if request.is_greedy:
        return int(np.argmax(logits)), False
    with np.errstate(over="ignore"):
        scaled = np.minimum(logits / np.float32(request.temperature), np.finfo(np.float32).max)
    stays, is_near = reference_filter(
        scaled, request,
        is_sequential=request.min_p > 0 and bool(case.options.get("sequential_top_k_top_p", False)),
        keeps_ties=case.options.get("ties") == "all",
    )  # fmt: skip
    position = int(case.positions[row, column]) + 1
    best, choice = -math.inf, 0
    for token in range(len(scaled)):
        noise = -math.log(-math.log(reference_uniform(request.seed, position, token)))
        if stays[token] and float(scaled[token]) + noise > best:
            best, choice = float(scaled[token]) + noise, token
    return choice, is_near
