"""What crosses from the device once a round is what the round did, to the bit."""

import dataclasses
import math
import struct

import pytest
import torch

from ddtree.engine.decode_round import Built, Round, root_only
from ddtree.engine.logprobs import pack_logprobs
from ddtree.engine.readout import pack, unpack
from ddtree.tree import DraftMarginals, DraftTree, build_draft_trees, tree_layout
from ddtree.tree.build_torch import build_chain
from ddtree.tree.verify import VerifyResult

BLOCK_SIZE, VOCAB_SIZE = 6, 40
TOP1 = (4, 0, 39, 7, 0)


def marginals(topk):
    """Marginals whose most likely tokens are TOP1."""
    logits = torch.randn(1, BLOCK_SIZE - 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(11))
    logits[0, torch.arange(BLOCK_SIZE - 1), torch.tensor(TOP1)] += 6.0
    return DraftMarginals.from_logits(logits, topk)


def finished(tree, top1, indices, tokens):
    """A round whose accept path has these columns and committed tokens, padded as verify pads it."""
    row = torch.full((2, 1, BLOCK_SIZE if top1 is not None else 1), -1)
    row[0, 0, : len(indices)] = torch.tensor(indices)
    row[1, 0, : len(tokens)] = torch.tensor(tokens)
    result = VerifyResult(row[0], row[1], torch.tensor(tokens[-1:]), torch.tensor([len(tokens) - 1]))
    top1_tokens = torch.tensor(top1) if top1 is not None else None
    return Round(Built(tree, tree_layout(tree, torch.tensor([9])), top1_tokens), result)


def built_tree(node_budget):
    return build_draft_trees(marginals(node_budget), torch.tensor([3]), node_budget)


def forecast(tree, budget):
    """Expected correct drafts of the first `budget` nodes, the drafter's probabilities being right."""
    return sum(math.exp(score) for score in tree.log_probs[0, 1 : budget + 1].tolist())


@pytest.mark.parametrize(
    ("indices", "tokens"), [((0,), (0,)), ((0, 1), (4, 0)), ((0, 1, 2, 3, 4, 5), (4, 0, 39, 7, 0, 1))]
)
@pytest.mark.parametrize("budgets", [(), (8, 16), (1, 8, 16, 40)])
def test_a_tree_round_comes_across(indices, tokens, budgets):
    tree = built_tree(16)
    vector = pack(finished(tree, TOP1, indices, tokens), budgets)
    assert vector.dtype is torch.int64
    readout = unpack(vector, BLOCK_SIZE, has_draft=True)
    assert (readout.accept_tokens, readout.accept_indices) == (tokens, indices)
    assert readout.num_nodes == 16
    assert readout.top1_tokens == TOP1
    # A budget larger than the tree is forecast as the tree.
    assert readout.surrogate == pytest.approx([forecast(tree, min(b, 16)) for b in budgets], rel=1e-6)


@pytest.mark.parametrize("budgets", [(), (8, 16)])
@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("num_rows", [3, BLOCK_SIZE])
def test_log_probabilities_come_across_with_the_round(budgets, top, num_rows):
    """Rows of the path alone, as a CPU packs them, and of a whole block, as CUDA does."""
    indices, tokens = (0, 1, 2), (4, 0, 12)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    chosen = torch.tensor((*tokens, 9, 9, 9)[:num_rows])
    packed = pack_logprobs(logits, chosen, top)
    without = finished(built_tree(16), TOP1, indices, tokens)
    round_ = without._replace(logprobs=packed)
    vector = pack(round_, budgets)
    readout = unpack(vector, BLOCK_SIZE, has_draft=True, logprobs_shape=round_.logprobs_shape)
    expected = torch.log_softmax(logits, -1)
    assert [entry.token for entry in readout.logprobs] == list(tokens)
    for row, entry in zip(expected, readout.logprobs, strict=False):
        assert entry.log_prob == pytest.approx(float(row[entry.token]), abs=1e-6)
        assert [token for token, _ in entry.top] == row.topk(top).indices.tolist()
    plain = unpack(pack(without, budgets), BLOCK_SIZE, has_draft=True, logprobs_shape=without.logprobs_shape)
    assert dataclasses.replace(readout, logprobs=()) == plain
    assert plain.logprobs == ()


@pytest.mark.parametrize("budgets", [(), (8, 64)])
def test_a_chain_round_comes_across(budgets):
    tree = build_chain(marginals(1), torch.tensor([3]))
    readout = unpack(pack(finished(tree, TOP1, (0, 1, 2), (4, 0, 12)), budgets), BLOCK_SIZE, has_draft=True)
    assert (readout.accept_tokens, readout.accept_indices) == ((4, 0, 12), (0, 1, 2))
    assert (readout.num_nodes, readout.top1_tokens) == (BLOCK_SIZE - 1, TOP1)
    assert len(readout.surrogate) == len(budgets)


@pytest.mark.parametrize("block_size", [1, BLOCK_SIZE])
@pytest.mark.parametrize("budgets", [(), (8, 64)])
def test_a_plain_round_comes_across(block_size, budgets):
    """With a drafter in the pair the row is as wide as a block; without one it is one token wide."""
    round_ = finished(root_only(torch.tensor([3])), TOP1 if block_size > 1 else None, (0,), (17,))
    round_ = Round(round_.built._replace(top1_tokens=None), round_.result)
    readout = unpack(pack(round_, budgets), block_size, has_draft=False)
    assert (readout.accept_tokens, readout.accept_indices, readout.num_nodes) == ((17,), (0,), 0)
    assert (readout.top1_tokens, readout.surrogate) == ((), ())


def test_a_tree_with_padding_counts_its_nodes_only():
    tree = built_tree(16)
    scores = tree.log_probs.clone()
    scores[0, 5:] = float("-inf")
    padded = DraftTree(tree.tokens, tree.parents, tree.depths, scores)
    readout = unpack(pack(finished(padded, TOP1, (0,), (1,)), (4, 16)), BLOCK_SIZE, has_draft=True)
    assert readout.num_nodes == 4
    assert readout.surrogate[0] == readout.surrogate[1] == pytest.approx(forecast(padded, 4), rel=1e-6)


@pytest.mark.parametrize("score", [0.0, -1e-7, -0.3, -17.25, -80.0, -103.0])
def test_bits_of_the_forecast_survive(score):
    """From 1 down to the smallest float32 there is."""
    tree = built_tree(1)
    tree.log_probs[0, 1] = score
    readout = unpack(pack(finished(tree, TOP1, (0,), (1,)), (1,)), BLOCK_SIZE, has_draft=True)
    expected = float(torch.tensor(score).exp())
    assert struct.pack("d", readout.surrogate[0]) == struct.pack("d", expected)
