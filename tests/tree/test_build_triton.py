"""The Triton builder against the torch one: through the interpreter on a CPU, for real with mark `gpu`.

`test_triton_interpreter.py` runs the interpreted tests.
"""

import os
import subprocess
import sys

import pytest
import torch

from ddtree.errors import ConfigError, MissingExtraError
from ddtree.tree import (
    DraftMarginals,
    build_draft_trees,
    build_trees_with_layout,
    build_triton,
    retrieve_links,
    tree_layout,
    triton_choice,
)
from ddtree.tree.build_triton import build_draft_trees_triton, build_draft_trees_with_layout, triton_refusal

SHAPES = [
    (3, 4, 6, 3),
    (15, 5, 15, 6),
    (2, 1, 4, 2),
    (1, 3, 1, 1),
    (1, 1, 1, 2),
    (7, 16, 16, 6),
    (3, 40, 63, 6),
    (5, 12, 140, 2),
    (31, 2, 40, 6),
]


def check_equals_torch(marginals: DraftMarginals, node_budget: int) -> None:
    bs, device = marginals.tokens.shape[0], marginals.tokens.device
    roots, prefix_lens = torch.arange(bs, device=device) * 3, torch.arange(bs, device=device) * 100
    tree, layout, links = build_draft_trees_with_layout(marginals, roots, prefix_lens, node_budget)
    expected = build_draft_trees(marginals, roots, node_budget)
    expected_layout = tree_layout(expected, prefix_lens)
    for name in ("tokens", "parents", "depths", "log_probs"):
        assert torch.equal(getattr(tree, name), getattr(expected, name)), name
        assert getattr(tree, name).dtype == getattr(expected, name).dtype
    assert torch.equal(layout.positions, expected_layout.positions)
    assert torch.equal(layout.ancestor_mask, expected_layout.ancestor_mask)
    for ours, theirs in zip(links, retrieve_links(expected), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("draft_depth", "topk", "node_budget", "bs"), SHAPES)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the interpreter's own process")
def test_interpreted_kernel_equals_torch(batch_of, draft_depth, topk, node_budget, bs):
    check_equals_torch(batch_of(draft_depth + topk, bs, draft_depth, topk), node_budget)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("draft_depth", "topk", "node_budget"),
    [(15, 64, 63), (31, 127, 127), (15, 256, 256), (31, 3, 255), (7, 3, 15), (1, 1, 1)],
)
def test_compiled_kernel_equals_torch(batch_of, draft_depth, topk, node_budget):
    marginals = batch_of(1, 12, draft_depth, topk)
    check_equals_torch(DraftMarginals(marginals.tokens.cuda(), marginals.log_probs.cuda()), node_budget)


@pytest.mark.gpu
def test_on_cuda_the_kernel_is_chosen(batch_of, monkeypatch):
    marginals = batch_of(1, 2, 4, 3)
    marginals = DraftMarginals(marginals.tokens.cuda(), marginals.log_probs.cuda())
    roots = torch.tensor([1, 2], device="cuda")
    expected = build_draft_trees(marginals, roots, 9)
    monkeypatch.setattr(build_triton, "build_draft_trees", None)
    assert torch.equal(build_trees_with_layout(marginals, roots, roots, 9)[0].tokens, expected.tokens)


def test_refusals_name_the_limit(batch_of):
    assert triton_refusal(31, 256, 256) is None
    assert triton_refusal(32, 1, 1) == "draft_depth=32 is above 31"
    assert "above 256" in str(triton_refusal(1, 257, 1))
    assert "above 256" in str(triton_refusal(1, 1, 257))
    with pytest.raises(ConfigError, match=r"node_budget=257 .* above 256; use build_draft_trees"):
        build_draft_trees_triton(batch_of(0, 1, 2, 2), torch.zeros(1, dtype=torch.int64), 257)


def test_on_a_cpu_the_torch_builder_is_chosen(batch_of):
    marginals, roots = batch_of(2, 2, 4, 3), torch.tensor([1, 2])
    expected = build_draft_trees(marginals, roots, 9)
    tree, layout, links = build_trees_with_layout(marginals, roots, roots, 9)
    assert torch.equal(tree.log_probs, expected.log_probs)
    assert torch.equal(layout.positions, expected.depths + roots[:, None])
    assert torch.equal(links.next_token, retrieve_links(expected).next_token)


def test_without_triton_says_so_only_when_called(batch_of, monkeypatch):
    monkeypatch.setattr(triton_choice, "has_triton", lambda: False)
    with pytest.raises(MissingExtraError, match="triton is not installed"):
        build_draft_trees_triton(batch_of(0, 1, 2, 2), torch.zeros(1, dtype=torch.int64), 4)


def test_importing_the_tree_does_not_load_triton():
    code = "import sys, ddtree.tree; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
