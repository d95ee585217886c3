"""An SGLang plugin that plants faults in this project's worker, so that a check can show that it finds them.

The file that the environment variable DDTREE_FAULT_FILE names holds the fault of the next rounds:

    kv         the accept path's KV stays where it was written
    mask       a node sees every earlier node of its window, not only its ancestors
    positions  a node's position follows its column in the window, not its depth
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

FAULT_FILE = "DDTREE_FAULT_FILE"
FAULTS = ("kv", "mask", "positions")
PLUGIN = {"ddtree-faults": "sglang_faults:register"}


def register() -> None:
    """Entry point: plant the switches in a scheduler once its worker is there."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", plant, HookType.AFTER)


def plant(_result: None, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Put a switch before each of the worker's methods that a fault spoils.

    What graphs have captured cannot be switched: rounds are committed outside of them from here on, and a
    spoiled mask is written over the one that the drafter's graph wrote.
    """
    worker, file = scheduler.draft_worker, Path(os.environ[FAULT_FILE])
    worker._greedy_graph = None
    move, verify, verify_mask = worker._kv_mover.move, worker._verify, worker._verify_mask

    def is_planted(fault: str) -> bool:
        return file.read_text(encoding="utf-8") == fault

    def spoiled_move(window: Any, accept_indices: Any) -> None:
        if not is_planted("kv"):
            move(window, accept_indices)

    def spoiled_mask(batch: Any, trees: Any, has_mask: bool) -> Any:
        if is_planted("mask"):
            trees = dataclasses.replace(trees, ancestor_mask=causal_like(trees.ancestor_mask))
            has_mask = False
        return verify_mask(batch, trees, has_mask)

    def spoiled_verify(batch: Any, window: Any, trees: Any, has_mask: bool) -> Any:
        if is_planted("positions"):
            trees = dataclasses.replace(trees, positions=by_column(trees.positions))
        return verify(batch, window, trees, has_mask)

    worker._kv_mover.move, worker._verify, worker._verify_mask = spoiled_move, spoiled_verify, spoiled_mask


def causal_like(ancestor_mask: Any) -> Any:
    """A mask [bs, W, W] that is as large, in which a column sees itself and all before it."""
    return ancestor_mask.new_ones(ancestor_mask.shape).tril()


def by_column(positions: Any) -> Any:
    """Positions [bs, W] that count columns from the root's."""
    import torch

    return positions[:, :1] + torch.arange(positions.shape[1], device=positions.device)
