import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.tree import (
    DraftTree,
    VerifyResult,
    ancestor_mask,
    build_chain,
    build_draft_trees,
    compaction_indices,
    draw,
    follow,
    tree_layout,
    verify_greedy,
    verify_sampled,
)
from ddtree.tree.build_reference import reference_walk
from ddtree.tree.verify import follow_torch, follow_triton


def check_walk(tree: DraftTree, target_tokens: torch.Tensor, result: VerifyResult, draft_depth: int) -> None:
    for b in range(tree.tokens.shape[0]):
        path, accept_tokens = reference_walk(
            tree.tokens[b].numpy(), tree.parents[b].numpy(), target_tokens[b].numpy()
        )
        filler = [-1] * (draft_depth + 1 - len(path))
        assert result.accept_indices[b].tolist() == path + filler
        assert result.accept_tokens[b].tolist() == accept_tokens + filler
        assert result.bonus_tokens[b] == accept_tokens[-1]
        assert result.num_correct_drafts[b] == len(path) - 1


def agreeing_targets(tree: DraftTree, seed: int) -> torch.Tensor:
    """Target choices [bs, W] that often are a child's token, so that walks go deep."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 6, tree.tokens.shape, generator=generator)
    for column in torch.randperm(tree.num_verify_tokens - 1, generator=generator).tolist():
        for b in range(tree.tokens.shape[0]):
            if tree.parents[b, column + 1] >= 0:
                targets[b, tree.parents[b, column + 1]] = tree.tokens[b, column + 1]
    return targets


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    bs=st.integers(1, 6),
    draft_depth=st.integers(1, 10),
    topk=st.integers(1, 6),
    node_budget=st.integers(1, 60),
    agrees=st.booleans(),
)
def test_follow_equals_the_reference_walk(batch_of, seed, bs, draft_depth, topk, node_budget, agrees):
    tree = build_draft_trees(batch_of(seed, bs, draft_depth, topk), torch.arange(bs), node_budget)
    generator = torch.Generator().manual_seed(seed)
    random_targets = torch.randint(0, topk + 2, tree.tokens.shape, generator=generator)
    targets = agreeing_targets(tree, seed) if agrees else random_targets
    check_walk(tree, targets, follow(tree, ancestor_mask(tree), targets, draft_depth), draft_depth)


def check_triton_walks(batch_of, shapes: list[tuple[int, int, int, int]], device: str) -> None:
    """The walk kernel against the torch walk, over trees of any kind and their prefixes."""
    for seed, (bs, draft_depth, topk, node_budget) in enumerate(shapes):
        full = build_draft_trees(batch_of(seed, bs, draft_depth, topk), torch.arange(bs), node_budget)
        for tree in (full, full.prefix((node_budget + 1) // 2)):
            targets = agreeing_targets(tree, seed)
            targets[-1] = -1
            expected = follow_torch(tree, ancestor_mask(tree), targets, draft_depth)
            parts = (tree.tokens, tree.parents, tree.depths, tree.log_probs)
            moved = DraftTree(*(part.to(device) for part in parts))
            result = follow_triton(moved, targets.to(device), draft_depth)
            for ours, theirs in zip(result, expected, strict=True):
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours.cpu(), theirs)


WALKS = [(4, 5, 4, 20), (2, 10, 3, 60), (3, 1, 1, 1), (2, 3, 40, 130)]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the interpreter's own process")
def test_interpreted_walk_equals_torch(batch_of):
    check_triton_walks(batch_of, WALKS, "cpu")


@pytest.mark.gpu
def test_compiled_walk_equals_torch(batch_of):
    check_triton_walks(batch_of, [*WALKS, (8, 15, 64, 63), (8, 31, 20, 511)], "cuda")


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_agreeing=st.integers(0, 9))
def test_follow_walks_a_chain_to_its_first_miss(batch_of, seed, num_agreeing):
    chain = build_chain(batch_of(seed, 1, 8, 3), torch.tensor([1]))
    targets = torch.cat((chain.tokens[:, 1:], torch.zeros(1, 1, dtype=torch.int64)), dim=1)
    targets[:, num_agreeing:] = 99
    result = follow(chain, ancestor_mask(chain), targets, 8)
    check_walk(chain, targets, result, 8)
    assert result.num_correct_drafts.tolist() == [min(num_agreeing, int(chain.num_nodes))]


def test_padding_with_token_zero_is_never_accepted():
    inf = float("-inf")
    tree = DraftTree(
        tokens=torch.tensor([[3, 4, 0]]),
        parents=torch.tensor([[-1, 0, -1]]),
        depths=torch.tensor([[0, 1, 0]]),
        log_probs=torch.tensor([[0.0, -1.0, inf]]),
    )
    result = follow(tree, ancestor_mask(tree), torch.tensor([[0, 0, 0]]), 2)
    assert result.accept_indices.tolist() == [[0, -1, -1]]
    assert result.accept_tokens.tolist() == [[0, -1, -1]]
    assert (result.bonus_tokens.tolist(), result.num_correct_drafts.tolist()) == ([0], [0])


def test_greedy_follows_the_argmax_and_the_lowest_id_of_a_tie(batch_of):
    tree = build_draft_trees(batch_of(4, 3, 4, 3), torch.arange(3), 12)
    targets = agreeing_targets(tree, 4)
    logits = torch.nn.functional.one_hot(targets, 12).float()
    logits[..., 10:] = 1.0
    check_walk(tree, targets, verify_greedy(tree, ancestor_mask(tree), logits, 4), 4)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), bs=st.integers(1, 4))
def test_sampled_follows_a_sample_of_every_column(batch_of, seed, bs):
    """The walk that draws along the path only takes the path of the samples of all columns."""
    tree = build_draft_trees(batch_of(seed, bs, 5, 4), torch.arange(bs), 20)
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.log_softmax(torch.randn(bs, 21, 6, generator=generator) * 2, -1)
    seeds = torch.randint(-(2**62), 2**62, (bs,), generator=generator)
    layout = tree_layout(tree, torch.arange(bs) * 50)
    targets = draw(log_probs, seeds[:, None], layout.positions + 1)
    result = verify_sampled(tree, layout.ancestor_mask, log_probs, seeds, layout.positions, 5)
    check_walk(tree, targets, result, 5)


def test_trees_of_any_shape_commit_the_text_of_plain_sampling(batch_of):
    """Draws depend on the prefix and the position alone, so plain, chain and tree agree."""
    table = torch.log_softmax(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)) * 2, -1)

    def decode(node_budget: int, num_tokens: int) -> list[int]:
        text, round_ct = [1], 0
        while len(text) <= num_tokens:
            marginals = batch_of(round_ct, 1, 4, 4)
            root = torch.tensor([text[-1]])
            tree = build_draft_trees(marginals, root, node_budget)
            layout = tree_layout(tree, torch.tensor([len(text) - 1]))
            result = verify_sampled(
                tree, layout.ancestor_mask, table[tree.tokens], torch.tensor([8]), layout.positions, 4
            )
            text += [token for token in result.accept_tokens[0].tolist() if token >= 0]
            round_ct += 1
        assert round_ct <= num_tokens
        return text[: num_tokens + 1]

    plain = [1]
    for position in range(1, 201):
        plain.append(int(draw(table[plain[-1]], torch.tensor(8), torch.tensor(position))))
    assert decode(1, 200) == decode(7, 200) == decode(40, 200) == plain


def test_compaction_moves_the_path_to_the_front():
    result = VerifyResult(
        accept_indices=torch.tensor([[0, 2, 5, -1], [0, -1, -1, -1]]),
        accept_tokens=torch.tensor([[7, 8, 9, -1], [3, -1, -1, -1]]),
        bonus_tokens=torch.tensor([9, 3]),
        num_correct_drafts=torch.tensor([2, 0]),
    )
    src, dst = compaction_indices(result, torch.tensor([10, 100]))
    assert src.tolist() == [[10, 12, 15, 13], [100, 101, 102, 103]]
    assert dst.tolist() == [[10, 11, 12, 13], [100, 101, 102, 103]]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_compacted_cache_holds_the_path_in_order(batch_of, seed):
    tree = build_draft_trees(batch_of(seed, 3, 6, 4), torch.arange(3), 25)
    result = follow(tree, ancestor_mask(tree), agreeing_targets(tree, seed), 6)
    prefix_lens = torch.tensor([0, 3, 11])
    src, dst = compaction_indices(result, prefix_lens)
    for b, prefix_len in enumerate(prefix_lens.tolist()):
        cache = torch.arange(64)
        cache[dst[b]] = cache[src[b]]
        num_kept = int(result.num_correct_drafts[b]) + 1
        kept = cache[prefix_len : prefix_len + num_kept] - prefix_len
        assert kept.tolist() == result.accept_indices[b, :num_kept].tolist()
        assert torch.equal(cache[:prefix_len], torch.arange(prefix_len))


@pytest.mark.gpu
def test_cuda_verify_neither_waits_nor_differs(batch_of):
    tree = build_draft_trees(batch_of(9, 4, 6, 5), torch.arange(4), 31)
    log_probs = torch.log_softmax(torch.randn(4, 32, 50, generator=torch.Generator().manual_seed(3)), -1)
    layout, seeds = tree_layout(tree, torch.arange(4)), torch.arange(4)
    expected = verify_sampled(tree, layout.ancestor_mask, log_probs, seeds, layout.positions, 6)
    on_gpu = DraftTree(*(getattr(tree, name).cuda() for name in ("tokens", "parents", "depths", "log_probs")))
    arguments = [t.cuda() for t in (layout.ancestor_mask, log_probs, seeds, layout.positions)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = verify_sampled(on_gpu, *arguments, 6)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(result, expected, strict=True))
