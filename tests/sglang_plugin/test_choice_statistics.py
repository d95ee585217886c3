"""G-tests: 200,000 draws of every kind of sampling against the exact distribution at each node of a tree.

Each test has its planted faults, the kind that ship unseen: a setting ignored or off by a little, the path
not counted, the root counted twice, drafts accepted with probability min(1, p / q). Seeds are fixed, so a
result does not change from run to run; the faults land far beyond the bound with a fifth of the draws.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch

from choice_kit import Case, reference_filter, reference_logits
from ddtree.sglang_plugin.batch_sampling import NO_TOP_K, BatchSampling, RequestSampling
from ddtree.sglang_plugin.target_choice import choose_target_tokens
from ddtree.sglang_plugin.token_counts import TokenCounts
from ddtree.tree import DraftTree, ancestor_mask, follow

NUM_REQUESTS, WIDTH, NUM_CALLS, VOCAB = 1000, 8, 25, 12
BOUND, FAR = 4.5, 25.0
# Root 3; tokens 3 and 5 come twice on one path, and 5 on two branches.
PARENTS = [-1, 0, 0, 1, 1, 3, 5, 2]
TOKENS = [3, 5, 7, 3, 2, 5, 1, 5]
DEPTHS = [0, 1, 1, 2, 2, 3, 4, 2]
OUTPUT = (0, 5, 8, 5, 3)
LOGITS = torch.randn(WIDTH, VOCAB, generator=torch.Generator().manual_seed(20)) * 1.5
LOGITS[range(WIDTH), TOKENS] += 2.0  # else a penalty on a node's own token would hardly show
BIAS = torch.linspace(-1.5, 1.5, VOCAB)


def trees(bs: int) -> DraftTree:
    columns = [torch.tensor(values).expand(bs, -1) for values in (TOKENS, PARENTS, DEPTHS)]
    return DraftTree(*columns, torch.linspace(0, -3, WIDTH).expand(bs, -1))


def exact(request: RequestSampling, *, has_bias: bool) -> np.ndarray:
    """Each node's distribution, [W, V] float64."""
    bias = BIAS[None] if has_bias else None
    case = Case(LOGITS[None], (request,), (OUTPUT,), trees(1), torch.zeros(1, WIDTH), bias)
    probs = np.zeros((WIDTH, VOCAB))
    for column in range(WIDTH):
        scaled = reference_logits(case, 0, column) / np.float32(request.temperature)
        stays, is_near = reference_filter(scaled, request, is_sequential=False, keeps_ties=False)
        assert not is_near
        probs[column] = np.where(stays, np.exp(scaled.astype(np.float64) - scaled.max()), 0.0)
    return probs / probs.sum(1, keepdims=True)


def draw_counts(
    request: RequestSampling,
    *,
    has_bias: bool,
    mask: torch.Tensor | None = None,
    depths: torch.Tensor | None = None,
    output: tuple[int, ...] = OUTPUT,
    num_calls: int = NUM_CALLS,
) -> np.ndarray:
    """How often each node chose each token, [W, V], in 8,000 draws a call.

    Every node has positions of its own, which real nodes of one depth have not: so no two draws share noise.
    """
    requests = [dataclasses.replace(request, seed=seed, slot=seed) for seed in range(NUM_REQUESTS)]
    sampling = BatchSampling.from_requests(requests, "cpu")
    tree = trees(NUM_REQUESTS)
    if depths is not None:
        tree = dataclasses.replace(tree, depths=depths.expand(NUM_REQUESTS, -1))
    mask = ancestor_mask(tree) if mask is None else mask.expand(NUM_REQUESTS, -1, -1)
    counts = TokenCounts(NUM_REQUESTS, VOCAB, "cpu")
    counts.reset(list(range(NUM_REQUESTS)), [list(output)] * NUM_REQUESTS)
    seen = torch.zeros(WIDTH, VOCAB, dtype=torch.int64)
    for call in range(num_calls):
        positions = (torch.arange(WIDTH) + call * WIDTH).expand(NUM_REQUESTS, -1)
        tokens = choose_target_tokens(
            LOGITS.expand(NUM_REQUESTS, -1, -1).flatten(0, 1).clone(), sampling=sampling, positions=positions,
            tree=tree, ancestor_mask=mask, counts=counts,
            logit_bias=BIAS.expand(NUM_REQUESTS, -1) if has_bias else None, apply_grammar=None,
        )  # fmt: skip
        seen.view(-1).index_add_(
            0, (torch.arange(WIDTH) * VOCAB + tokens).flatten(), torch.ones_like(tokens).flatten()
        )
    return seen.numpy()


def g_score(counts: np.ndarray, probs: np.ndarray) -> float:
    """(G - dof) / sqrt(2 dof) over all rows, about standard normal if `counts` are draws from `probs`."""
    if (counts[probs == 0] > 0).any():
        return math.inf
    expected = counts.sum(1, keepdims=True) * probs
    seen = counts > 0
    g = 2 * (counts[seen] * np.log(counts[seen] / expected[seen])).sum()
    dof = (probs > 0).sum() - (counts.sum(1) > 0).sum()
    return float((g - dof) / math.sqrt(2 * dof))


CASES = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 1.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "top_k top_p": {"temperature": 1.2, "top_k": 4, "top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 0.8},
    "repetition": {"repetition_penalty": 2.0},
    "min_new_tokens": {"min_new_tokens": 7, "stop_tokens": (2, 9)},
    "logit bias": {},
    "all": {
        "temperature": 0.9, "top_k": 8, "top_p": 0.97, "min_p": 0.02, "frequency_penalty": 0.3,
        "presence_penalty": -0.2, "repetition_penalty": 1.2, "min_new_tokens": 6, "stop_tokens": (4,),
    },
}  # fmt: skip


def request_of(name: str) -> tuple[RequestSampling, bool]:
    return RequestSampling(**CASES[name]), name in ("logit bias", "all")


@pytest.mark.parametrize("name", CASES)
def test_draws_have_the_exact_distribution(name):
    request, has_bias = request_of(name)
    counts = draw_counts(request, has_bias=has_bias)
    assert counts.sum() == 200_000
    assert abs(g_score(counts, exact(request, has_bias=has_bias))) < BOUND


# The root is a path of its own for each node, so that no node sees the tokens of its ancestors.
NO_PATH = torch.eye(WIDTH, dtype=torch.bool)
OWN_TOKEN_LATE = ancestor_mask(trees(1))[0] & ~torch.eye(WIDTH, dtype=torch.bool)
ROOT_TWICE = {"output": (*OUTPUT, OUTPUT[-1])}
FAULTS = {
    "temperature ignored": ("temperature", {"temperature": 1.0}, {}),
    "temperature twice": ("hot", {"temperature": 1.6**2}, {}),
    "temperature 15 % off": ("temperature", {"temperature": 0.805}, {}),
    "top_k ignored": ("top_k", {"top_k": NO_TOP_K}, {}),
    "top_k one more": ("top_k", {"top_k": 6}, {}),
    "top_k one less": ("top_k", {"top_k": 4}, {}),
    "top_p ignored": ("top_p", {"top_p": 1.0}, {}),
    "top_p too small": ("top_p", {"top_p": 0.7}, {}),
    "top_k of both ignored": ("top_k top_p", {"top_k": NO_TOP_K}, {}),
    "top_p of both ignored": ("top_k top_p", {"top_p": 1.0}, {}),
    "min_p ignored": ("min_p", {"min_p": 0.0}, {}),
    "min_p too large": ("min_p", {"min_p": 0.2}, {}),
    "frequency ignored": ("frequency", {"frequency_penalty": 0.0}, {}),
    "frequency as presence": ("frequency", {"frequency_penalty": 0.0, "presence_penalty": 0.7}, {}),
    "frequency without the path": ("frequency", {}, {"mask": NO_PATH}),
    "frequency a token late": ("frequency", {}, {"mask": OWN_TOKEN_LATE}),
    "frequency with the root twice": ("frequency", {}, ROOT_TWICE),
    "presence ignored": ("presence", {"presence_penalty": 0.0}, {}),
    "presence as frequency": ("presence", {"presence_penalty": 0.0, "frequency_penalty": 0.8}, {}),
    "presence without the path": ("presence", {}, {"mask": NO_PATH}),
    "repetition ignored": ("repetition", {"repetition_penalty": 1.0}, {}),
    "repetition without the path": ("repetition", {}, {"mask": NO_PATH}),
    "repetition a token late": ("repetition", {}, {"mask": OWN_TOKEN_LATE}),
    "min_new_tokens ignored": ("min_new_tokens", {"min_new_tokens": 0}, {}),
    "min_new_tokens without depth": ("min_new_tokens", {}, {"depths": torch.zeros(WIDTH, dtype=torch.int64)}),
    "min_new_tokens with the root twice": ("min_new_tokens", {}, ROOT_TWICE),
    "logit bias ignored": ("logit bias", {}, {"has_bias": False}),
    "penalties of all ignored": ("all", {"frequency_penalty": 0.0, "presence_penalty": 0.0}, {}),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails(fault):
    name, changes, how = FAULTS[fault]
    request, has_bias = request_of(name)
    counts = draw_counts(
        dataclasses.replace(request, **changes), **{"has_bias": has_bias, "num_calls": 5, **how}
    )
    assert g_score(counts, exact(request, has_bias=has_bias)) > FAR


def walk_counts(accept: str) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of first and second committed token, [V, V + 1] with none last, and their exact distribution.

    `accept` is "match", or "ratio": the best child with probability min(1, p / q), else a draw from p.
    """
    request = RequestSampling(temperature=1.3, top_p=0.95)
    probs = exact(request, has_bias=False)
    children = {token: column for column, token in enumerate(TOKENS) if PARENTS[column] == 0}
    expected = np.zeros((VOCAB, VOCAB + 1))
    for token in range(VOCAB):
        after = np.append(probs[children[token]], 0.0) if token in children else np.eye(VOCAB + 1)[-1]
        expected[token] = probs[0, token] * after
    seen = np.zeros_like(expected)
    requests = [dataclasses.replace(request, seed=seed, slot=seed) for seed in range(NUM_REQUESTS)]
    sampling = BatchSampling.from_requests(requests, "cpu")
    tree = trees(NUM_REQUESTS)
    mask = ancestor_mask(tree)
    uniforms = torch.Generator().manual_seed(6)
    for call in range(200):
        tokens = choose_target_tokens(
            LOGITS.expand(NUM_REQUESTS, -1, -1).flatten(0, 1).clone(), sampling=sampling,
            positions=tree.depths + call * 5, tree=tree, ancestor_mask=mask, counts=None, logit_bias=None,
            apply_grammar=None,
        )  # fmt: skip
        if accept == "ratio":
            ratio = probs[0, TOKENS[1]] / 0.5
            is_taken = torch.rand(NUM_REQUESTS, generator=uniforms) < ratio
            tokens[:, 0] = torch.where(is_taken, TOKENS[1], tokens[:, 0])
        result = follow(tree, mask, tokens, max(DEPTHS))
        second = torch.where(result.num_correct_drafts > 0, result.accept_tokens[:, 1], VOCAB)
        np.add.at(seen, (result.accept_tokens[:, 0].numpy(), second.numpy()), 1)
    return seen, expected


def test_committed_tokens_have_the_exact_distribution():
    """The first two tokens that a walk commits, as plain decoding would draw them one after the other."""
    seen, expected = walk_counts("match")
    assert seen.sum() == 200_000
    assert abs(g_score(seen.reshape(1, -1), expected.reshape(1, -1))) < BOUND


def test_accepting_by_the_ratio_of_probabilities_fails():
    seen, expected = walk_counts("ratio")
    assert g_score(seen.reshape(1, -1), expected.reshape(1, -1)) > FAR
