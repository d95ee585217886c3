"""The tree mask in SGLang's FULL_MASK layout, held against a cell-by-cell reading of what it means."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.sglang_plugin.verify_mask import mask_numel, write_verify_mask, write_verify_mask_torch
from ddtree.tree import DraftMarginals, build_draft_trees, tree_layout
from interpreter_kit import IS_INTERPRETER, run_interpreted


def random_trees(bs: int, node_budget: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parents [bs, W] and ancestor mask [bs, W, W] of random trees."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(bs, 5, 30, generator=generator) * 3
    tree = build_draft_trees(DraftMarginals.from_logits(logits, 8), torch.zeros(bs).long(), node_budget)
    return tree.parents, tree_layout(tree, torch.zeros(bs).long()).ancestor_mask


def visible(parents: list[int], row: int, column: int) -> bool:
    while row not in (column, -1):
        row = parents[row]
    return row == column


def expected(parents: torch.Tensor, prefix_lens: list[int], prefix: int) -> list[int]:
    cells = []
    width = parents.shape[1]
    for tree, prefix_len in zip(parents.tolist(), prefix_lens, strict=True):
        for row in range(width):
            cells += [prefix] * prefix_len + [int(visible(tree, row, column)) for column in range(width)]
    return cells


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.integers(1, 20),
    st.booleans(),
    st.integers(0, 99),
)
def test_a_row_sees_the_prefix_and_its_ancestors(
    prefix_lens: list[int], node_budget: int, fill_prefix: bool, seed: int
) -> None:
    parents, ancestors = random_trees(len(prefix_lens), node_budget, seed)
    numel = mask_numel(len(prefix_lens), node_budget + 1, sum(prefix_lens))
    mask = torch.full((numel + 3,), 7, dtype=torch.uint8)
    write_verify_mask(mask, ancestors, torch.tensor(prefix_lens), fill_prefix=fill_prefix)
    assert mask[:numel].tolist() == expected(parents, prefix_lens, 1 if fill_prefix else 7)
    assert mask[numel:].tolist() == [7, 7, 7]


def test_masks_may_be_bool() -> None:
    parents, ancestors = random_trees(2, 7, seed=1)
    mask = torch.zeros(mask_numel(2, 8, 9), dtype=torch.bool)
    write_verify_mask(mask, ancestors, torch.tensor([4, 5]), fill_prefix=True)
    assert mask.int().tolist() == expected(parents, [4, 5], 1)


@pytest.mark.skipif(not IS_INTERPRETER, reason="runs in a process of Triton's interpreter, see below")
@pytest.mark.parametrize("fill_prefix", [False, True])
def test_interpreted_kernel_writes_what_torch_writes(fill_prefix: bool) -> None:
    from ddtree.sglang_plugin.verify_mask import _write_triton

    _, ancestors = random_trees(3, 12, seed=2)
    prefix_lens = torch.tensor([1, 37, 1100])
    masks = [torch.full((mask_numel(3, 13, 1138) + 5,), 9, dtype=torch.uint8) for _ in range(2)]
    write_verify_mask_torch(masks[0], ancestors, prefix_lens, fill_prefix=fill_prefix)
    _write_triton(masks[1], ancestors, prefix_lens, fill_prefix)
    assert torch.equal(*masks)


@pytest.mark.skipif(IS_INTERPRETER, reason="starts the process of the interpreter")
def test_the_kernel_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert run_interpreted(__file__) == 2
