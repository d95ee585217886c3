"""Which cells a run has, and in which order they are measured."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench_kit import CONFIG
from ddtree.bench.plan import arms_of, one_server_at_a_time, plan_groups, request_seed, turned
from ddtree.bench.run_format import Arm
from ddtree.bench_config import BenchConfig
from ddtree.config import Mode

URL = "http://h:1/v1"


def no_url(url):
    raise AssertionError(url)


def names(arms):
    return [str(arm) for arm in arms]


def test_arms_are_engines_in_modes_and_trees_in_budgets():
    config = BenchConfig(engines=("embedded", "sglang"), modes=("ar", "chain", "tree"), budgets=(4, 9))
    assert names(arms_of(config, no_url)) == [
        f"{engine} {plan}"
        for engine in ("embedded", "sglang")
        for plan in ("ar", "chain", "tree:4", "tree:9")
    ]
    automatic = BenchConfig(modes=("tree",), budgets=("auto",))
    assert names(arms_of(automatic, no_url)) == ["embedded tree:auto"]


def test_the_arms_of_a_running_server_are_its_own_to_tell():
    config = BenchConfig(engines=(URL, "embedded"), modes=(Mode.AR,))
    assert names(arms_of(config, lambda url: [Arm(url, None)])) == [URL, "embedded ar"]


def test_every_cell_is_planned_once_and_arms_take_turns_at_beginning():
    config = replace(CONFIG, temperatures=(0.0, 1.0), repeats=3)
    arms = arms_of(config, no_url)
    groups = plan_groups(arms, config, ())
    keys = [group.key(arm) for group in groups for arm in group.arms]
    assert len(keys) == len(set(keys)) == 3 * 2 * 2 * 3
    assert Counter(names(group.arms)[0] for group in groups) == dict.fromkeys(names(arms), 4)
    assert [group.repeat for group in groups] == sorted(group.repeat for group in groups)


def test_measured_cells_are_left_out_and_the_others_keep_their_order():
    arms = arms_of(CONFIG, no_url)
    whole = [group.key(arm) for group in plan_groups(arms, CONFIG, ()) for arm in group.arms]
    done = set(whole[:4]) | {whole[-1]}
    left = [group.key(arm) for group in plan_groups(arms, CONFIG, done) for arm in group.arms]
    assert left == whole[4:-1]
    assert plan_groups(arms, CONFIG, set(whole)) == []


def test_the_embedded_engine_has_cells_of_one_request_at_a_time_only():
    config = BenchConfig(engines=("embedded", "sglang"), modes=(Mode.AR,), concurrency=(1, 8), repeats=1)
    groups = plan_groups(arms_of(config, no_url), config, ())
    assert {(str(arm), group.concurrency) for group in groups for arm in group.arms} == {
        ("embedded ar", 1), ("sglang ar", 1), ("sglang ar", 8),
    }  # fmt: skip


def test_one_server_at_a_time_keeps_each_servers_cells_together_and_loses_none():
    config = BenchConfig(engines=("embedded", "sglang"), budgets=(4,), repeats=2)
    groups = plan_groups(arms_of(config, no_url), config, ())
    alone = one_server_at_a_time(groups)
    assert Counter(group.key(arm) for group in alone for arm in group.arms) == Counter(
        group.key(arm) for group in groups for arm in group.arms
    )
    servers = [str(arm) for group in alone for arm in group.arms if arm.engine == "sglang"]
    assert sum(a != b for a, b in pairwise(servers)) == 2
    engines = [arm.engine for group in alone for arm in group.arms]
    assert engines == sorted(engines)


@settings(max_examples=30)
@given(st.lists(st.integers(), max_size=6, unique=True), st.integers(0, 20))
def test_turning_keeps_the_items_and_gives_each_its_turn(items, number):
    assert sorted(turned(items, number)) == sorted(items)
    firsts = [next(turned(items, number + n)) for n in range(len(items))]
    assert sorted(firsts) == sorted(items)


@pytest.mark.parametrize("seed", [0, -5, 2**62])
def test_each_prompt_has_a_seed_of_its_own_for_a_runs_seed(seed):
    seeds = [request_seed(seed, number) for number in range(200)]
    assert len(set(seeds)) == 200
    assert all(0 <= each < 2**31 for each in seeds)
    assert seeds == [request_seed(seed, number) for number in range(200)]
    assert request_seed(seed + 1, 0) != seeds[0]
