"""From hidden states to trees: on one rank, in the captured buffers, and spread over 2 and 4 ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).parent))
from gloo_ranks import GlooGroup, run_ranks

from ddtree.config import Mode, PluginConfig
from ddtree.sglang_plugin.draft_sampler import (
    DraftedTrees,
    TreeDraftSampler,
    VocabularyShard,
    check_equal_trees,
    gather_marginals,
)
from ddtree.tree import DraftMarginals, build_draft_trees, retrieve_links, tree_layout
from ddtree.tree.build_reference import build_draft_tree

VOCAB, HIDDEN, BLOCK = 96, 12, 6
ZEROS = torch.zeros(4, dtype=torch.int64)


def make_head(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return weight.to(dtype)


def make_hidden(bs: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The drafter's hidden states [bs * BLOCK, HIDDEN] and the block's tokens [bs * BLOCK]."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(bs * BLOCK, HIDDEN, generator=generator)
    return hidden, torch.randint(0, VOCAB, (bs * BLOCK,), generator=generator)


def make_sampler(config: PluginConfig, weight: torch.Tensor | None = None) -> TreeDraftSampler:
    head = VocabularyShard(make_head() if weight is None else weight, 0, None)
    return TreeDraftSampler(head, config, BLOCK)


@pytest.mark.parametrize("node_budget", [1, 3, 5, 13, 31])
def test_trees_are_those_of_the_marginals(node_budget: int) -> None:
    config = PluginConfig(node_budget=node_budget)
    hidden, tokens = make_hidden(3)
    prefix_lens = torch.tensor([4, 9, 200])
    trees = make_sampler(config).draft(hidden, tokens, prefix_lens)
    assert torch.equal(trees.positions, prefix_lens.unsqueeze(1) + trees.tree.depths)
    width = max(BLOCK, node_budget + 1)
    assert trees.tree.tokens.shape == (3, width)
    logits = hidden.view(3, BLOCK, HIDDEN)[:, 1:] @ make_head().T
    marginals = DraftMarginals.from_logits(logits, config.num_candidates)
    expected = build_draft_trees(marginals, tokens.view(3, BLOCK)[:, 0], node_budget)
    layout, links = tree_layout(expected, torch.zeros(3).long()), retrieve_links(expected)
    used = node_budget + 1
    assert torch.equal(trees.tree.tokens[:, :used], expected.tokens)
    assert torch.equal(trees.tree.parents[:, :used], expected.parents)
    assert torch.equal(trees.ancestor_mask[:, :used, :used], layout.ancestor_mask)
    assert torch.equal(trees.links.next_token[:, :used], links.next_token)
    assert torch.equal(trees.links.next_sibling[:, :used], links.next_sibling)
    for row in range(3):
        heap = build_draft_tree(marginals.log_probs[row].numpy(), node_budget)
        scores = trees.tree.log_probs[row, 1:used].tolist()
        assert sorted(scores) == pytest.approx(sorted(node.log_prob for node in heap), abs=1e-4)


def test_padding_has_no_links_and_sees_itself() -> None:
    trees = make_sampler(PluginConfig(node_budget=2)).draft(*make_hidden(2), ZEROS[:2])
    padding = slice(3, BLOCK)
    assert (trees.tree.parents[:, padding] == -1).all()
    assert (trees.links.next_token[:, padding] == -1).all()
    assert (trees.links.next_sibling[:, padding] == -1).all()
    assert torch.equal(
        trees.ancestor_mask[:, padding, padding], torch.eye(3, dtype=torch.bool).expand(2, 3, 3)
    )
    assert not trees.ancestor_mask[:, :3, padding].any()
    assert not trees.ancestor_mask[:, padding, :3].any()


class Products(TorchDispatchMode):
    """Notes the matrix products that are made, by operator and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.made.append((func.overloadpacket.__name__, tuple(args[0].shape)))
        return made


def test_the_heads_weights_are_read_once_for_all_requests() -> None:
    hidden, tokens = make_hidden(3)
    sampler = make_sampler(PluginConfig(node_budget=8))
    with torch.no_grad(), Products() as products:
        sampler.draft(hidden, tokens, torch.tensor([4, 5, 6]))
    rows = 3 * (sampler.block_size - 1)
    assert products.made == [("mm", (rows, hidden.shape[-1]))]


def test_a_chain_is_the_best_token_of_each_position() -> None:
    hidden, tokens = make_hidden(2)
    trees = make_sampler(PluginConfig(mode=Mode.CHAIN, node_budget=40)).draft(hidden, tokens, ZEROS[:2])
    best = (hidden.view(2, BLOCK, HIDDEN)[:, 1:] @ make_head().T).argmax(-1)
    assert torch.equal(trees.tree.tokens[:, 1:], best)
    assert torch.equal(trees.tree.parents, torch.arange(-1, BLOCK - 1).expand(2, -1))


def test_a_capture_leaves_the_trees_in_its_buffers() -> None:
    sampler, seen = make_sampler(PluginConfig(node_budget=9)), []
    sampler.prepare_capture(max_bs=4)
    sampler.then(lambda trees, prefix_lens: seen.append((trees.tree.tokens.clone(), prefix_lens)))
    hidden, tokens = make_hidden(3)
    prefix_lens = torch.tensor([1, 2, 3])
    forward_batch = SimpleNamespace(seq_lens=torch.tensor([1, 2, 3, 7]), input_ids=tokens)
    sampler.capture(None, SimpleNamespace(hidden_states=hidden), forward_batch, 3 * BLOCK)
    kept, fresh = sampler.captured(3), sampler.draft(hidden, tokens, prefix_lens)
    assert all(torch.equal(*pair) for pair in zip(kept._tensors(), fresh._tensors(), strict=True))
    [(tokens_seen, lens_seen)] = seen
    assert torch.equal(tokens_seen, fresh.tree.tokens)
    assert torch.equal(lens_seen, prefix_lens)


@pytest.mark.parametrize(
    ("head", "complaint"),
    [
        (None, "lm_head.weight: none"),
        (SimpleNamespace(weight=torch.zeros(4, 2, dtype=torch.int8)), "torch.int8"),
        (
            SimpleNamespace(
                weight=torch.zeros(4, 2),
                shard_indices=SimpleNamespace(
                    num_added_elements=3, num_org_elements=4, org_vocab_start_index=0
                ),
            ),
            "3 tokens added",
        ),
    ],
)
def test_heads_that_cannot_be_used_are_refused(head: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        VocabularyShard.of(head, None)
    assert "DFLASH" in str(error.value)


def test_a_sharded_head_without_its_ranges_is_refused() -> None:
    with pytest.raises(ValueError, match="which part of the vocabulary"):
        VocabularyShard.of(SimpleNamespace(weight=torch.zeros(4, 2)), SimpleNamespace(world_size=2))


def draft_on_rank(
    group: GlooGroup, weights: list[torch.Tensor], config: PluginConfig
) -> list[list[DraftedTrees]]:
    """The trees of one rank for each head, whose shard ends with padding that is no token."""
    count = VOCAB // group.world_size
    start = group.rank_in_group * count
    indices = SimpleNamespace(num_added_elements=0, num_org_elements=count, org_vocab_start_index=start)
    results = []
    for weight in weights:
        padding = torch.full((3, HIDDEN), 9.0, dtype=weight.dtype)
        shard = torch.cat((weight[start : start + count], padding))
        head = VocabularyShard.of(SimpleNamespace(weight=shard, shard_indices=indices), group)
        sampler = TreeDraftSampler(head, config, BLOCK)
        results.append([sampler.draft(*make_hidden(bs=4, seed=seed), ZEROS[:4]) for seed in range(20)])
    check_equal_trees(results[0][0], group)
    with pytest.raises(RuntimeError, match="different draft trees"):
        check_equal_trees(results[0][group.rank_in_group], group)
    return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_build_the_tree_of_one_rank(world_size: int, tmp_path: Path) -> None:
    plain, tied = make_head(), make_head(dtype=torch.bfloat16)[: VOCAB // 8].repeat(8, 1)
    plain[-1] = 50 * torch.sign(make_hidden(4, seed=0)[0][1])  # the last shard's last token, best somewhere
    config = PluginConfig(node_budget=19, candidate_topk=7)
    ranks = run_ranks(world_size, tmp_path, draft_on_rank, [plain, tied], config)
    for index, weight in enumerate((plain, tied)):
        alone = make_sampler(config, weight)
        for seed in range(20):
            first = ranks[0][index][seed]
            for other in ranks[1:]:
                pairs = zip(first._tensors(), other[index][seed]._tensors(), strict=True)
                assert all(torch.equal(*pair) for pair in pairs)
            expected = alone.draft(*make_hidden(bs=4, seed=seed), ZEROS[:4])
            torch.testing.assert_close(first.tree.log_probs, expected.tree.log_probs, atol=1e-5, rtol=0)
            if weight is plain:
                assert torch.equal(first.tree.tokens, expected.tree.tokens)
    assert int(ranks[0][0][0].tree.tokens[0, 1]) == VOCAB - 1


def gather_on_rank(group: GlooGroup, logits: torch.Tensor) -> DraftMarginals:
    count = logits.shape[-1] // group.world_size
    start = group.rank_in_group * count
    return gather_marginals(logits[..., start : start + count], 5, start, group)


def test_gathered_marginals_are_those_of_all_logits(tmp_path: Path) -> None:
    logits = 9 * torch.randn(4, 3, 32, generator=torch.Generator().manual_seed(5))
    logits[0, :, ::3] = torch.nan  # counts as no token
    logits[1, :, :16] = float("-inf")  # one rank has nothing
    logits[2, :, 16:] = torch.nan
    logits[3, 0] = 2.0  # all alike: the lowest ids
    expected = DraftMarginals.from_logits(logits, 5)
    for made in run_ranks(2, tmp_path, gather_on_rank, logits):
        assert torch.equal(made.tokens, expected.tokens)
        torch.testing.assert_close(made.log_probs, expected.log_probs, atol=1e-5, rtol=0)
