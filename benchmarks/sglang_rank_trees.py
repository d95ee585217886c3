"""An SGLang plugin that writes down what each tensor-parallel rank drafted, and can make ties plentiful.

It needs DDTREE with `check_ranks`, which compares the ranks' trees in every round and ends the server where
they differ. Each rank also hashes its own trees and scores; at every flush of the prefix cache it writes
rank-N.json to the folder that DDTREE_RANKS_FOLDER names. With DDTREE_TIE_STEP above 0 the drafter's logits
are rounded to multiples of it before a rank takes its K best, so that equal scores stand at the cut, between
siblings and between ranks.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any

RANKS_FOLDER, TIE_STEP = "DDTREE_RANKS_FOLDER", "DDTREE_TIE_STEP"
PLUGIN = {"ddtree-rank-trees": "sglang_rank_trees:register"}
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


class RankLog:
    """Counts and hashes of the trees of one rank."""

    def __init__(self) -> None:
        self.rounds = self.trees = self.nodes = self.tied_trees = 0
        self._tree_hash, self._score_hash = hashlib.sha256(), hashlib.sha256()

    def add(self, trees: Any) -> None:
        """Take the trees of a round; waits for the device."""
        tokens, parents, scores = (
            values.cpu() for values in (trees.tree.tokens, trees.tree.parents, trees.tree.log_probs)
        )
        self._tree_hash.update(tokens.numpy().tobytes() + parents.numpy().tobytes())
        self._score_hash.update(scores.numpy().tobytes())
        self.rounds, self.trees = self.rounds + 1, self.trees + len(tokens)
        for row_parents, row_scores in zip(parents.tolist(), scores.tolist(), strict=True):
            nodes = [
                node for node in zip(row_parents[1:], row_scores[1:], strict=True) if node[1] > float("-inf")
            ]
            self.nodes += len(nodes)
            self.tied_trees += len(set(nodes)) < len(nodes)  # two children of a node with one score

    def to_json(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds, "trees": self.trees, "nodes": self.nodes, "tied_trees": self.tied_trees,
            "tree_hash": self._tree_hash.hexdigest(), "score_hash": self._score_hash.hexdigest(),
        }  # fmt: skip


def register() -> None:
    """Entry point: attach to a scheduler process before its workers are made."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    log = RankLog()

    def attach_log(*_args: Any, **_kwargs: Any) -> None:
        attach(log)

    def write_log(*_args: Any, **_kwargs: Any) -> None:
        write(log)

    HookRegistry.register(f"{SCHEDULER}.__init__", attach_log, HookType.BEFORE)
    HookRegistry.register(f"{SCHEDULER}.flush_cache", write_log, HookType.BEFORE)


def attach(log: RankLog) -> None:
    """Listen where ranks compare their trees, and round their logits where asked to."""
    from ddtree.sglang_plugin import draft_sampler, worker_v2

    check, step = worker_v2.check_equal_trees, float(os.environ.get(TIE_STEP, "0"))

    @functools.wraps(check)
    def checked(trees: Any, group: Any) -> None:
        check(trees, group)
        log.add(trees)

    worker_v2.check_equal_trees = checked
    if step > 0:
        draft_sampler.gather_marginals = rounded(draft_sampler.gather_marginals, step)


def rounded(gather: Any, step: float) -> Any:
    """`gather_marginals` of logits that are multiples of `step`."""

    @functools.wraps(gather)
    def wrapper(logits: Any, *args: Any) -> Any:
        return gather((logits.float() / step).round().mul(step).to(logits.dtype), *args)

    return wrapper


def write(log: RankLog) -> None:
    """Write the counts so far, in one step."""
    from ddtree.sglang_plugin.compat import tensor_parallel_group

    file = Path(os.environ[RANKS_FOLDER]) / f"rank-{tensor_parallel_group().rank_in_group}.json"
    part = file.with_suffix(".part")
    part.write_text(json.dumps(log.to_json()), encoding="utf-8")
    part.replace(file)
