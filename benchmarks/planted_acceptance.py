"""Drafts of a set quality for a target whose greedy text is known: which of them are right, and what follows.

`make_random_pair` makes a target that continues token t with walk[t], so its greedy text after t is a walk
through its vocabulary. `sglang_planted` puts that text among the drafter's candidates: the token at depth d
below a root stands at a rank drawn from (root, d), or is absent. Drafts of one quality hold for SGLang's own
chain, which gets what rank 0 says, and for trees of every budget; and accept lengths follow without a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree.tree import DraftMarginals, build_draft_trees

# By share of positions: how often a position's first candidate is right. Chosen so that a chain of 15 commits
# about 4.4 tokens a round and trees of 15, 31 and 63 nodes about 1.1, 1.25 and 1.35 times as many, as is
# published for Qwen3-8B (arXiv 2604.12989: by table 1 the chain on chat, by figure 3 the sweep of budgets).
SURENESS: tuple[tuple[float, float], ...] = ((0.5, 0.94), (0.3, 0.75), (0.2, 0.4))
FOUND_LATER = 0.85  # share of the first candidate's misses that stand at a later rank
RANK_POWER = 1.5  # falling with the rank to this power
NUM_RANKS = 32
WALK_FILE = "walk.json"


@dataclass(frozen=True, slots=True)
class Walk:
    """The greedy text of a target: one cycle through its ids from 0 to `num_walked`, drawn from a seed.

    The ids from `num_walked` on follow themselves, and no text contains them.
    """

    vocab_size: int
    num_walked: int
    seed: int

    def table(self) -> NDArray[np.int64]:
        """The token after each token, [vocab_size]."""
        order = np.random.default_rng(self.seed).permutation(self.num_walked)
        following = np.arange(self.vocab_size)
        following[order] = np.roll(order, -1)
        return following

    def write(self, folder: Path) -> None:
        (folder / WALK_FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> Walk:
        return Walk(**json.loads((folder / WALK_FILE).read_text(encoding="utf-8")))


def draws(tokens: NDArray[np.int64], depth: int, seed: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each (token, depth): the finaliser of splitmix64 over both."""
    with np.errstate(over="ignore"):
        mixed = tokens.astype(np.uint64) * np.uint64(1_000_003) + np.uint64(depth)
        mixed = (mixed + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53


def rank_rates() -> NDArray[np.float64]:
    """How often the right token stands at each rank, [sureness, NUM_RANKS]; rows sum to less than 1."""
    first = np.array([rate for _, rate in SURENESS])
    later = np.arange(1.0, NUM_RANKS) ** -RANK_POWER
    misses = (1 - first) * FOUND_LATER
    return np.column_stack((first, misses[:, None] * later / later.sum()))


class PlantedDrafts:
    """What is planted below every root.

    Args:
        walk: the target's greedy text.
        draft_depth: positions of a draft.
        seed: of the ranks.

    Attributes:
        walks: the right token at each depth below each root, [draft_depth, vocab].
        ranks: its rank among the candidates, `NUM_RANKS` for none, [draft_depth, vocab].
        classes: how sure the drafter is there, an index into `SURENESS`, [draft_depth, vocab].
        log_probs: of the candidates of a position of each class, [classes, NUM_RANKS].
        filler: a token that no text contains.
    """

    def __init__(self, walk: Walk, draft_depth: int, seed: int = 0) -> None:
        following, roots = walk.table(), np.arange(walk.vocab_size)
        shares = np.cumsum([share for share, _ in SURENESS])
        rates = rank_rates()
        self.draft_depth = draft_depth
        self.filler = walk.vocab_size - 1
        self.log_probs = torch.from_numpy(np.log(rates)).float()
        walks, ranks, classes, tokens = [], [], [], roots
        for depth in range(1, draft_depth + 1):
            tokens = following[tokens]
            sureness = np.searchsorted(shares[:-1], draws(roots, 2 * depth, seed), side="right")
            drawn = draws(roots, 2 * depth + 1, seed)
            walks.append(tokens)
            classes.append(sureness)
            ranks.append((drawn[:, None] >= np.cumsum(rates, axis=1)[sureness]).sum(1))
        self.walks = torch.from_numpy(np.stack(walks)).int()
        self.ranks = torch.from_numpy(np.stack(ranks)).to(torch.uint8)
        self.classes = torch.from_numpy(np.stack(classes)).to(torch.uint8)

    def to(self, device: torch.device) -> PlantedDrafts:
        """The same with its tables on a device."""
        moved = object.__new__(PlantedDrafts)
        moved.draft_depth, moved.filler = self.draft_depth, self.filler
        for name in ("walks", "ranks", "classes", "log_probs"):
            setattr(moved, name, getattr(self, name).to(device))
        return moved

    def marginals(self, tokens: Tensor, roots: Tensor) -> DraftMarginals:
        """A drafter's candidates `tokens` [bs, L, K] below `roots` [bs] with the right ones planted.

        Gathers and selections alone, so that a CUDA graph can hold them.
        """
        right = self._below(self.walks, roots).unsqueeze(-1)  # [bs, L, 1]
        ranks = self._below(self.ranks, roots).unsqueeze(-1)
        columns = torch.arange(tokens.shape[-1], device=tokens.device)
        tokens = tokens.masked_fill(tokens == right, self.filler)
        tokens = torch.where(columns == ranks, right, tokens)
        log_probs = self.log_probs[self._below(self.classes, roots)]  # [bs, L, NUM_RANKS]
        return DraftMarginals(tokens.contiguous(), log_probs[..., : tokens.shape[-1]].contiguous())

    def chain(self, tokens: Tensor, roots: Tensor) -> Tensor:
        """A drafter's best tokens [bs, L] below `roots` [bs] with the right ones planted."""
        return self.marginals(tokens.unsqueeze(-1), roots).tokens.squeeze(-1)

    def _below(self, table: Tensor, roots: Tensor) -> Tensor:
        """Columns of a table [L, vocab] as [bs, L] int64."""
        return table.index_select(1, roots.long()).T.contiguous().long()


class Simulation:
    """The rounds of a request whose drafts are planted, without a model.

    Args:
        walk: the target's greedy text.
        drafts: what is planted.
        node_budget: of the tree; None for the chain.
        candidate_topk: candidates that the tree is made of.
    """

    def __init__(
        self, walk: Walk, drafts: PlantedDrafts, node_budget: int | None, candidate_topk: int
    ) -> None:
        self._following, self._drafts = walk.table(), drafts
        self._node_budget, self._candidate_topk = node_budget, candidate_topk
        self._accept_lengths: dict[int, int] = {}

    def text(self, root: int, count: int) -> list[int]:
        """The `count` tokens after a root."""
        tokens = []
        for _ in range(count):
            root = int(self._following[root])
            tokens.append(root)
        return tokens

    def rounds(self, prompt: Sequence[int], num_tokens: int) -> int:
        """Verify passes until `num_tokens` are there, of which prefill makes the first."""
        text = self.text(prompt[-1], num_tokens)
        done, rounds = 1, 0
        while done < num_tokens:
            done += self.accept_length(text[done - 1])
            rounds += 1
        return rounds

    def accept_length(self, root: int) -> int:
        """Tokens that a round commits below a root, the bonus token included."""
        if root not in self._accept_lengths:
            self._accept_lengths[root] = 1 + (
                self._correct_of_chain(root) if self._node_budget is None else self._correct_of_tree(root)
            )
        return self._accept_lengths[root]

    def _correct_of_chain(self, root: int) -> int:
        return int((self._drafts.ranks[:, root] == 0).long().cumprod(0).sum())

    def _correct_of_tree(self, root: int) -> int:
        """Depth of the deepest node on the right path, by a tree whose tokens are their ranks."""
        assert self._node_budget is not None
        ranks = self._drafts.ranks[:, root].tolist()
        log_probs = self._drafts.log_probs[self._drafts.classes[:, root].long()][:, : self._candidate_topk]
        tokens = torch.arange(self._candidate_topk).expand(1, self._drafts.draft_depth, -1)
        marginals = DraftMarginals(tokens.contiguous(), log_probs.unsqueeze(0).contiguous())
        tree = build_draft_trees(marginals, torch.zeros(1, dtype=torch.int64), self._node_budget)
        node_tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
        node_scores = tree.log_probs[0].tolist()
        place, depth = 0, 0
        while depth < len(ranks):
            children = (
                i for i, parent in enumerate(parents)
                if i and parent == place and node_tokens[i] == ranks[depth] and node_scores[i] > float("-inf")
            )  # fmt: skip
            child = next(children, None)
            if child is None:
                break
            place, depth = child, depth + 1
        return depth


def settings() -> dict[str, Any]:
    """The rates as a result file records them."""
    return {"sureness": SURENESS, "found_later": FOUND_LATER, "rank_power": RANK_POWER, "ranks": NUM_RANKS}
