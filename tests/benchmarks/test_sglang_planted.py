"""What the planting plugin does to samplers, with stand-ins for SGLang's."""

import sys
import types

import pytest
import torch

import sglang_planted
from ddtree.config import PluginConfig
from ddtree.sglang_plugin import draft_sampler
from ddtree.sglang_plugin.draft_sampler import TreeDraftSampler, VocabularyShard
from planted_acceptance import PlantedDrafts, Simulation, Walk

BLOCK, HIDDEN = 6, 8
WALK = Walk(vocab_size=200, num_walked=190, seed=2)


class ChainSampler:
    """DFLASH's sampler within a graph, whose drafts are all token 1."""

    def __init__(self, weight, block_size):
        self.weight, self.block_size = weight, block_size
        self.out = torch.zeros(8 * (block_size - 1), dtype=torch.int64)

    def __call__(self, hidden_states, input_ids=None):
        del input_ids
        self.out[: hidden_states.shape[0] // self.block_size * (self.block_size - 1)] = 1


class Worker:
    """DFLASH's worker outside of graphs."""

    block_size = BLOCK

    def __init__(self, roots):
        self._draft_block_ids_buf = torch.full((8, BLOCK), 3)
        self._draft_block_ids_buf[: len(roots), 0] = roots

    def _greedy_sample_from_vocab_parallel_head(self, *, hidden_states, lm_head):
        del lm_head
        return torch.ones(len(hidden_states), dtype=torch.int64)


@pytest.fixture
def planted(tmp_path, monkeypatch):
    WALK.write(tmp_path)
    monkeypatch.setenv(sglang_planted.PLANTED_FOLDER, str(tmp_path))
    module = types.ModuleType("sglang.srt.speculative.dflash_worker_v2")
    module._DflashDraftSampler = type("Sampler", (ChainSampler,), {})
    module.DFlashWorkerV2 = type("W", (Worker,), {})
    packages = ("sglang", "sglang.srt", "sglang.srt.speculative")
    for name in packages:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[packages[-1]].dflash_worker_v2 = module
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("__init__", "build"):
        monkeypatch.setattr(TreeDraftSampler, name, getattr(TreeDraftSampler, name))
    sglang_planted.drafts_on.cache_clear()
    sglang_planted.plant(None)
    yield module
    sglang_planted.drafts_on.cache_clear()


def correct_chain(drafts, roots):
    """Drafts that the right token is the first candidate of, [bs, L] bool."""
    return drafts.ranks[:, roots].T == 0


def test_chains_in_and_out_of_graphs_get_the_same_drafts(planted):
    roots = torch.tensor([7, 150, 33])
    block_tokens = torch.full((3, BLOCK), 3)
    block_tokens[:, 0] = roots
    sampler = planted._DflashDraftSampler(torch.zeros(200, HIDDEN), BLOCK)
    assert sglang_planted.drafts_on.cache_info().currsize == 1  # made before a graph is captured
    sampler(torch.zeros(3 * BLOCK, HIDDEN), block_tokens.view(-1))
    in_graph = sampler.out[: 3 * (BLOCK - 1)].view(3, -1)
    worker = planted.DFlashWorkerV2(roots)
    hidden = torch.zeros(3 * (BLOCK - 1), HIDDEN)
    eager = worker._greedy_sample_from_vocab_parallel_head(hidden_states=hidden, lm_head=None)
    assert torch.equal(in_graph, eager.view(3, -1))
    drafts = PlantedDrafts(WALK, BLOCK - 1)
    right = in_graph == drafts.walks[:, roots].T
    assert torch.equal(right, correct_chain(drafts, roots))
    assert right.any()
    assert not right.all()


@pytest.mark.parametrize("node_budget", [5, 20])
def test_trees_hold_the_planted_candidates(planted, node_budget):
    config = PluginConfig(node_budget=node_budget)
    weight = torch.randn(200, HIDDEN, generator=torch.Generator().manual_seed(0))
    sampler = TreeDraftSampler(VocabularyShard(weight, 0, None), config, BLOCK)
    simulation = Simulation(WALK, PlantedDrafts(WALK, BLOCK - 1), node_budget, config.num_candidates)
    following = WALK.table()
    roots = torch.arange(0, 190, 10)
    hidden = torch.randn(len(roots) * BLOCK, HIDDEN, generator=torch.Generator().manual_seed(1))
    block_tokens = roots.unsqueeze(1).expand(-1, BLOCK).reshape(-1)
    trees = sampler.draft(hidden, block_tokens, torch.zeros(len(roots), dtype=torch.int64))
    for row, root in enumerate(roots.tolist()):
        tokens, parents = trees.tree.tokens[row].tolist(), trees.tree.parents[row].tolist()
        place, length = 0, 1
        while True:
            right = following[tokens[place]]
            children = [i for i, parent in enumerate(parents) if i and parent == place]
            found = [i for i in children if tokens[i] == right]
            if not found:
                break
            place, length = found[0], length + 1
        assert length == simulation.accept_length(root)


def test_it_plants_before_workers_are_made(monkeypatch):
    registered = []
    module = types.ModuleType("sglang.srt.plugins.hook_registry")
    module.HookRegistry = types.SimpleNamespace(register=lambda *args: registered.append(args))
    module.HookType = types.SimpleNamespace(BEFORE="before")
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sglang_planted.register()
    assert registered == [
        ("sglang.srt.managers.scheduler.Scheduler.__init__", sglang_planted.plant, "before")
    ]


def test_nothing_is_planted_unless_asked():
    assert draft_sampler.TreeDraftSampler.build.__module__ == draft_sampler.__name__
    assert not hasattr(draft_sampler.TreeDraftSampler.build, "__wrapped__")
