"""Which plan is advised: never one slower than the chain, small trees at ties, plain where nothing pays."""

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.config import Mode
from ddtree.errors import ConfigError
from ddtree.tree.budget_cost import PLAIN, DraftPlan
from ddtree.tree.plan_rates import MARGIN, Forecast, Measured, Trial, rate_ratio
from ddtree.tree.recommend import advise, advise_mix

CHAIN = DraftPlan(Mode.CHAIN, 15)


def tree(budget):
    return DraftPlan(Mode.TREE, budget)


def measured(plan, rates, load=1, repeats=1):
    """Texts of 100 tokens, each at its rate a request."""
    trials = [
        Trial(f"t{i}", 100, 100 / rate, 40, 100, repeat)
        for repeat in range(repeats)
        for i, rate in enumerate(rates)
    ]
    return Measured(plan, load, tuple(trials))


def steady(plan, rate, load=1):
    """Ten texts, whose rates differ alike under every plan."""
    return measured(plan, [rate * (1 + 0.05 * i) for i in range(10)], load)


def plan_of(*evidence):
    return advise(evidence).plan


def test_a_tree_that_pays_is_advised_with_its_gain():
    advice = advise([steady(PLAIN, 50), steady(CHAIN, 100), steady(tree(16), 120), steady(tree(64), 150)])
    assert advice.plan == tree(64)
    assert advice.is_certain
    assert advice.chosen.over_chain.value == pytest.approx(1.5)
    assert advice.chosen.over_plain.value == pytest.approx(3.0)
    assert advice.reason == "tree:64 is 1.50 times the chain and 3.00 times plain decoding"
    assert [option.plan for option in advice.options] == [PLAIN, CHAIN, tree(16), tree(64)]


def test_the_smaller_of_two_trees_within_the_margin_is_advised():
    small = steady(tree(16), 150 * (1 - 0.9 * MARGIN))
    assert plan_of(steady(CHAIN, 100), steady(tree(64), 150), small) == tree(16)
    slower = steady(tree(16), 150 * (1 - 1.5 * MARGIN))
    assert plan_of(steady(CHAIN, 100), steady(tree(64), 150), slower) == tree(64)


def test_a_tree_within_the_margin_of_the_chain_is_not_worth_it():
    assert plan_of(steady(CHAIN, 100), steady(tree(16), 100 * (1 + 0.9 * MARGIN))) == CHAIN
    assert plan_of(steady(CHAIN, 100), steady(tree(16), 100 * (1 + 1.5 * MARGIN))) == tree(16)


def test_a_tree_that_loses_under_load_gives_the_chain():
    advice = advise([steady(PLAIN, 90, 32), steady(CHAIN, 100, 32), steady(tree(63), 70, 32)])
    assert (advice.plan, advice.is_certain) == (CHAIN, True)
    assert "no tree is surely more than 1% faster than the chain: the best, tree:63, is 0.70" in advice.reason


def test_a_drafter_that_never_hits_gives_plain_decoding():
    advice = advise([steady(PLAIN, 100), steady(CHAIN, 60), steady(tree(16), 55)])
    assert (advice.plan, advice.is_certain) == (PLAIN, True)
    assert "drafting does not pay" in advice.reason


def test_a_tree_that_beats_the_chain_but_not_plain_decoding_is_not_advised():
    assert plan_of(steady(PLAIN, 100), steady(CHAIN, 60), steady(tree(16), 90)) == PLAIN


def test_few_texts_are_within_the_noise():
    noisy = [measured(CHAIN, [100, 100, 100]), measured(tree(16), [90, 180, 130])]
    advice = advise(noisy)
    assert (advice.plan, advice.is_certain) == (CHAIN, False)
    one = advise([measured(CHAIN, [100]), measured(tree(16), [300])])
    assert (one.plan, one.is_certain) == (CHAIN, False)
    assert one.options[1].over_chain.value == pytest.approx(3.0)
    assert one.options[1].over_chain.low is None


def test_without_a_chain_trees_are_held_against_plain_decoding():
    advice = advise([steady(PLAIN, 100), steady(tree(16), 120)])
    assert (advice.plan, advice.chosen.over_chain) == (tree(16), None)
    assert plan_of(steady(PLAIN, 100), steady(tree(16), 99)) == PLAIN


def test_trees_alone_tell_no_gain():
    advice = advise([steady(tree(16), 120), steady(tree(32), 130)])
    assert (advice.plan, advice.is_certain) == (tree(32), False)
    assert "not either" in advice.reason


def test_other_texts_are_not_compared():
    other = Measured(tree(16), 1, (Trial("elsewhere", 100, 0.1),))
    advice = advise([steady(CHAIN, 100), other])
    assert advice.plan == CHAIN
    assert advice.options[1].over_chain is None


def test_only_common_texts_count():
    chain = measured(CHAIN, [100, 100, 1000])
    assert rate_ratio(measured(tree(8), [200, 200]), chain).value == pytest.approx(2.0)


def test_the_interval_is_the_delta_method_by_hand():
    one, other = measured(tree(8), [100, 125]), measured(CHAIN, [100, 100])
    ratio = rate_ratio(one, other)
    # Seconds 1 and 0.8 against 1 and 1; shares of each text: tokens cancel, +-(0.8 - 1) / 2 / 1.8.
    share = -1 / 1.8 + 1 / 2
    error = math.sqrt(2 * 2 * share**2)
    assert ratio.value == pytest.approx(2 / 1.8)
    assert ratio.high == pytest.approx(ratio.value * math.exp(12.706 * error))
    assert ratio.low == pytest.approx(ratio.value * math.exp(-12.706 * error))


def test_repeats_that_disagree_widen_the_interval():
    trials = [
        Trial(f"t{i}", 100, 1.0 if repeat else 0.8, repeat=repeat) for i in range(8) for repeat in (0, 1)
    ]
    chain = measured(CHAIN, [100] * 8, repeats=2)
    ratio = rate_ratio(Measured(tree(8), 1, tuple(trials)), chain)
    expected = statistics.stdev([math.log(1.25), 0.0]) / math.sqrt(2)
    assert math.log(ratio.high / ratio.value) == pytest.approx(2.365 * expected)


def test_a_load_counts_every_request():
    assert steady(CHAIN, 10, load=8).tokens_per_s == pytest.approx(8 * steady(CHAIN, 10).tokens_per_s)


def test_forecasts_stand_beside_measurements_but_are_not_chosen():
    hopeful = Forecast(tree(64), 1, 5.0, 5.0 / 200, 0.1)
    advice = advise([steady(CHAIN, 100), steady(tree(16), 120), hopeful])
    assert advice.plan == tree(16)
    assert "tree:64 is foretold to be" in advice.reason
    assert advice.options[-1].is_predicted


def test_a_forecast_beside_itself_is_surely_as_fast():
    foretold = Forecast(CHAIN, 1, 2.0, 0.02, 0.5)
    assert str(rate_ratio(foretold, foretold)) == "1.00"
    assert str(rate_ratio(foretold, Forecast(PLAIN, 1, 2.0, 0.02, 0.5))) == "1.00 (0.25 to 4.00)"


def test_forecasts_alone_are_judged_by_their_values():
    def at(plan, rate):
        return Forecast(plan, 4, 2.0, 4 * 2.0 / rate, 0.3)

    advice = advise([at(PLAIN, 100), at(CHAIN, 150), at(tree(16), 200)])
    assert advice.plan == tree(16)
    assert not advice.is_certain
    assert advice.chosen.is_predicted
    assert advise([at(PLAIN, 100), at(CHAIN, 150), at(tree(16), 150.5)]).plan == CHAIN


def test_one_plan_for_all_loads_loses_least():
    loads = {
        1: [steady(CHAIN, 100, 1), steady(tree(16), 150, 1), steady(tree(64), 160, 1)],
        32: [steady(CHAIN, 100, 32), steady(tree(16), 104, 32), steady(tree(64), 60, 32)],
    }
    mix = advise_mix(loads)
    assert mix.plan == tree(16)
    assert mix.losses[1] == pytest.approx(1 - 150 / 160)
    assert mix.losses[32] == pytest.approx(0.0)


def test_a_mix_without_a_common_plan_has_no_advice():
    assert advise_mix({1: [steady(CHAIN, 100, 1)], 8: [steady(tree(8), 100, 8)]}) is None


def test_a_plan_that_is_forecast_everywhere_is_not_the_mix():
    loads = {
        load: [steady(CHAIN, 100, load), Forecast(tree(16), load, 3.0, load * 3.0 / (1000 * load), 0.01)]
        for load in (1, 8)
    }
    assert advise_mix(loads).plan == CHAIN


@pytest.mark.parametrize(
    "evidence", [[], [steady(CHAIN, 1), steady(CHAIN, 2)], [steady(CHAIN, 1), steady(PLAIN, 1, 2)]]
)
def test_what_cannot_be_judged_is_refused(evidence):
    with pytest.raises(ConfigError, match="not allowed"):
        advise(evidence)


def test_impossible_numbers_are_refused():
    for make in (
        lambda: Trial("t", 1, 0.0), lambda: Trial("t", -1, 1.0), lambda: Measured(CHAIN, 1, ()),
        lambda: Measured(CHAIN, 0, (Trial("t", 1, 1.0),)), lambda: Forecast(CHAIN, 1, 0.0, 1.0, 0.1),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="not allowed"):
            make()


rates = st.lists(st.floats(1, 1000), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from([PLAIN, CHAIN, tree(4), tree(16), tree(64)]), rates, min_size=1))
def test_never_a_measured_lower_rate_than_the_chains(found):
    count = min(map(len, found.values()))
    evidence = [measured(plan, some[:count]) for plan, some in found.items()]
    advice = advise(evidence)
    assert advice.plan in found
    for option in advice.options:
        if option.plan == advice.plan and option.over_chain is not None:
            assert option.over_chain.value >= 1 - 1e-9
        if option.plan == advice.plan and option.over_plain is not None:
            assert option.over_plain.value >= 1 - 1e-9


@settings(max_examples=50, deadline=None)
@given(st.floats(1, 300), st.floats(1, 300), st.floats(1, 300), st.floats(1.0, 3.0))
def test_a_faster_tree_is_never_advised_less(plain, chain, rate, more):
    before = advise([steady(PLAIN, plain), steady(CHAIN, chain), steady(tree(16), rate)])
    after = advise([steady(PLAIN, plain), steady(CHAIN, chain), steady(tree(16), rate * more)])
    assert not (before.plan == tree(16) and after.plan != tree(16))


def test_accept_length_is_pooled_and_has_an_interval():
    found = Measured(tree(8), 1, (Trial("a", 31, 1, 10, 30), Trial("b", 11, 1, 10, 10)))
    assert found.accept_length.value == pytest.approx(2.0)
    assert found.accept_length.low < 2.0 < found.accept_length.high
    assert found.round_s == pytest.approx(2.0 / (42 / 2))
    assert steady(PLAIN, 10).accept_length.value == 1
    assert Measured(CHAIN, 1, (Trial("a", 5, 1),)).accept_length is None
