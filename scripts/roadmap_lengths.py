"""Accept lengths over the node budget: measured here, published by others, or assumed, and which it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from roadmap_points import read

from ddtree.config import Mode
from ddtree.tree.budget_cost import DraftPlan
from ddtree.tree.cost_catalogue import PAIRS

MEASURED, PUBLISHED, ASSUMED = "measured here", "published", "assumed"
PAPER = "DDTree paper"


@dataclass(frozen=True, slots=True)
class LengthCurve:
    """Tokens a round of the chain and of trees by budget.

    Between two budgets the length runs straight in the logarithm of the budget; below the first it goes on
    so, above the last it stays, so that nothing is promised beyond what was seen.
    """

    target: str
    prompts: str
    chain: float
    trees: Mapping[int, float]
    kind: str
    who: str = ""

    def at(self, plan: DraftPlan) -> float:
        """The accept length of a round by this plan."""
        if plan.mode is Mode.AR:
            return 1.0
        if plan.mode is Mode.CHAIN:
            return self.chain
        budgets = sorted(self.trees)
        if len(budgets) < 2:
            raise ValueError(f"{self.target}, {self.prompts}: one budget alone says nothing of others")
        high = next((index for index, budget in enumerate(budgets) if budget >= plan.node_budget), None)
        if high is None:
            return self.trees[budgets[-1]]
        low_budget, high_budget = budgets[max(high, 1) - 1], budgets[max(high, 1)]
        share = math.log(plan.node_budget / low_budget) / math.log(high_budget / low_budget)
        length = self.trees[low_budget] + share * (self.trees[high_budget] - self.trees[low_budget])
        return max(self.chain, length)

    @property
    def source(self) -> str:
        return f"{self.kind} ({self.who})" if self.who else self.kind


# arXiv 2604.12989, figure 3: MATH-500, Qwen3-8B, temperature 0; read off the figure, so about 0.02 off.
SWEEP = LengthCurve(
    "Qwen3-8B", "MATH-500", 7.79,
    {16: 8.61, 32: 9.27, 64: 9.75, 128: 10.20, 256: 10.43, 512: 10.73, 1024: 10.98}, PUBLISHED, PAPER,
)  # fmt: skip
SWEEP_BEST = 512  # the sweep's fastest budget, at which table 1 gives this cell

# arXiv 2604.12989, table 1: (prompts, temperature) -> chain speed-up and length, tree speed-up and length.
# The tree's are those of the best budget of the cell, which the paper does not name.
TABLE_1: Mapping[str, Mapping[tuple[str, int], tuple[float, float, float, float]]] = {
    "Qwen3-4B": {
        ("GSM8K", 0): (4.77, 6.51, 6.58, 9.33), ("MATH-500", 0): (5.54, 7.72, 7.50, 10.71),
        ("HumanEval", 0): (4.81, 6.62, 6.81, 9.44), ("MT-Bench", 0): (2.64, 4.38, 4.18, 6.70),
        ("MATH-500", 1): (4.65, 6.60, 6.60, 9.61), ("MT-Bench", 1): (2.46, 4.05, 3.91, 6.27),
    },
    "Qwen3-8B": {
        ("GSM8K", 0): (4.78, 6.57, 6.75, 9.54), ("MATH-500", 0): (5.56, 7.79, 7.52, 10.73),
        ("HumanEval", 0): (4.84, 6.61, 6.90, 9.67), ("MT-Bench", 0): (2.56, 4.28, 4.10, 6.58),
        ("MATH-500", 1): (4.56, 6.46, 6.59, 9.54), ("MT-Bench", 1): (2.30, 3.77, 3.75, 6.02),
    },
    "Qwen3-Coder-30B-A3B": {
        ("GSM8K", 0): (4.00, 5.18, 5.83, 7.55), ("MATH-500", 0): (4.29, 5.58, 6.21, 8.10),
        ("HumanEval", 0): (6.09, 8.02, 8.22, 10.72), ("MT-Bench", 0): (2.04, 3.52, 3.27, 5.36),
        ("MATH-500", 1): (4.01, 5.32, 5.91, 7.76), ("MT-Bench", 1): (1.96, 3.43, 3.10, 5.14),
    },
}  # fmt: skip


def shaped(target: str, prompts: str, chain: float, best: float, kind: str, who: str) -> LengthCurve:
    """A curve of which only the chain and the best tree are known, with the sweep's shape in between."""
    gain = (best - chain) / (SWEEP.trees[SWEEP_BEST] - SWEEP.chain)
    trees = {budget: chain + gain * (length - SWEEP.chain) for budget, length in SWEEP.trees.items()}
    return LengthCurve(target, prompts, chain, trees, kind, who)


def paper_curve(target: str, prompts: str) -> LengthCurve:
    """A cell of the paper's table 1 at temperature 0; the sweep itself where it was published."""
    if (target, prompts) == (SWEEP.target, SWEEP.prompts):
        return SWEEP
    _, chain, _, best = TABLE_1[target][prompts, 0]
    return shaped(
        target, prompts, chain, best, PUBLISHED, f"{PAPER}; between chain and best tree the sweep's shape"
    )


def our_curves() -> Iterator[LengthCurve]:
    """The shipped drafter's and the prototype's, exact and offline on the target's own greedy texts."""
    for name, columns in read("training")["sets"].items():
        lengths = {nodes: row["accept_length"] for nodes, row in columns.items()}
        yield measured(name, lengths, "")
    prototype = read("acceptance_gpu_fp32")
    who = "prototype drafter" if prototype.get("drafter") == "prototype" else ""
    for name, columns in prototype["sets"].items():
        lengths = {nodes: row["engine"] for nodes, row in columns.items()}
        yield measured(f"{name}, float32", lengths, who)


def measured(name: str, lengths: Mapping[str, float], who: str) -> LengthCurve:
    trees = {int(nodes): length for nodes, length in lengths.items() if nodes.isdecimal()}
    return LengthCurve("SmolLM2-135M", name, lengths["chain"], trees, MEASURED, who)


# The chain's 6.98 and 12.8 % more at 16 nodes are published; the sweep's 16 nodes add 10.5 %.
HYBRID_CHAIN, HYBRID_GAIN_16 = 6.98, 0.128
_hybrid_best = HYBRID_CHAIN * (
    1 + HYBRID_GAIN_16 * (SWEEP.trees[SWEEP_BEST] - SWEEP.chain) / (SWEEP.trees[16] - SWEEP.chain)
)
HYBRID = shaped(
    "Qwen3.6-27B", "GSM8K", HYBRID_CHAIN, _hybrid_best, PUBLISHED,
    "SubSir: chain and 16 nodes; beyond them the sweep's shape",
)  # fmt: skip


def assumed(target: str) -> LengthCurve:
    """For targets without published lengths: as if they were Qwen3-8B on MT-Bench, in blocks of their own."""
    seen = paper_curve("Qwen3-8B", "MT-Bench")
    blocks = PAIRS[seen.target].block_size, PAIRS[target].block_size
    trees = {budget: in_block(length, *blocks) for budget, length in seen.trees.items()}
    return LengthCurve(
        target,
        "chat",
        in_block(seen.chain, *blocks),
        trees,
        ASSUMED,
        "Qwen3-8B's on MT-Bench, block shortened",
    )


def in_block(length: float, block_size: int, shorter: int) -> float:
    """A length seen in blocks of one size as it would be in shorter ones.

    As if each draft had the same chance p of being right, so that a block of b gives 1 + p + ... + p^(b-1).
    """

    def of(chance: float, block: int) -> float:
        return sum(chance**depth for depth in range(block))

    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if of(middle, block_size) < length else (low, middle)
    return of(low, shorter)


def prediction_curves() -> tuple[LengthCurve, ...]:
    """What the predictions are made with."""
    paper = [paper_curve(target, prompts) for target in TABLE_1 for prompts in ("MATH-500", "MT-Bench")]
    targets = ("Qwen3-32B", "Qwen3-235B-A22B", "GLM-4.5-Air", "gpt-oss-120b", "Kimi K2.5")
    return (*paper, HYBRID, *map(assumed, targets))
