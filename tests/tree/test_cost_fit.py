"""The fit finds the numbers that made its points, and says honestly how far off it is."""

from dataclasses import replace

import pytest

from ddtree.config import Mode
from ddtree.errors import ConfigError
from ddtree.tree.budget_cost import PLAIN, DraftPlan
from ddtree.tree.cost_catalogue import GPUS, PAIRS
from ddtree.tree.cost_fit import CostPoint, Prediction, describe, fit, leave_one_out, typical_error
from ddtree.tree.cost_model import Calibration, Load, round_cost

START = Calibration(
    bandwidth_share=0.5, flop_share=0.5, layer_latency_s=20e-6, tree_s=50e-6, state_bandwidth_share=0.2,
    step_host_s=1e-4, round_host_s=1e-4, request_host_s=0.0, overlaps_host=True,
)  # fmt: skip
TRUE = replace(START, bandwidth_share=0.8, flop_share=0.35, layer_latency_s=35e-6)
FREE = ("bandwidth_share", "flop_share", "layer_latency_s")


def point(target, gpu, plan, requests, *, off=1.0):
    def predict(calibration):
        return round_cost(PAIRS[target], GPUS[gpu], calibration, Load(requests, 500), plan).total_s

    return CostPoint(f"{target} {plan} {requests}", off * predict(TRUE), predict)


def points(**off):
    plans = (PLAIN, DraftPlan(Mode.CHAIN, 15), DraftPlan(Mode.TREE, 63))
    return [
        point(target, gpu, plan, requests, **off)
        for target, gpu in (("Qwen3-8B", "H200"), ("Qwen3-4B", "B200"))
        for plan in plans
        for requests in (1, 32)
    ]


def test_the_true_calibration_is_found():
    found = fit(points(), START, FREE, prior_spread=100)
    for name in FREE:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.01), name
    assert replace(found, **{name: getattr(START, name) for name in FREE}) == START


def test_what_the_points_do_not_show_stays():
    found = fit(points(), START, (*FREE, "state_bandwidth_share"))
    assert found.state_bandwidth_share == pytest.approx(START.state_bandwidth_share)


def test_shares_stay_at_most_one():
    found = fit(points(off=0.2), START, FREE)
    assert max(found.bandwidth_share, found.flop_share) <= 1


def test_a_tight_prior_holds_and_a_loose_one_lets_go():
    errors = [
        abs(fit(points(), START, FREE, prior_spread=spread).bandwidth_share / TRUE.bandwidth_share - 1)
        for spread in (0.01, 1.0, 100.0)
    ]
    assert errors[0] > 0.3
    assert errors[0] > errors[1] > errors[2]


def test_a_point_left_out_is_foretold_by_the_others():
    predictions = leave_one_out(points(), START, FREE)
    assert [p.name for p in predictions] == [p.name for p in points()]
    assert typical_error(predictions) < 0.02


def test_a_wrong_point_is_not_believed_when_it_is_left_out():
    given = points()
    planted = [replace(given[0], seconds=3 * given[0].seconds), *given[1:]]
    assert leave_one_out(planted, START, FREE)[0].error == pytest.approx(1 / 3 - 1, abs=0.05)


def test_errors_by_hand():
    predictions = [Prediction("a", 2.0, 3.0), Prediction("b", 3.0, 2.0)]
    assert [p.error for p in predictions] == [pytest.approx(0.5), pytest.approx(-1 / 3)]
    assert typical_error(predictions) == pytest.approx(0.5)
    text = describe(predictions)
    assert "+50.0%" in text
    assert text.endswith("typical error, each point left out: 50%")


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_time_must_be_above_zero(seconds):
    with pytest.raises(ConfigError, match="above 0"):
        fit([replace(points()[0], seconds=seconds)], START, FREE)


def test_no_points_no_fit():
    with pytest.raises(ConfigError, match="points"):
        fit([], START, FREE)
