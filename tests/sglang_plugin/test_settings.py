"""The plugin's settings: their checks, and the places they are read from."""

import json
from dataclasses import replace

import pytest

from ddtree.config import Mode, PluginConfig
from ddtree.errors import ConfigError
from ddtree.sglang_plugin.settings import load_config, pin_config


def test_defaults():
    config = PluginConfig()
    assert (config.node_budget, config.mode, config.metrics) == (31, Mode.TREE, True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("node_budget", 0), ("node_budget", 1025), ("node_budget", 31.0), ("node_budget", True),
        ("candidate_topk", -1), ("candidate_topk", 1025), ("candidate_topk", "8"),
        ("mode", "ar"), ("mode", ["tree"]), ("mode", None),
        ("max_accept_tokens", -1), ("max_accept_tokens", 1.5),
        ("metrics", 1), ("check_ranks", "no"), ("trace_detail", "all"), ("trace_detail", None),
    ],
)  # fmt: skip
def test_a_value_that_is_not_allowed_is_named(field, value):
    with pytest.raises(ConfigError, match=rf"{field}=.* is not allowed"):
        PluginConfig(**{field: value})


@pytest.mark.parametrize(
    ("budget", "topk", "expected"), [(31, 0, 31), (63, 0, 32), (63, 48, 48), (7, 16, 7), (1024, 256, 256)]
)
def test_candidates_follow_the_budget(budget, topk, expected):
    assert PluginConfig(node_budget=budget, candidate_topk=topk).num_candidates == expected


def test_a_chain_is_one_candidate_wide_and_a_block_long():
    config = PluginConfig(node_budget=63, mode=Mode.CHAIN)
    assert (config.num_candidates, config.verify_width(16)) == (1, 16)


@pytest.mark.parametrize(("budget", "block", "width"), [(31, 16, 32), (15, 16, 16), (4, 8, 8), (1, 2, 2)])
def test_the_verify_width_holds_the_tree_and_the_block(budget, block, width):
    assert PluginConfig(node_budget=budget).verify_width(block) == width


def test_without_variable_and_file_the_defaults_hold(tmp_path):
    assert load_config({}, tmp_path) == PluginConfig()


def test_json_text(tmp_path):
    config = load_config({"DDTREE_CONFIG": ' {"node_budget": 63, "mode": "chain"} '}, tmp_path)
    assert config == PluginConfig(node_budget=63, mode=Mode.CHAIN)
    assert isinstance(config.mode, Mode)


def test_a_path_is_taken_from_the_working_directory(tmp_path):
    (tmp_path / "my.json").write_text('{"candidate_topk": 4}')
    (tmp_path / "my.toml").write_text("[other]\nx = 1\n[sglang]\ncheck_ranks = true\n")
    assert load_config({"DDTREE_CONFIG": "my.json"}, tmp_path) == PluginConfig(candidate_topk=4)
    assert load_config({"DDTREE_CONFIG": str(tmp_path / "my.toml")}, tmp_path) == PluginConfig(
        check_ranks=True
    )


def test_the_file_of_the_working_directory_is_read_where_there_is_no_variable(tmp_path):
    (tmp_path / "ddtree.toml").write_text("[sglang]\nnode_budget = 15\nmetrics = false\n")
    assert load_config({}, tmp_path) == PluginConfig(node_budget=15, metrics=False)
    assert load_config({"DDTREE_CONFIG": "{}"}, tmp_path) == PluginConfig()


@pytest.mark.parametrize("text", ["", "[engine]\nthreads = 2\n", "node_budget = 15\n"])
def test_a_file_of_that_name_without_the_table_is_refused(tmp_path, text):
    (tmp_path / "ddtree.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"ddtree\.toml has no table \[sglang\]; put the settings below"):
        load_config({}, tmp_path)


def test_a_link_to_nowhere_or_a_folder_of_that_name_is_refused(tmp_path):
    path = tmp_path / "ddtree.toml"
    path.symlink_to(tmp_path / "gone.toml")
    with pytest.raises(ConfigError, match=r"ddtree\.toml cannot be read: .*No such file"):
        load_config({}, tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=r"ddtree\.toml cannot be read: .*directory"):
        load_config({}, tmp_path)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ('{"budget": 3}', r"DDTREE_CONFIG: unknown setting 'budget'; known are node_budget, .*check_ranks"),
        ('{"node_budget": "many"}', r"DDTREE_CONFIG: node_budget='many' is not allowed"),
        ('{"node_budget": 3', r"DDTREE_CONFIG is no valid JSON"),
        ("31", r"neither JSON text nor the path"),
        ("nowhere.json", r"nowhere\.json cannot be read"),
        ("list.json", r"holds \[1\], not a table of settings"),
        ("broken.json", r"broken\.json is no valid JSON"),
        ("broken.toml", r"broken\.toml is no valid TOML"),
        ("empty.toml", r"empty\.toml has no table \[sglang\]"),
        ("scalar.toml", r"holds 3, not a table"),
        ("binary.json", r"binary\.json cannot be read"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path, given, told):
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "broken.toml").write_text("[sglang")
    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "scalar.toml").write_text("sglang = 3")
    (tmp_path / "binary.json").write_bytes(b"\xff{}")
    with pytest.raises(ConfigError, match=told):
        load_config({"DDTREE_CONFIG": given}, tmp_path)


MANY_DIGITS = "9" * 5000
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (f'{{"node_budget": {MANY_DIGITS}}}', r"DDTREE_CONFIG is no valid JSON: .*digits"),
        (f'{{"node_budget": {DEEP}}}', r"DDTREE_CONFIG is nested too deeply"),
        ("digits.toml", r"digits\.toml is no valid TOML: .*digits"),
        ("hex.toml", r"node_budget=a number beyond all limits is not allowed"),
        ("deep.toml", r"DDTREE_CONFIG is nested too deeply"),
        ("deep.json", r"DDTREE_CONFIG is nested too deeply"),
        ("~nosuchuser0/x.json", r"DDTREE_CONFIG='~nosuchuser0/x\.json' names no home folder"),
        ("a\0b.json", r"cannot be read: .*null byte"),
        ("a\ud800b.json", r"a\\ud800b\.json' cannot be read"),
        ("a\ud800b", r"neither JSON text nor the path"),
        ('{"bud\\ud800get": 1}', r"unknown setting 'bud\\ud800get'; known"),
        ('{"mode": "\\ud800"}', r"mode='\\ud800' is not allowed"),
    ],
    ids=range(12),
)
def test_whatever_is_given_ends_in_an_error_that_can_be_printed(tmp_path, given, told):
    (tmp_path / "digits.toml").write_text(f"[sglang]\nnode_budget = {MANY_DIGITS}\n")
    (tmp_path / "hex.toml").write_text(f"[sglang]\nnode_budget = 0x{'f' * 5000}\n")
    (tmp_path / "deep.toml").write_text(f"[sglang]\nnode_budget = {DEEP}\n")
    (tmp_path / "deep.json").write_text(f'{{"node_budget": {DEEP}}}')
    with pytest.raises(ConfigError, match=told) as raised:
        load_config({"DDTREE_CONFIG": given}, tmp_path)
    str(raised.value).encode()


def test_values_nested_just_below_the_parsers_limit_are_refused_too(tmp_path):
    for depth in range(100, 1200, 50):
        given = f'{{"mode": {"[" * depth}{"]" * depth}}}'
        with pytest.raises(ConfigError, match=r"is not allowed|nested too deeply"):
            load_config({"DDTREE_CONFIG": given}, tmp_path)


def test_a_mistake_in_the_file_of_the_working_directory_is_named(tmp_path):
    (tmp_path / "ddtree.toml").write_text("[sglang]\nnode_budget = 0\n")
    with pytest.raises(ConfigError, match=r"\[sglang\] of .*ddtree\.toml: node_budget=0 is not allowed"):
        load_config({}, tmp_path)


def test_pinned_settings_are_read_back_even_if_the_file_has_changed(tmp_path):
    config = replace(PluginConfig(), node_budget=7, mode=Mode.CHAIN, max_accept_tokens=1)
    environ = {}
    pin_config(config, environ)
    (tmp_path / "ddtree.toml").write_text("[sglang]\nnode_budget = 15\n")
    assert load_config(environ, tmp_path) == config
    assert json.loads(environ["DDTREE_CONFIG"])["mode"] == "chain"
