"""Random inputs that the tree tests share, as session fixtures so that hypothesis can use them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from ddtree.tree import DraftMarginals

KINDS = ("continuous", "ties", "zeros", "neg_inf", "nan", "all_neg_inf")


def sorted_log_probs(seed: int, draft_depth: int, topk: int, kind: str) -> np.ndarray:
    """[draft_depth, topk] float32, descending along each row, with the trouble that `kind` names."""
    rng = np.random.default_rng(seed)
    spread = rng.choice([0.1, 1.0, 5.0], size=(draft_depth, 1))
    rows = -np.abs(rng.standard_normal((draft_depth, topk))) * spread
    if kind == "ties":
        rows = np.round(rows * 2) / 2
    elif kind == "zeros":
        rows = np.where(rng.random(rows.shape) < 0.5, 0.0, np.round(rows))
    elif kind in ("neg_inf", "nan"):
        rows[rng.random(rows.shape) < 0.4] = -np.inf
    elif kind == "all_neg_inf":
        rows[rng.integers(draft_depth) :] = -np.inf
    rows = -np.sort(-rows, axis=1).astype(np.float32)
    return np.where(np.isinf(rows), np.float32(np.nan), rows) if kind == "nan" else rows


def make_marginals(log_probs: np.ndarray, seed: int = 0) -> DraftMarginals:
    """Marginals [1, draft_depth, topk] with random distinct tokens, id 0 among them, for `log_probs`."""
    draft_depth, topk = log_probs.shape
    rng = np.random.default_rng(seed)
    tokens = np.stack([rng.permutation(topk + 2)[:topk] for _ in range(draft_depth)])
    return DraftMarginals(torch.from_numpy(tokens)[None], torch.from_numpy(log_probs.copy())[None])


@pytest.fixture(scope="session")
def random_log_probs() -> Callable[..., np.ndarray]:
    return sorted_log_probs


@pytest.fixture(scope="session")
def marginals_of() -> Callable[..., DraftMarginals]:
    return make_marginals


@pytest.fixture(scope="session")
def batch_of() -> Callable[..., DraftMarginals]:
    """`bs` requests of different kinds as one batch of marginals [bs, draft_depth, topk]."""

    def make(seed: int, bs: int, draft_depth: int, topk: int) -> DraftMarginals:
        rows = [
            make_marginals(sorted_log_probs(seed + b, draft_depth, topk, KINDS[b % len(KINDS)]), seed + b)
            for b in range(bs)
        ]
        return DraftMarginals(torch.cat([r.tokens for r in rows]), torch.cat([r.log_probs for r in rows]))

    return make
