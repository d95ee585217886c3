"""What a run's cells say of each arm: recomputed by hand, and for runs with anything missing."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from ddtree.bench.run_format import Cell, CellKey, RequestFigures, Run
from ddtree.bench.summary import Share, Spread, ratio_swing, speed_ratio, summarise
from ddtree.errors import ConfigError
from report_kit import any_runs, header, made_up_run


def request(prompt, new_tokens, total_s, **fields):
    plain = {"prompt_tokens": 5, "decode_s": total_s - 0.5, "tokens_sha256": "x", "finish_reason": "stop"}
    return RequestFigures(prompt=prompt, new_tokens=new_tokens, total_s=total_s, **plain | fields)


def run_of(*cells):
    return Run("run.jsonl", header(("s",)), cells={cell.key: cell for cell in cells})


def cell(arm, repeat, wall_s, *requests, **figures):
    return Cell(CellKey(arm, "s", 1, 0.0, repeat), wall_s, requests, **figures)


@pytest.fixture
def run():
    """Two repeats of plain decoding and a tree on two prompts."""
    return run_of(
        cell("embedded ar", 0, 10.0, request(0, 30, 6.0), request(1, 20, 4.0)),
        cell("embedded ar", 1, 20.0, request(0, 30, 12.0), request(1, 20, 8.0)),
        cell("embedded tree:4", 0, 5.0,
             request(0, 30, 3.0, first_token_s=0.2, is_correct=True), request(1, 20, 2.0, tokens_sha256="y"),
             accept_histogram={"1": 2, "3": 6}, rank_histogram={"0": 7, "1": 1}, peak_memory_bytes=7,
             energy_j=100.0, stages_ms={"draft": 1.0}, between_tokens_ms={"50": 1.0, "90": 2.0, "99": 3.0}),
        cell("embedded tree:4", 1, 4.0,
             request(0, 30, 2.4, first_token_s=0.4, is_correct=False), request(1, 20, 1.6, first_token_s=0.9),
             accept_histogram={"2": 2}, peak_memory_bytes=9, stages_ms={"draft": 3.0},
             between_tokens_ms={"50": 3.0, "90": 4.0, "99": 5.0}),
    )  # fmt: skip


def test_figures_by_hand(run):
    tree = next(row for row in summarise(run) if row.arm.node_budget == 4)
    assert (tree.num_repeats, tree.num_requests) == (2, 4)
    assert tree.tokens_per_s == Spread(11.25, 10.0, 12.5)
    assert tree.to_plain.value == pytest.approx((10 / 5 + 12.5 / 2.5) / 2)
    assert tree.to_chain is None
    assert tree.accept_length == pytest.approx((2 * 1 + 6 * 3 + 2 * 2) / 10)
    assert tree.num_rounds == 5
    assert tree.first_token_ms == pytest.approx(400)
    assert tree.between_tokens_ms == {"50": 2.0, "90": 3.0, "99": 4.0}
    assert tree.accuracy == Share(1, 2)
    assert tree.peak_memory_bytes == 9
    assert tree.joules_a_token == 2.0
    assert tree.equal_to_plain == Share(3, 4)
    assert (tree.accept_histogram, tree.rank_histogram) == ({1: 2, 2: 2, 3: 6}, {0: 7, 1: 1})
    assert tree.stages_ms == {"draft": 2.0}
    assert tree.decode_tokens_per_s == pytest.approx((48 / 4 + 48 / 3) / 2)


def test_what_was_not_measured_is_none(run):
    plain = summarise(run)[0]
    assert plain.to_plain.value == 1
    assert plain.accept_length is plain.num_rounds is plain.first_token_ms is plain.accuracy is None
    assert plain.peak_memory_bytes is plain.joules_a_token is None
    assert (plain.between_tokens_ms, plain.stages_ms) == ({}, {})
    json.dumps(plain.to_json(), allow_nan=False)


def test_an_arm_is_compared_within_its_engine():
    run = run_of(
        cell("embedded ar", 0, 1.0, request(0, 10, 1.0)),
        cell("sglang chain", 0, 1.0, request(0, 10, 1.0)),
        cell("http://h/v1", 0, 0.5, request(0, 10, 0.5)),
    )
    by_arm = {str(row.arm): row for row in summarise(run)}
    assert by_arm["sglang chain"].to_plain is None
    assert by_arm["http://h/v1"].to_plain is None
    with_plain = {str(row.arm): row for row in summarise(run, plain="sglang chain")}
    assert with_plain["http://h/v1"].to_plain.value == 2
    assert with_plain["embedded ar"].to_plain.value == 1  # its own plain decoding goes before


def test_a_text_is_not_compared_with_tokens():
    run = run_of(
        cell("http://a/v1", 0, 1.0, request(0, 9, 1.0), request(1, 9, 1.0, tokens_sha256="text:x")),
        cell("http://b/v1", 0, 1.0, *(request(n, 9, 1.0, tokens_sha256="text:x") for n in range(2))),
    )
    by_arm = {str(row.arm): row for row in summarise(run, plain="http://a/v1")}
    assert by_arm["http://b/v1"].equal_to_plain == Share(1, 1)


def test_a_plain_arm_that_is_none_is_refused(run):
    with pytest.raises(ConfigError, match=r"plain='x' .* embedded ar, embedded tree:4"):
        summarise(run, plain="x")


def test_a_cell_of_no_arm_is_refused():
    with pytest.raises(ConfigError, match=r"run\.jsonl.*'embedded walk'.*mode"):
        summarise(run_of(cell("embedded walk", 0, 1.0, request(0, 10, 1.0))))


def test_a_cell_with_wrong_values_is_refused():
    with pytest.raises(ConfigError, match=r"run\.jsonl.*'embedded ar'"):
        summarise(run_of(cell("embedded ar", 0, 1.0, request(0, "ten", 1.0, decode_s=1.0))))


def test_other_prompts_give_no_ratio(run):
    plain = {0: run.cells[CellKey("embedded ar", "s", 1, 0.0, 0)]}
    ours = {0: replace(plain[0], requests=plain[0].requests[:1])}
    assert speed_ratio(plain, plain).value == 1
    assert speed_ratio(ours, plain) is None
    assert speed_ratio({1: plain[0]}, plain) is None


# -- the interval ----------------------------------------------------------------------------------


def test_the_interval_is_the_bootstrap_over_prompts_drawn_together():
    generator = random.Random(1)
    ours = [(generator.uniform(50, 200), generator.uniform(1, 2)) for _ in range(12)]
    theirs = [(tokens, seconds * generator.uniform(1.5, 2.5)) for tokens, seconds in ours]

    def speed(pairs):
        return sum(tokens for tokens, _ in pairs) / sum(seconds for _, seconds in pairs)

    ratios = []
    for _ in range(20_000):
        drawn = generator.choices(range(12), k=12)
        ratios.append(speed([ours[i] for i in drawn]) / speed([theirs[i] for i in drawn]))
    expected = np.quantile(ratios, (0.025, 0.975)) / (speed(ours) / speed(theirs))
    assert ratio_swing(ours, theirs) == pytest.approx(tuple(expected), abs=0.006)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    generator, hits = random.Random(2), 0
    for _ in range(200):
        theirs = [(100.0, generator.lognormvariate(0, 0.3)) for _ in range(30)]
        ours = [(100.0, seconds / 2 * generator.lognormvariate(0, 0.2)) for _, seconds in theirs]
        truth = 2 / np.exp(0.2**2 / 2)
        ratio = sum(s for _, s in theirs) / sum(s for _, s in ours)
        low, high = ratio_swing(ours, theirs)
        hits += low * ratio <= truth <= high * ratio
    assert 0.88 <= hits / 200 <= 0.99


def test_an_arm_against_itself_has_no_swing():
    pairs = [(10.0, 1.0), (50.0, 3.0), (20.0, 7.0)]
    assert ratio_swing(pairs, pairs) == (1.0, 1.0)
    assert ratio_swing(pairs[:1], pairs[:1]) is None


# -- any run ---------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_runs())
def test_any_run_is_summarised(run):
    rows = summarise(run, "name")
    assert sum(row.num_repeats for row in rows) == len(run.cells)
    assert {str(row.arm) for row in rows} == {key.arm for key in run.cells}
    for row in rows:
        json.dumps(row.to_json(), allow_nan=False)
        if row.tokens_per_s:
            assert row.tokens_per_s.low <= row.tokens_per_s.median <= row.tokens_per_s.high
        for ratio in (row.to_plain, row.to_chain):
            assert ratio is None or ratio.low is None or ratio.low <= ratio.value <= ratio.high
        for share in (row.accuracy, row.equal_to_plain):
            assert share is None or 0 <= share.found <= share.total


def test_the_order_is_that_of_settings_and_plans():
    rows = summarise(made_up_run(arms=("embedded tree:16", "embedded tree:4", "embedded ar"), repeats=1))
    assert [row.arm.plan for row in rows[:3]] == ["ar", "tree:4", "tree:16"]
