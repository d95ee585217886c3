"""The end of a greedy round in the target's graph commits what the round's own steps would, and only then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.config import PluginConfig
from ddtree.sglang_plugin.accept_path import AcceptPath, accept_path
from ddtree.sglang_plugin.draft_sampler import DraftedTrees, TreeDraftSampler, VocabularyShard
from ddtree.sglang_plugin.greedy_graph import GreedyGraph
from ddtree.tree.build_reference import reference_walk

VOCAB, HIDDEN, BLOCK, BUDGET, MAX_BS = 12, 6, 5, 11, 6
WIDTH = BUDGET + 1


class Round:
    """A greedy graph on the CPU, where a capture and a replay are one call, and what it commits."""

    def __init__(self, bs: int, seed: int, max_accept_tokens: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        head = VocabularyShard(random(VOCAB, HIDDEN), 0, None)
        self.sampler = TreeDraftSampler(head, PluginConfig(node_budget=BUDGET), BLOCK)
        self.sampler.prepare_capture(MAX_BS)
        self.prefix_lens = torch.randint(1, 90, (bs,), generator=generator)
        roots = torch.randint(0, VOCAB, (bs * BLOCK,), generator=generator)
        trees = self.sampler.draft(random(bs * BLOCK, HIDDEN), roots, self.prefix_lens)
        self.sampler.captured(bs).copy_(trees)
        self.trees: DraftedTrees = trees
        self.logits = random(bs * WIDTH, VOCAB)
        self.hidden = random(bs * WIDTH, 3)
        self.slots = torch.randperm(bs * WIDTH, generator=generator)
        self.committed: list[tuple[torch.Tensor, ...]] = []
        self.graph = GreedyGraph(self.sampler, self._commit, MAX_BS, max_accept_tokens, torch.device("cpu"))

    def _commit(self, window, draft_slots, prefix_lens, hidden, path) -> None:
        self.committed.append((window, draft_slots, prefix_lens, hidden, path))

    def run(self, bs: int) -> AcceptPath:
        self.graph(
            None,
            SimpleNamespace(next_token_logits=self.logits, hidden_states=self.hidden),
            SimpleNamespace(seq_lens=self.prefix_lens, out_cache_loc=self.slots),
            bs * WIDTH,
        )
        return self.committed[-1][-1]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, MAX_BS), st.integers(0, 999), st.integers(0, BLOCK))
def test_it_commits_what_the_steps_of_a_round_would(bs: int, seed: int, max_accept_tokens: int) -> None:
    case = Round(bs, seed, max_accept_tokens)
    case.graph.announce(bs)
    committed = case.run(bs)
    tokens = case.logits.argmax(-1).view(bs, WIDTH)
    expected = accept_path(case.trees, tokens, BLOCK, max_accept_tokens)
    taken = case.graph.take(bs)
    for path in (committed, taken.path):
        assert all(torch.equal(*pair) for pair in zip(path, expected, strict=True))
    assert torch.equal(taken.target_tokens, tokens)
    assert torch.equal(taken.new_seq_lens, case.prefix_lens + expected.lens)
    window, draft_slots, *_ = case.committed[-1]
    assert torch.equal(window, case.slots.view(bs, WIDTH))
    assert torch.equal(draft_slots.view(bs, BLOCK), window[:, :BLOCK])


@pytest.mark.parametrize("announced", [0, 2])
def test_requests_beyond_the_announced_ones_commit_nothing(announced: int) -> None:
    case = Round(4, seed=3)
    case.graph.announce(4)
    case.run(4)
    case.graph.announce(announced)
    path = case.run(4)
    assert (path.lens[announced:] == 0).all()
    assert (path.indices[announced:] == -1).all()
    assert (path.lens[:announced] > 0).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9999), st.integers(0, BLOCK))
def test_paths_are_the_reference_s_cut_at_the_most_tokens(seed: int, max_accept_tokens: int) -> None:
    case = Round(3, seed)
    tokens = torch.randint(0, VOCAB, (3, WIDTH), generator=torch.Generator().manual_seed(seed))
    tokens[:, 0] = case.trees.tree.tokens[:, 1]  # at least one correct draft
    path = accept_path(case.trees, tokens, BLOCK, max_accept_tokens)
    for row in range(3):
        columns, accept_tokens = reference_walk(
            case.trees.tree.tokens[row].numpy(), case.trees.tree.parents[row].numpy(), tokens[row].numpy()
        )
        most = max_accept_tokens or BLOCK
        columns, accept_tokens = columns[:most], accept_tokens[:most]
        length = len(accept_tokens)
        assert path.lens[row] == length
        assert path.indices[row].tolist() == columns + [-1] * (BLOCK - length)
        assert path.tokens[row, :length].tolist() == accept_tokens
        assert path.bonus_tokens[row] == accept_tokens[-1]


def test_the_first_call_commits_nothing_for_the_largest_batch() -> None:
    case = Round(2, seed=1)
    case.run(2)
    window, draft_slots, prefix_lens, hidden, path = case.committed[0]
    assert window.shape == (MAX_BS, WIDTH)
    assert draft_slots.shape == (MAX_BS * BLOCK,)
    assert hidden.shape == (MAX_BS * WIDTH, 3)
    assert prefix_lens.shape == (MAX_BS,)
    assert (path.indices == -1).all()
    assert (path.lens == 0).all()
    case.run(2)
    assert len(case.committed) == 3


def test_rows_are_those_of_flat_tensors() -> None:
    indices = torch.tensor([[0, 2, -1], [0, 1, 4]])
    path = AcceptPath(indices, indices, torch.tensor([2, 3]), torch.tensor([1, 1]))
    assert path.rows(10).tolist() == [[0, 2, -1], [10, 11, 14]]
