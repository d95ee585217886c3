"""Forecasts: accept lengths rise with the budget, round times come from neighbours or the cost model."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.config import Mode
from ddtree.tree.budget_cost import PLAIN, DraftPlan
from ddtree.tree.cost_calibrations import EMBEDDED, SGLANG_LARGE, SGLANG_SMALL, sglang_calibration
from ddtree.tree.cost_catalogue import H200, PAIRS
from ddtree.tree.cost_fit import typical_error
from ddtree.tree.cost_model import Load, round_cost
from ddtree.tree.forecast import (
    RoundTime,
    RoundTimes,
    accept_lengths,
    calibrated_times,
    forecasts,
    interpolated_times,
    isotonic,
    modelled_times,
    round_times_of,
)
from ddtree.tree.plan_rates import Measured, Ratio, Trial

CHAIN = DraftPlan(Mode.CHAIN, 15)
OURS = PAIRS["SmolLM2-135M"]


def tree(budget):
    return DraftPlan(Mode.TREE, budget)


def point(plan, seconds, load=1):
    return RoundTime(plan, load, seconds, load)


def measured(plan, length, load=1, rounds=10):
    trials = tuple(Trial(f"t{i}", length * rounds, 1.0, rounds, length * rounds) for i in range(3))
    return Measured(plan, load, trials)


def test_round_times_lie_between_their_neighbours_in_logarithms():
    times = interpolated_times([point(tree(7), 1.0), point(tree(31), 4.0)])
    assert times.predict(tree(15), 1) == pytest.approx(2.0)
    assert times.predict(tree(7), 1) == pytest.approx(1.0)
    assert times.predict(tree(63), 1) is None
    assert times.predict(tree(15), 2) is None


def test_round_times_lie_between_loads_of_the_same_plan():
    times = interpolated_times([point(CHAIN, 1.0, 1), point(CHAIN, 4.0, 16), point(PLAIN, 9.0, 4)])
    assert times.predict(CHAIN, 4) == pytest.approx(2.0)
    assert times.predict(CHAIN, 32) is None


def test_the_leave_one_out_error_equals_a_hand_computation():
    times = interpolated_times([point(tree(7), 1.0), point(tree(15), 3.0), point(tree(31), 4.0)])
    # Only the middle one has neighbours: foretold 2, measured 3.
    assert [(p.seconds, pytest.approx(p.predicted_s)) for p in times.left_out] == [(3.0, 2.0)]
    assert times.error == pytest.approx(1.5 - 1)
    assert interpolated_times([point(tree(7), 1.0), point(tree(31), 4.0)]).error is None


def test_the_cost_model_finds_the_times_it_made():
    truth = EMBEDDED.calibration
    plans = (PLAIN, OURS.chain, tree(7), tree(31), tree(127))
    points = [point(p, round_cost(OURS, H200, truth, Load(1, 300), p).total_s) for p in plans]
    times = modelled_times(points, OURS, H200, truth, 300)
    for known in points:
        assert times.predict(known.plan, 1) == pytest.approx(known.seconds, rel=0.01)
    assert times.error == pytest.approx(typical_error(times.left_out))
    assert times.error < 0.02
    assert len(times.left_out) == len(points)


def test_the_cost_model_counts_the_requests_in_flight():
    truth = SGLANG_SMALL.calibration
    seconds = round_cost(OURS, H200, truth, Load(20, 300), PLAIN).total_s
    nominal = RoundTime(PLAIN, 32, seconds * 32 / 20, in_flight=20)
    points = [
        nominal,
        *(point(tree(b), round_cost(OURS, H200, truth, Load(1, 300), tree(b)).total_s) for b in (7, 15, 31)),
    ]
    times = modelled_times(points, OURS, H200, truth, 300)
    assert times.left_out[0].seconds == pytest.approx(seconds)
    assert times.left_out[0].predicted_s == pytest.approx(seconds, rel=0.02)


def test_accept_lengths_rise_with_the_budget():
    lengths = accept_lengths([measured(tree(8), 3.0), measured(tree(32), 2.8), measured(CHAIN, 2.0)])
    assert lengths(tree(8)).value == pytest.approx(2.9)
    assert lengths(tree(16)).value == pytest.approx(2.9)
    assert lengths(CHAIN).value == pytest.approx(2.0)
    assert lengths(PLAIN) == Ratio(1.0, 1.0, 1.0)
    assert lengths(tree(64)) is None
    assert accept_lengths([])(CHAIN) is None


def test_accept_lengths_of_several_loads_are_pooled():
    lengths = accept_lengths([measured(tree(8), 3.0, 1, 10), measured(tree(8), 4.0, 8, 30)])
    assert lengths(tree(8)).value == pytest.approx(3.75)


def test_an_accept_length_between_budgets_lies_on_the_line_of_their_logarithms():
    lengths = accept_lengths([measured(tree(4), 2.0), measured(tree(64), 4.0)])
    assert lengths(tree(16)).value == pytest.approx(3.0)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 10)), min_size=1, max_size=12))
def test_isotonic_rises_and_keeps_the_weighted_sum(entries):
    values, weights = [v for v, _ in entries], [w for _, w in entries]
    rising = isotonic(values, weights)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(rising))
    assert math.isclose(
        sum(v * w for v, w in zip(rising, weights, strict=True)),
        sum(v * w for v, w in zip(values, weights, strict=True)), abs_tol=1e-6,
    )  # fmt: skip


def test_forecasts_take_the_first_way_that_can_tell_and_carry_its_error():
    lengths = accept_lengths([measured(tree(8), 3.0), measured(tree(32), 3.0)])
    silent = RoundTimes("silent", lambda plan, load: None, 0.01)
    told = RoundTimes("told", lambda plan, load: 0.5, 0.2)
    made = forecasts(lengths, (silent, told), [tree(16), tree(64)], 4)
    assert [(f.plan, f.num_requests, f.round_s) for f in made] == [(tree(16), 4, 0.5)]
    assert made[0].tokens_per_s == pytest.approx(4 * 3.0 / 0.5)
    assert made[0].log_error >= math.log(1.2)
    assert forecasts(lengths, (RoundTimes("no error", lambda plan, load: 1.0, None),), [tree(16)], 1) == []


def test_times_for_another_machine_are_the_cost_models():
    times = calibrated_times(OURS, H200, SGLANG_SMALL.calibration, 0.09, 300, tp_size=2)
    # A chain has the pair's own depth, whatever it was called.
    assert times.predict(DraftPlan(Mode.CHAIN, 3), 8) == pytest.approx(
        round_cost(OURS, H200, SGLANG_SMALL.calibration, Load(8, 300, 2), OURS.chain).total_s
    )
    assert times.error == 0.09


def test_round_times_are_read_from_what_was_measured():
    found = round_times_of([measured(tree(8), 3.0, 4), Measured(CHAIN, 4, (Trial("a", 9, 1),))])
    assert [(p.plan, p.num_requests, pytest.approx(p.seconds), p.in_flight) for p in found] == [
        (tree(8), 4, 0.1, 4)
    ]


def test_the_calibration_fits_the_size_of_the_target():
    assert sglang_calibration(OURS.target) is SGLANG_SMALL
    assert sglang_calibration(PAIRS["Qwen3-8B"].target) is SGLANG_LARGE
