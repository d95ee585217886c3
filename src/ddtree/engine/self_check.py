"""A target must show that it honours a tree: node logits are those of the node's own path decoded plainly."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.engine.protocols import TargetModel
from ddtree.layers.window import Window

# Prefix of four tokens; then a root, its children b and c, and a child d of b.
PREFIX, ROOT, B, C, D = (5, 9, 2, 7), 3, 11, 4, 8
NODES, DEPTHS = (ROOT, B, C, D), (0, 1, 1, 2)
PATHS = ((0,), (0, 1), (0, 2), (0, 1, 3))
# Root mean square over the logits' spread: a sibling seen or a wrong position moves them by about 1.
# The tree is too small to leave a sliding window.
LARGEST_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


@torch.inference_mode()
def tree_verify_fault(target: TargetModel, dtype: torch.dtype, device: torch.device) -> str | None:
    """What is wrong with the target's verify of a small tree, or None.

    A model whose attention ignores the mask it is given, or that keeps state outside the cache, would
    run without an error and say something else.
    """
    vocab_size = target.info.vocab_size

    def tensor(values: tuple[int, ...]) -> Tensor:
        return torch.tensor(values, device=device) % vocab_size

    start = len(PREFIX)
    cache = target.new_kv_cache(start + len(NODES))
    cache.data.zero_()
    target.forward(tensor(PREFIX), Window.at(0, torch.arange(start, device=device), None), cache, ())
    mask = torch.zeros(len(NODES), len(NODES), dtype=torch.bool, device=device)
    for node, path in enumerate(PATHS):
        mask[node, list(path)] = True
    positions = start + torch.tensor(DEPTHS, device=device)
    got = target.forward(tensor(NODES), Window.at(start, positions, mask), cache, ()).logits.float()
    for node, path in enumerate(PATHS):
        tokens = tensor((*PREFIX, *(NODES[i] for i in path)))
        window = Window.at(0, torch.arange(tokens.shape[0], device=device), None)
        plain = target.new_kv_cache(tokens.shape[0])
        expected = target.forward(tokens, window, plain, (), last_only=True).logits[0].float()
        gap = float((got[node] - expected).square().mean().sqrt() / expected.std())
        if not gap <= LARGEST_GAP[dtype]:
            return f"logits of a tree node differ from plain decoding by {gap:.2g} standard deviations"
    return None
