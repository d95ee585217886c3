from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.errors import ConfigError
from ddtree.tree import DraftMarginals, DraftTree, build_chain, build_draft_trees
from ddtree.tree.build_reference import ReferenceNode, build_draft_tree, build_level_tree

KINDS = ("continuous", "ties", "zeros", "neg_inf", "nan", "all_neg_inf")
FIELDS = ("tokens", "parents", "depths", "log_probs")

cases = given(
    seed=st.integers(0, 2**32 - 1),
    draft_depth=st.integers(1, 16),
    topk=st.integers(1, 24),
    node_budget=st.one_of(st.integers(1, 40), st.integers(41, 200)),
    kind=st.sampled_from(KINDS),
)


def build(marginals: DraftMarginals, node_budget: int) -> DraftTree:
    return build_draft_trees(marginals, torch.full((marginals.tokens.shape[0],), 7), node_budget)


def ranks_of(tree: DraftTree, marginals: DraftMarginals) -> list[tuple[int, ...]]:
    """The rank path of each real node of request 0, read back from tokens and parents."""
    paths: list[tuple[int, ...]] = [()]
    for column in range(1, int(tree.num_nodes[0]) + 1):
        parent, depth = int(tree.parents[0, column]), int(tree.depths[0, column])
        assert len(paths[parent]) == depth - 1
        ranks = marginals.tokens[0, depth - 1].tolist()
        paths.append((*paths[parent], ranks.index(int(tree.tokens[0, column]))))
    return paths[1:]


def rescore(paths: list[tuple[int, ...]], log_probs: np.ndarray) -> list[float]:
    rows = np.where(np.isnan(log_probs), -np.inf, log_probs).astype(np.float64)
    return sorted(sum(rows[d, r] for d, r in enumerate(path)) for path in paths)


@settings(max_examples=150, deadline=None)
@cases
def test_follows_the_order_rules_exactly(
    random_log_probs, marginals_of, seed, draft_depth, topk, node_budget, kind
):
    log_probs = random_log_probs(seed, draft_depth, topk, kind)
    marginals = marginals_of(log_probs, seed)
    tree = build(marginals, node_budget)
    expected = build_level_tree(log_probs, node_budget)
    assert ranks_of(tree, marginals) == [node.ranks for node in expected]
    num_nodes = len(expected)
    assert tree.parents[0, 1 : num_nodes + 1].tolist() == [node.parent for node in expected]
    assert tree.log_probs[0, 1 : num_nodes + 1].tolist() == [node.log_prob for node in expected]


@settings(max_examples=150, deadline=None)
@cases
def test_scores_equal_the_heap_of_the_paper(
    random_log_probs, marginals_of, seed, draft_depth, topk, node_budget, kind
):
    log_probs = random_log_probs(seed, draft_depth, topk, kind)
    marginals = marginals_of(log_probs, seed)
    scores = rescore(ranks_of(build(marginals, node_budget), marginals), log_probs)
    heap = sorted(node.log_prob for node in build_draft_tree(log_probs, node_budget))
    assert len(scores) == len(heap)
    np.testing.assert_allclose(scores, heap, atol=1e-4, rtol=0)


@settings(max_examples=60, deadline=None)
@cases
def test_is_prefix_closed_and_padded(
    random_log_probs, marginals_of, seed, draft_depth, topk, node_budget, kind
):
    log_probs = random_log_probs(seed, draft_depth, topk, kind)
    marginals = marginals_of(log_probs, seed)
    tree = build(marginals, node_budget)
    paths = ranks_of(tree, marginals)
    assert len(set(paths)) == len(paths)
    for path in paths:
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in paths
    columns = torch.arange(node_budget + 1)
    assert torch.equal(tree.is_node[0], columns <= len(paths)), "padding stands behind all nodes"
    assert (tree.parents[0] < columns).all()
    padding = ~tree.is_node[0]
    assert (tree.tokens[0, padding] == 0).all()
    assert (tree.parents[0, padding] == -1).all()
    assert (tree.depths[0, padding] == 0).all()
    assert [tree.tokens[0, 0], tree.parents[0, 0], tree.depths[0, 0], tree.log_probs[0, 0]] == [7, -1, 0, 0.0]
    scores = tree.log_probs[0, : len(paths) + 1].tolist()
    assert all(better >= worse for better, worse in pairwise(scores))


@settings(max_examples=40, deadline=None)
@cases
def test_smaller_budgets_are_prefixes(
    random_log_probs, marginals_of, seed, draft_depth, topk, node_budget, kind
):
    marginals = marginals_of(random_log_probs(seed, draft_depth, topk, kind), seed)
    tree = build(marginals, node_budget)
    for smaller in {1, node_budget // 3 + 1, max(1, node_budget - 1)}:
        prefix, direct = tree.prefix(smaller), build(marginals, smaller)
        assert all(torch.equal(getattr(prefix, name), getattr(direct, name)) for name in FIELDS)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), bs=st.integers(2, 7), topk=st.integers(1, 9), budget=st.integers(1, 50)
)
def test_requests_of_a_batch_do_not_touch_each_other(batch_of, seed, bs, topk, budget):
    marginals = batch_of(seed, bs, 5, topk)
    roots = torch.arange(bs) * 3
    tree = build_draft_trees(marginals, roots, budget)
    for b in range(bs):
        row = DraftMarginals(marginals.tokens[b : b + 1], marginals.log_probs[b : b + 1])
        alone = build_draft_trees(row, roots[b : b + 1], budget)
        assert all(torch.equal(getattr(tree, name)[b : b + 1], getattr(alone, name)) for name in FIELDS)


@pytest.mark.parametrize(
    ("draft_depth", "topk", "node_budget"), [(31, 64, 1024), (15, 1024, 1024), (31, 2, 127)]
)
def test_large_trees(random_log_probs, marginals_of, draft_depth, topk, node_budget):
    log_probs = random_log_probs(3, draft_depth, topk, "ties")
    tree = build(marginals_of(log_probs), node_budget)
    expected = build_level_tree(log_probs, node_budget)
    assert tree.parents[0, 1:].tolist() == [node.parent for node in expected]
    assert tree.log_probs[0, 1:].tolist() == [node.log_prob for node in expected]


def test_a_tree_of_nothing_is_the_root_alone(marginals_of):
    tree = build(marginals_of(np.full((4, 3), -np.inf, dtype=np.float32)), 6)
    assert tree.num_nodes.tolist() == [0]
    assert tree.tokens.tolist() == [[7, 0, 0, 0, 0, 0, 0]]


def test_rounding_above_zero_counts_as_zero(marginals_of):
    tree = build(marginals_of(np.array([[1e-7, -1.0]] * 3, dtype=np.float32)), 5)
    assert tree.log_probs.tolist() == [[0.0, 0.0, 0.0, 0.0, -1.0, -1.0]]
    assert tree.depths.tolist() == [[0, 1, 2, 3, 1, 2]]


def test_token_zero_is_a_node():
    marginals = DraftMarginals(torch.zeros(1, 3, 1, dtype=torch.int64), torch.full((1, 3, 1), -0.5))
    assert build(marginals, 3).num_nodes.tolist() == [3]


def test_reference_node_knows_its_depth():
    assert ReferenceNode((0, 2), 1, -1.0).depth == 2


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), draft_depth=st.integers(1, 16), kind=st.sampled_from(KINDS))
def test_chain_is_the_tree_of_each_positions_best_token(
    random_log_probs, marginals_of, seed, draft_depth, kind
):
    marginals = marginals_of(random_log_probs(seed, draft_depth, 4, kind), seed)
    best = DraftMarginals(marginals.tokens[:, :, :1], marginals.log_probs[:, :, :1])
    chain, tree = build_chain(marginals, torch.tensor([7])), build(best, draft_depth)
    for name in FIELDS[:3]:
        assert torch.equal(getattr(chain, name), getattr(tree, name))
    torch.testing.assert_close(chain.log_probs, tree.log_probs, atol=1e-4, rtol=0)


def test_refuses_what_it_cannot_build(marginals_of):
    marginals = marginals_of(np.zeros((2, 2), dtype=np.float32))
    for node_budget in (0, -1, True, 2.0):
        with pytest.raises(ConfigError, match="node_budget"):
            build_draft_trees(marginals, torch.zeros(1), node_budget)
    with pytest.raises(ConfigError, match="root_tokens"):
        build_draft_trees(marginals, torch.zeros(2), 4)
    with pytest.raises(ConfigError, match="marginals"):
        build_draft_trees(DraftMarginals(marginals.tokens[0], marginals.log_probs[0]), torch.zeros(1), 4)


@pytest.mark.gpu
def test_cuda_builds_the_same_trees_inside_a_graph(batch_of):
    marginals = batch_of(11, 6, 15, 64)
    on_gpu = DraftMarginals(marginals.tokens.cuda(), marginals.log_probs.cuda())
    roots = torch.arange(6)
    for node_budget in (1, 16, 63, 300):
        expected = build_draft_trees(marginals, roots, node_budget)
        roots_gpu = roots.cuda()
        build_draft_trees(on_gpu, roots_gpu, node_budget)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tree = build_draft_trees(on_gpu, roots_gpu, node_budget)
        graph.replay()
        assert all(torch.equal(getattr(tree, name).cpu(), getattr(expected, name)) for name in FIELDS)
