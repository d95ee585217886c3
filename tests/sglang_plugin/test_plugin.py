"""The entry point: what it refuses and how loudly, what it registers, and its two hooks."""

import json
import logging
import os
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest

from ddtree.config import PluginConfig
from ddtree.errors import ConfigError, DDTreeError
from ddtree.sglang_plugin import plugin
from sglang_fakes import fake_modules

GOOD = SimpleNamespace(is_ok=True, text="fits", warnings=["optional missing: a thing"])
BAD = SimpleNamespace(is_ok=False, text="DDTREE does not fit SGLang 0.6\n  changed: a.b:c", warnings=[])


class DDTreeSpecAlgo:
    pass


@pytest.fixture
def sglang(monkeypatch):
    """SGLang's two registries, as far as the entry point uses them; returns what they were given."""
    given = SimpleNamespace(algorithms=[], hooks=[])

    class SpeculativeAlgorithm:
        @classmethod
        def register(cls, name, **options):
            return lambda factory: given.algorithms.append((name, options, factory))

    class HookRegistry:
        @classmethod
        def register(cls, target, hook, hook_type):
            given.hooks.append((target, hook, hook_type))

    fake_modules(
        monkeypatch,
        {
            "sglang.srt.speculative.spec_info": {"SpeculativeAlgorithm": SpeculativeAlgorithm},
            "sglang.srt.plugins.hook_registry": {
                "HookRegistry": HookRegistry,
                "HookType": SimpleNamespace(AROUND="around", AFTER="after"),
            },
        },
    )
    algo = SimpleNamespace(
        NAME="DDTREE", DDTreeSpecAlgo=DDTreeSpecAlgo, load_worker="worker", validate_server_args="validate"
    )
    monkeypatch.setitem(sys.modules, "ddtree.sglang_plugin.spec_algo", algo)
    monkeypatch.setattr(plugin, "plugin_config", lambda: PluginConfig(node_budget=63))
    monkeypatch.setattr(plugin.contract, "check_installed", lambda: GOOD)
    monkeypatch.setenv("DDTREE_CONFIG", "")
    plugin.register.cache_clear()
    plugin.show_framed.cache_clear()
    yield given
    plugin.register.cache_clear()
    plugin.show_framed.cache_clear()


def test_sglang_finds_the_entry_point():
    (found,) = entry_points(group="sglang.srt.plugins", name="ddtree")
    assert found.load() is plugin.register


def test_the_algorithm_and_both_hooks_are_registered_once(sglang, caplog):
    with caplog.at_level(logging.WARNING):
        plugin.register()
        plugin.register()
    assert sglang.algorithms == [
        (
            "DDTREE",
            {
                "supports_overlap": True,
                "validate_server_args": "validate",
                "spec_class": DDTreeSpecAlgo,
            },
            "worker",
        )
    ]
    assert sglang.hooks == [
        (plugin.DUMMY_VERIFY_INPUT, plugin.around_dummy_verify_input, "around"),
        (plugin.ROW_HEADROOM, plugin.after_row_headroom, "after"),
    ]
    assert caplog.messages == ["DDTREE: optional missing: a thing"]


def test_processes_started_from_here_are_given_the_settings(sglang):
    plugin.register()
    assert json.loads(os.environ["DDTREE_CONFIG"])["node_budget"] == 63


def raising(message):
    def wrong():
        raise ConfigError(message)

    return wrong


@pytest.mark.parametrize(
    ("owner", "name", "fault", "told"),
    [
        (plugin, "plugin_config", raising("node_budget=0 is not allowed"), "node_budget=0 is not allowed"),
        (plugin.contract, "check_installed", lambda: BAD, "changed: a.b:c"),
        (plugin.contract, "check_installed", raising("a.py is no Python"), "a.py is no Python"),
    ],
    ids=["settings", "contract", "unreadable"],
)
def test_a_refusal_is_loud_and_registers_nothing(sglang, monkeypatch, capsys, owner, name, fault, told):
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(DDTreeError, match="DDTREE was not registered") as raised:
        plugin.register()
    assert told in str(raised.value)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == lines[-1] == "=" * 80
    assert any(told in line for line in lines)
    assert (sglang.algorithms, sglang.hooks) == ([], [])


def test_a_refusal_is_told_once(sglang, monkeypatch, capsys, caplog):
    """SGLang logs the error itself, with what it was raised from; the frame comes once a process."""
    monkeypatch.setattr(plugin, "plugin_config", raising("node_budget=0 is not allowed"))
    for _ in range(2):
        with pytest.raises(DDTreeError) as raised:
            plugin.register()
        assert raised.value.__cause__ is None
        assert raised.value.__suppress_context__
    assert capsys.readouterr().err.count("DDTREE was not registered") == 1
    assert caplog.records == []


# -- the hooks -----------------------------------------------------------------------------------------


def create_17(spec_algorithm, server_args, custom_mask, num_tokens_per_req, is_draft_worker):
    return "stock", spec_algorithm, server_args, custom_mask, num_tokens_per_req, is_draft_worker


def create_23(spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker):
    return "stock", spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker


@pytest.fixture
def ours(sglang, monkeypatch):
    info = SimpleNamespace(make_dummy_verify_input=lambda *args: ("ours", *args))
    monkeypatch.setitem(sys.modules, "ddtree.sglang_plugin.info", info)


@pytest.mark.parametrize(("create", "more"), [(create_17, ["args"]), (create_23, [])])
def test_dummy_verify_inputs_are_ours_where_ddtree_runs(ours, create, more):
    algo = DDTreeSpecAlgo()
    made = plugin.around_dummy_verify_input(create, algo, *more, "mask", 32, is_draft_worker=True)
    assert made == ("ours", "mask", 32, True)


@pytest.mark.parametrize(("create", "more"), [(create_17, ["args"]), (create_23, [])])
def test_dummy_verify_inputs_of_others_are_left_alone(ours, create, more):
    made = plugin.around_dummy_verify_input(create, "EAGLE", *more, "mask", 4, False)
    assert made == ("stock", "EAGLE", *more, "mask", 4, False)


def headroom(monkeypatch, extra, algorithm, page_size):
    spec = SimpleNamespace(speculative_algorithm=algorithm, speculative_dflash_block_size=16)
    context = {"get_spec": lambda: spec, "get_schedule": lambda: SimpleNamespace(page_size=page_size)}
    fake_modules(monkeypatch, {"sglang.srt.runtime_context": context})
    return plugin.after_row_headroom(extra, "server_args of 0.5.17")


@pytest.mark.parametrize(
    ("extra", "page_size", "expected"), [(68, 1, 64 + 32 + 1), (68, 64, 64 + 32 + 64), (191, 64, 191)]
)
def test_rows_have_room_for_a_window_opened_at_their_end(sglang, monkeypatch, extra, page_size, expected):
    assert headroom(monkeypatch, extra, "DDTREE", page_size) == expected


@pytest.mark.parametrize("algorithm", [None, "DFLASH", "EAGLE"])
def test_rows_of_others_are_left_alone(sglang, monkeypatch, algorithm):
    assert headroom(monkeypatch, 68, algorithm, 64) is None
