"""Known texts, where right tokens are planted, and the rounds that follow from them."""

import numpy as np
import pytest
import torch

import planted_acceptance
from ddtree.tree import build_draft_trees, tree_layout
from ddtree.tree.verify import follow
from planted_acceptance import NUM_RANKS, SURENESS, PlantedDrafts, Simulation, Walk, draws, rank_rates

DEPTH = 7
WALK = Walk(vocab_size=900, num_walked=880, seed=3)


@pytest.fixture(scope="module")
def drafts():
    return PlantedDrafts(WALK, DEPTH)


def test_a_walk_is_one_cycle_that_leaves_reserved_ids_alone(tmp_path):
    following = WALK.table()
    token, seen = 0, []
    for _ in range(WALK.num_walked):
        seen.append(token)
        token = int(following[token])
    assert token == 0
    assert sorted(seen) == list(range(WALK.num_walked))
    assert following[WALK.num_walked :].tolist() == list(range(WALK.num_walked, WALK.vocab_size))
    WALK.write(tmp_path)
    assert Walk.read(tmp_path) == WALK


def test_draws_are_even_and_differ_by_depth_and_seed():
    tokens = np.arange(20_000)
    first = draws(tokens, 1, 0)
    assert first.min() >= 0
    assert first.max() < 1
    counts, _ = np.histogram(first, bins=10, range=(0, 1))
    assert abs(counts - 2000).max() < 200
    for other in (draws(tokens, 2, 0), draws(tokens, 1, 1)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.03
    assert np.array_equal(first, draws(tokens, 1, 0))


def test_the_right_token_stands_at_its_rank_and_nowhere_else(drafts):
    roots = torch.tensor([5, 400, 879])
    right = drafts.walks[:, roots].T.long()
    tokens = torch.randint(0, 900, (3, DEPTH, 12), generator=torch.Generator().manual_seed(0))
    tokens[:, :, 7] = right  # a drafter that has found it by itself
    made = drafts.marginals(tokens, roots)
    ranks = drafts.ranks[:, roots].T.long()
    for row in range(3):
        for depth in range(DEPTH):
            places = (made.tokens[row, depth] == right[row, depth]).nonzero().flatten().tolist()
            assert places == [int(ranks[row, depth])] * (int(ranks[row, depth]) < 12)
    kept = (made.tokens == tokens) | (made.tokens == right.unsqueeze(-1)) | (made.tokens == drafts.filler)
    assert kept.all()
    assert (made.log_probs.diff(dim=-1) <= 0).all()
    assert made.log_probs.shape == tokens.shape
    assert made.tokens.is_contiguous()  # kernels take it for granted
    assert made.log_probs.is_contiguous()
    assert torch.equal(drafts.chain(tokens[:, :, 0], roots), made.tokens[:, :, 0])


def test_ranks_are_as_often_as_the_rates_say():
    drafts = PlantedDrafts(Walk(40_000, 40_000, 1), DEPTH)
    shares = np.array([share for share, _ in SURENESS])
    expected = shares @ rank_rates()
    for rank in (0, 1, 2, 5):
        found = (drafts.ranks == rank).float().mean().item()
        assert found == pytest.approx(expected[rank], rel=0.05)
    assert (drafts.ranks == NUM_RANKS).float().mean().item() == pytest.approx(1 - expected.sum(), rel=0.05)
    later = 1 - np.array([rate for _, rate in SURENESS])
    assert rank_rates().sum(1) == pytest.approx(1 - later * (1 - planted_acceptance.FOUND_LATER))


def accept_length_of_a_tree(drafts, root, node_budget, candidate_topk):
    """By the tree that a sampler would build, walked by the target's own choices."""
    tokens = torch.full((1, DEPTH, candidate_topk), drafts.filler)
    roots = torch.tensor([root])
    tree = build_draft_trees(drafts.marginals(tokens, roots), roots, node_budget)
    choices = torch.from_numpy(WALK.table())[tree.tokens]
    path = follow(tree, tree_layout(tree, torch.zeros(1)).ancestor_mask, choices, DEPTH)
    return int(path.num_correct_drafts[0]) + 1


@pytest.mark.parametrize("node_budget", [1, 6, 15, 40])
def test_simulated_trees_are_those_that_are_walked(drafts, node_budget):
    candidates = min(node_budget, NUM_RANKS)
    simulation = Simulation(WALK, drafts, node_budget, candidates)
    for root in range(0, 880, 11):
        expected = accept_length_of_a_tree(drafts, root, node_budget, candidates)
        assert simulation.accept_length(root) == expected


def test_rounds_add_up_to_the_text(drafts):
    for budget in (None, 15):
        simulation = Simulation(WALK, drafts, budget, 15)
        text = simulation.text(7, 50)
        assert text[0] == WALK.table()[7]
        done, rounds = 1, 0
        while done < 50:
            done, rounds = done + simulation.accept_length(text[done - 1]), rounds + 1
        assert simulation.rounds([1, 2, 7], 50) == rounds
        assert simulation.rounds([7], 1) == 0


def test_trees_gain_over_the_chain_about_as_published():
    walk = Walk(20_000, 20_000, 5)
    drafts = PlantedDrafts(walk, 15)
    lengths = {}
    for budget in (None, 15, 31, 63):
        simulation = Simulation(walk, drafts, budget, min(budget or 1, NUM_RANKS))
        lengths[budget] = np.mean([simulation.accept_length(root) for root in range(200)])
    assert 3.9 < lengths[None] < 4.9
    assert 1.03 < lengths[15] / lengths[None] < 1.2
    assert 1.15 < lengths[31] / lengths[None] < 1.35
    assert 1.25 < lengths[63] / lengths[None] < 1.5
