"""Planted faults spoil what they name, only while they are planted, and only that."""

import types
from pathlib import Path

import pytest
import torch

import ddtree
from check_sglang_replay import judge_faults
from ddtree.sglang_plugin.draft_sampler import DraftedTrees
from ddtree.trace.replay import GAP_STEPS
from ddtree.tree import DraftTree
from ddtree.tree.layout import ancestor_mask, retrieve_links
from sglang_common import Results
from sglang_faults import FAULT_FILE, FAULTS, by_column, causal_like, plant


@pytest.fixture
def worker(tmp_path, monkeypatch):
    file = tmp_path / "fault"
    monkeypatch.setenv(FAULT_FILE, str(file))
    seen = {}
    worker = types.SimpleNamespace(
        _kv_mover=types.SimpleNamespace(move=lambda window, path: seen.update(moved=True)),
        _verify_mask=lambda batch, trees, has_mask: seen.update(mask=trees.ancestor_mask, has_mask=has_mask),
        _verify=lambda batch, window, trees, has_mask: seen.update(positions=trees.positions),
        _greedy_graph="captured",
    )
    plant(None, types.SimpleNamespace(draft_worker=worker))

    def run(fault):
        file.write_text(fault, encoding="utf-8")
        seen.clear()
        worker._verify(None, None, trees(), True)
        worker._verify_mask(None, trees(), True)
        worker._kv_mover.move(None, None)
        assert worker._greedy_graph is None
        return dict(seen)

    return run


POSITIONS = torch.tensor([[10, 11, 11, 12]])


def trees():
    parents = torch.tensor([[-1, 0, 0, 1]])
    depths = torch.tensor([[0, 1, 1, 2]])
    tree = DraftTree(torch.tensor([[5, 6, 7, 8]]), parents, depths, torch.zeros(1, 4))
    return DraftedTrees(tree, ancestor_mask(tree), retrieve_links(tree), POSITIONS)


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_a_fault_spoils_only_what_it_names(worker, fault):
    seen = worker(fault)
    assert ("moved" in seen) == (fault != "kv")
    assert torch.equal(seen["mask"], trees().ancestor_mask) == (fault != "mask")
    assert seen["has_mask"] == (fault != "mask")
    assert torch.equal(seen["positions"], POSITIONS) == (fault != "positions")


def test_the_worker_has_what_faults_spoil():
    """The worker cannot be imported without SGLang, and a fault that spoils nothing proves nothing."""
    source = (Path(ddtree.__file__).parent / "sglang_plugin" / "worker_v2.py").read_text(encoding="utf-8")
    signatures = " ".join(source.split())
    for method in (
        "def _verify( self, batch: Any, window: compat.KVWindow, trees: DraftedTrees, has_mask: bool )",
        "def _verify_mask(self, batch: Any, trees: DraftedTrees, has_mask: bool)",
        "self._kv_mover.move(",
        "self._greedy_graph: GreedyGraph | None",
    ):
        assert method in signatures


def test_spoiled_values():
    assert by_column(POSITIONS).tolist() == [[10, 11, 12, 13]]
    assert causal_like(trees().ancestor_mask)[0].tolist() == torch.ones(4, 4).tril().bool().tolist()


class Judge:
    """A replayer whose verdict is a given gap."""

    stop_tokens = (2,)

    def __init__(self, gap):
        self.gap = gap

    def logits(self, outputs):
        return ((index, None) for index in range(len(outputs)))

    def judge(self, output, eps, logits=None):
        return types.SimpleNamespace(
            num_tokens=1, num_not_best=1, max_gap=self.gap, violations=(),
            gaps_above=(0,) * len(GAP_STEPS),
        )  # fmt: skip


@pytest.mark.parametrize(("gap", "is_found"), [(0.5, True), (0.49, True), (0.4, True), (0.39, False)])
def test_a_fault_must_exceed_eps_tenfold(gap, is_found):
    results = Results(None, {})
    results.verdict["eps"] = 0.04
    answer = {"tokens": [3], "finish": {"type": "length"}}
    results.cells["fault kv"] = {"answers": [answer]}
    requests = [{"tokens": [1], "sampling": {"max_new_tokens": 1}}]
    args = types.SimpleNamespace(faults=["kv", "mask"])
    assert judge_faults(args, Judge(gap), requests, results) == is_found
    assert set(results.verdict["faults"]) == {"kv"}
