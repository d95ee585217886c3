"""DDTREE as SGLang's scheduler sees it, over a `CustomSpecAlgo` that has no more than 0.5.17's."""

import sys
from types import SimpleNamespace

import pytest

from ddtree.errors import DDTreeError
from ddtree.sglang_plugin import contract
from sglang_fakes import fake_modules, import_fresh


class CustomSpecAlgo:
    """What 0.5.17 gives a registered algorithm, as far as DDTREE changes it."""

    def is_dflash(self):
        return False

    is_dflash_family = supports_target_verify_for_draft = supports_grammar_overlap = is_dflash

    def has_draft_kv(self):
        return True

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens, is_draft_worker):
        return num_draft_tokens


@pytest.fixture
def spec_algo(monkeypatch):
    spec = SimpleNamespace(speculative_dflash_block_size=16)
    fake_modules(
        monkeypatch,
        {
            "sglang.srt.runtime_context": {"get_spec": lambda: spec},
            "sglang.srt.speculative.spec_registry": {"CustomSpecAlgo": CustomSpecAlgo},
            "sglang.srt.managers.overlap_utils": {"FutureMap": lambda *args: args},
        },
    )
    return import_fresh(monkeypatch, "ddtree.sglang_plugin.spec_algo")


def test_it_is_a_dflash_that_needs_no_draft_pages(spec_algo):
    algo = spec_algo.DDTreeSpecAlgo()
    yes = ["is_dflash", "is_dflash_family", "supports_target_verify_for_draft", "supports_grammar_overlap",
           "supports_prefill_shared_read_done"]  # fmt: skip
    assert [getattr(algo, name)() for name in yes] == [True] * len(yes)
    no = ["has_draft_kv", "carries_draft_hidden_states", "need_topk"]
    assert [getattr(algo, name)() for name in no] == [False] * len(no)


@pytest.mark.parametrize(("is_draft_worker", "expected"), [(True, 16), (False, 64)])
def test_drafter_and_target_have_a_width_each(spec_algo, is_draft_worker, expected):
    algo = spec_algo.DDTreeSpecAlgo()
    assert algo.get_num_tokens_per_req_for_target_verify(64, is_draft_worker) == expected


def test_a_budget_below_the_block_leaves_the_block_whole(spec_algo):
    """The width given may be anything, such as the block itself while the drafter is built."""
    assert spec_algo.DDTreeSpecAlgo().get_num_tokens_per_req_for_target_verify(8, True) == 16


def test_the_future_map_is_made_for_this_algorithm(spec_algo):
    algo = spec_algo.DDTreeSpecAlgo()
    assert algo.create_future_map("cuda:0", "pool", needs_cpu_seq_lens=False) == (
        "cuda:0", algo, "pool", False, False,
    )  # fmt: skip


def test_the_worker_is_imported_when_it_is_made(spec_algo, monkeypatch):
    module = SimpleNamespace(DDTreeWorkerV2=int)
    monkeypatch.setitem(sys.modules, "ddtree.sglang_plugin.worker_v2", module)
    report = SimpleNamespace(is_ok=True, text="")
    monkeypatch.setattr(contract, "check_imported", lambda: report)
    assert spec_algo.load_worker(server_args=None) is int
    report.is_ok, report.text = False, "changed: a symbol"
    with pytest.raises(DDTreeError, match="changed: a symbol"):
        spec_algo.load_worker(server_args=None)


def test_server_arguments_go_to_their_module(spec_algo, monkeypatch):
    calls = []
    monkeypatch.setitem(
        sys.modules,
        "ddtree.sglang_plugin.server_args",
        SimpleNamespace(
            handle_server_args=lambda args: calls.append(("handle", args)),
            validate_server_args=lambda args: calls.append(("validate", args)),
        ),
    )
    spec_algo.validate_server_args("args")
    spec_algo.DDTreeSpecAlgo().handle_server_args("args")
    assert calls == [("validate", "args"), ("handle", "args")]
