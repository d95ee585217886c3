"""What ranks write down of their trees, and logits that tie."""

import json
import sys
import types

import pytest
import torch

import sglang_rank_trees
from ddtree.sglang_plugin import draft_sampler
from ddtree.tree import DraftMarginals, build_draft_trees
from sglang_rank_trees import RankLog, rounded


def trees_of(log_probs):
    """Trees of two levels whose candidates are 0, 1, 2."""
    scores = torch.tensor(log_probs).expand(1, 2, 3).contiguous()
    tokens = torch.arange(3).expand(1, 2, 3).contiguous()
    tree = build_draft_trees(DraftMarginals(tokens, scores), torch.zeros(1, dtype=torch.int64), 6)
    return types.SimpleNamespace(tree=tree)


def test_a_log_counts_trees_nodes_and_ties():
    log = RankLog()
    log.add(trees_of([-0.1, -2.0, -3.0]))
    assert (log.rounds, log.trees, log.nodes, log.tied_trees) == (1, 1, 6, 0)
    log.add(trees_of([-0.5, -0.5, -3.0]))
    assert (log.rounds, log.trees, log.tied_trees) == (2, 2, 1)


def test_hashes_tell_trees_and_their_order_apart():
    first, second = trees_of([-0.1, -2.0, -3.0]), trees_of([-0.6, -0.7, -3.0])
    logs = []
    for rounds in ((first, second), (first, second), (second, first), (first, first)):
        log = RankLog()
        for trees in rounds:
            log.add(trees)
        logs.append(log.to_json())
    assert logs[0] == logs[1]
    assert len({log["tree_hash"] for log in logs[1:]}) == 3
    assert len({log["score_hash"] for log in logs[1:]}) == 3


def test_rounded_logits_tie_across_the_cut():
    seen = []

    def gather(logits, *args):
        seen.append((logits, args))

    logits = torch.randn(1, 2, 50, generator=torch.Generator().manual_seed(0)).bfloat16() * 8
    rounded(gather, 2.0)(logits, 4, 0, None)
    made, args = seen[0]
    assert args == (4, 0, None)
    assert made.dtype == torch.bfloat16
    assert (made.float() % 2 == 0).all()
    assert (made.float() - logits.float()).abs().max() <= 1.0
    assert len(made.unique()) < 30


@pytest.fixture
def worker_module(monkeypatch):
    """The worker's module with a comparison that fails for trees named "different"."""
    module = types.ModuleType("ddtree.sglang_plugin.worker_v2")

    def check(trees, group):
        if trees == "different":
            raise RuntimeError("different draft trees")

    module.check_equal_trees = check
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("ddtree.sglang_plugin.worker_v2", module, raising=False)
    monkeypatch.setattr(draft_sampler, "gather_marginals", draft_sampler.gather_marginals)
    return module


@pytest.mark.parametrize("step", ["0", "2.0"])
def test_only_trees_that_all_ranks_agree_on_are_counted(worker_module, monkeypatch, step):
    log, gather = RankLog(), draft_sampler.gather_marginals
    monkeypatch.setenv(sglang_rank_trees.TIE_STEP, step)
    sglang_rank_trees.attach(log)
    worker_module.check_equal_trees(trees_of([-0.1, -2.0, -3.0]), None)
    with pytest.raises(RuntimeError, match="different"):
        worker_module.check_equal_trees("different", None)
    assert log.rounds == 1
    assert (draft_sampler.gather_marginals is gather) == (step == "0")


def test_a_rank_writes_its_own_file(tmp_path, monkeypatch):
    module = types.ModuleType("ddtree.sglang_plugin.compat")
    module.tensor_parallel_group = lambda: types.SimpleNamespace(rank_in_group=1)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv(sglang_rank_trees.RANKS_FOLDER, str(tmp_path))
    log = RankLog()
    log.add(trees_of([-0.1, -2.0, -3.0]))
    sglang_rank_trees.write(log)
    assert json.loads((tmp_path / "rank-1.json").read_text()) == log.to_json()
    assert [file.name for file in tmp_path.iterdir()] == ["rank-1.json"]
