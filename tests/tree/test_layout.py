import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.tree import ancestor_mask, build_chain, build_draft_trees, retrieve_links, tree_layout
from ddtree.tree.build_reference import reference_ancestor_mask, reference_links

batches = given(
    seed=st.integers(0, 2**32 - 1),
    bs=st.integers(1, 6),
    draft_depth=st.integers(1, 12),
    topk=st.integers(1, 12),
    node_budget=st.integers(1, 70),
)


@settings(max_examples=60, deadline=None)
@batches
def test_mask_equals_the_reference(batch_of, seed, bs, draft_depth, topk, node_budget):
    tree = build_draft_trees(batch_of(seed, bs, draft_depth, topk), torch.arange(bs), node_budget)
    mask = ancestor_mask(tree)
    for b in range(bs):
        assert (mask[b].numpy() == reference_ancestor_mask(tree.parents[b].numpy())).all()


@settings(max_examples=60, deadline=None)
@batches
def test_links_equal_the_reference(batch_of, seed, bs, draft_depth, topk, node_budget):
    tree = build_draft_trees(batch_of(seed, bs, draft_depth, topk), torch.arange(bs), node_budget)
    links = retrieve_links(tree)
    for b in range(bs):
        next_token, next_sibling = reference_links(tree.parents[b].numpy())
        assert (links.next_token[b].numpy() == next_token).all()
        assert (links.next_sibling[b].numpy() == next_sibling).all()


def test_a_long_chain_sees_all_of_itself(batch_of):
    tree = build_chain(batch_of(0, 1, 31, 3), torch.tensor([4]))
    assert torch.equal(ancestor_mask(tree)[0], torch.ones(32, 32, dtype=torch.bool).tril())


def test_positions_follow_depth_and_padding_stands_at_the_root(batch_of):
    tree = build_draft_trees(batch_of(5, 6, 3, 2), torch.arange(6), 30)
    layout = tree_layout(tree, torch.arange(6) * 100)
    assert torch.equal(layout.positions - torch.arange(6)[:, None] * 100, tree.depths)
    assert torch.equal(layout.ancestor_mask, ancestor_mask(tree))
    padding = ~tree.is_node
    assert padding.any()
    assert (layout.ancestor_mask[padding].sum(-1) == 1).all()
    assert layout.ancestor_mask.diagonal(dim1=1, dim2=2).all()
    seen_by_others = (layout.ancestor_mask & ~torch.eye(31, dtype=torch.bool)).any(1)
    assert not seen_by_others[padding].any()
    links = retrieve_links(tree)
    assert (links.next_token[padding] == -1).all()
    assert (links.next_sibling[padding] == -1).all()
