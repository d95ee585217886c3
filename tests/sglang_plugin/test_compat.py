"""Differences between SGLang's releases, against objects that have what each release gives them."""

from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from sglang_fakes import fake_modules, import_fresh


class Scopes:
    """Records how parallel layouts are entered and left."""

    def __init__(self):
        self.calls, self.depth = [], 0

    @contextmanager
    def _scope(self, *arguments):
        self.calls.append(arguments)
        self.depth += 1
        yield
        self.depth -= 1

    def of_group(self, tp_group):  # to 0.5.20
        return self._scope("group", tp_group)

    def of_group_and_owner(self, tp_group, *, owns_attention):  # 0.5.21
        return self._scope("group", tp_group, owns_attention)

    def of_owner(self, owns_attention):  # 0.5.22
        return self._scope("owner", owns_attention)

    def of_layout(self, layout):  # 0.5.23
        return self._scope("layout", layout)


@pytest.fixture
def scopes():
    return Scopes()


@pytest.fixture
def compat(monkeypatch):
    fake_modules(
        monkeypatch,
        {
            "sglang.kernels.ops.speculative.cache_locs": {"assign_extend_cache_locs_uniform_func": None},
            "sglang.srt.layers.logprob_processor": {},
            "sglang.srt.layers.sampler": {"Sampler": None},
            "sglang.srt.managers.utils": {"GenerationBatchResult": SimpleNamespace(__dataclass_fields__={})},
            "sglang.srt.model_executor.forward_batch_info": {
                "ForwardBatch": SimpleNamespace(__dataclass_fields__={})
            },
            "sglang.srt.runtime_context": {"get_exec": None, "get_parallel": None, "get_spec": None},
            "sglang.srt.speculative.spec_utils": {},
        },
    )
    return import_fresh(monkeypatch, "ddtree.sglang_plugin.compat")


def worker_of(release, scopes):
    """A worker with the attributes by which that release's DFLASH enters the drafter's layout."""
    runner = SimpleNamespace(tp_group="draft group") if release <= "0.5.21" else SimpleNamespace()
    attributes = {
        "0.5.19": {},
        "0.5.20": {"draft_tp_context": scopes.of_group},
        "0.5.21": {"draft_tp_context": scopes.of_group_and_owner, "draft_owns_attention": True},
        "0.5.22": {"draft_owns_attention": True},
        "0.5.23": {"draft_parallel_layout": "layout of the drafter"},
    }
    return SimpleNamespace(draft_model_runner=runner, **attributes[release])


@pytest.mark.parametrize(
    ("release", "function", "entered"),
    [
        ("0.5.19", "of_group", []),
        ("0.5.20", "of_group", [("group", "draft group")]),
        ("0.5.21", "of_group_and_owner", [("group", "draft group", True)]),
        ("0.5.22", "of_owner", [("owner", True)]),
        ("0.5.23", "of_layout", [("layout", "layout of the drafter")]),
    ],
)
def test_the_drafter_runs_in_the_layout_that_dflash_gives_it(compat, scopes, release, function, entered):
    compat.spec_utils.draft_tp_context = getattr(scopes, function)
    with compat.draft_scope(worker_of(release, scopes)):
        assert scopes.depth == len(entered)
    assert (scopes.calls, scopes.depth) == (entered, 0)


@pytest.mark.parametrize("release", ["0.5.20", "0.5.21"])
def test_the_worker_s_own_choice_counts_where_it_holds_the_function(compat, scopes, release):
    # Without attention DP the worker's does nothing, while SGLang's would.
    compat.spec_utils.draft_tp_context = None
    with compat.draft_scope(worker_of(release, scopes)):
        assert scopes.depth == 1


def test_a_request_s_row_is_on_its_kv_record_or_on_itself(compat):
    assert compat.request_slot(SimpleNamespace(kv=SimpleNamespace(req_pool_idx=3))) == 3
    assert compat.request_slot(SimpleNamespace(kv=SimpleNamespace(), req_pool_idx=4)) == 4
    assert compat.request_slot(SimpleNamespace(kv=None, req_pool_idx=5)) == 5


def test_reserved_lengths_have_two_names(compat):
    old = SimpleNamespace(reserved_seq_lens_cpu="lens", reserved_seq_lens_sum=7)
    new = SimpleNamespace(nxt_kv_lens_cpu="lens", nxt_kv_lens_sum=7)
    assert compat.reserved_kv_lens(old) == compat.reserved_kv_lens(new) == ("lens", 7)


@dataclass
class ReadOnlyArguments:
    """Server arguments to 0.5.19: a dataclass that refuses plain assignment after start-up."""

    speculative_num_draft_tokens: int = 32
    speculative_eagle_topk: int = 2

    def __setattr__(self, name, value):
        if name in self.__dict__:
            raise AttributeError(name)
        object.__setattr__(self, name, value)


class StructArguments:
    """Server arguments of 0.5.20: no dataclass, and not to be written to in any way."""

    __slots__ = ()


def test_where_the_worker_reads_its_arguments_it_gets_a_copy_with_the_block(compat):
    given = ReadOnlyArguments()
    arguments = compat.base_worker_arguments(given, 16, "parallel state")
    assert arguments["ps"] == "parallel state"
    assert arguments["server_args"] == ReadOnlyArguments(16, 1)
    assert given == ReadOnlyArguments(32, 2)


def test_arguments_that_cannot_be_written_are_passed_on(compat):
    given = StructArguments()
    arguments = compat.base_worker_arguments(given, 16, "parallel state")
    assert arguments == {"server_args": given, "ps": "parallel state"}
    assert compat.base_worker_arguments(given, 16, None) == {"server_args": given}
