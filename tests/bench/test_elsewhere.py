"""Predictions for another machine: accept lengths as measured, times by the cost model."""

import json

import pytest

from ddtree.bench.elsewhere import Elsewhere, draft_pair, predict_elsewhere, with_group
from ddtree.bench.recommendation import Recommendation, markdown
from ddtree.config import Mode
from ddtree.errors import ConfigError
from ddtree.tree.budget_cost import PLAIN, DraftPlan
from ddtree.tree.cost_calibrations import SGLANG_LARGE
from ddtree.tree.cost_catalogue import H200, PAIRS
from ddtree.tree.cost_model import Load, round_cost
from ddtree.tree.plan_rates import Measured, Trial

CHAIN = DraftPlan(Mode.CHAIN, 15)
QWEN = PAIRS["Qwen3-8B"]


def tree(budget):
    return DraftPlan(Mode.TREE, budget)


def measured(plan, length):
    return Measured(plan, 1, tuple(Trial(f"t{i}", length * 10, 1.0, 10, length * 10) for i in range(4)))


EVIDENCE = [measured(CHAIN, 6.0), measured(tree(16), 7.0), measured(tree(64), 7.8)]


def test_every_rate_is_the_cost_models():
    group = predict_elsewhere(EVIDENCE, QWEN, Elsewhere("H200", (1, 32), context_tokens=500), 0.0, ("a",))
    assert sorted(group.by_load) == [1, 32]
    for load, advice in group.by_load.items():
        options = {option.plan: option for option in advice.options}
        assert set(options) == {PLAIN, CHAIN, tree(16), tree(64)}
        for plan, length in ((PLAIN, 1.0), (CHAIN, 6.0), (tree(64), 7.8)):
            seconds = round_cost(QWEN, H200, SGLANG_LARGE.calibration, Load(load, 500), plan).total_s
            assert options[plan].tokens_per_s == pytest.approx(load * length / seconds)
            assert options[plan].is_predicted
    assert group.is_sglang
    assert group.by_load[1].plan.mode is Mode.TREE


def test_load_makes_wide_trees_lose():
    group = predict_elsewhere(EVIDENCE, QWEN, Elsewhere("A100 80GB", (1, 256)), 0.0, ("a",))
    widths = {load: advice.plan.node_budget for load, advice in group.by_load.items()}
    assert widths[256] < widths[1]


def test_the_text_says_that_it_is_predicted_and_how_far_off():
    group = predict_elsewhere(EVIDENCE, QWEN, Elsewhere("B200", (1,), tp_size=2), 0.0, ("a",))
    text = markdown(with_group(Recommendation("x", "Qwen/Qwen3-8B", "D", "cpu", ()), group))
    assert "sglang on 2 x B200" in text
    assert "typically 23% off" in text
    assert "a forecast: measure it" in text
    assert "| measured |" not in text


def test_what_finds_no_room_is_said():
    group = predict_elsewhere(
        EVIDENCE, PAIRS["Qwen3-32B"], Elsewhere("A100 80GB", (64,), context_tokens=8192), 0.0, ("a",)
    )
    assert any("without room in memory at 64 at once" in note for note in group.notes)


def test_without_accept_lengths_nothing_is_predicted():
    with pytest.raises(ConfigError, match="no accept length is known"):
        predict_elsewhere([Measured(CHAIN, 1, (Trial("a", 1, 1.0),))], QWEN, Elsewhere("H200"), 0.0, ())


@pytest.mark.parametrize("change", [
    {"gpu": "H900"}, {"gpu": ""}, {"concurrency": ()}, {"concurrency": (0,)}, {"tp_size": 0},
    {"context_tokens": 0},
])  # fmt: skip
def test_machines_that_are_not_allowed(change):
    with pytest.raises(ConfigError, match="is not allowed"):
        Elsewhere(**{"gpu": "H200", **change})


def test_a_pair_by_its_configs(tmp_path):
    target = {
        "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    }  # fmt: skip
    drafter = target | {
        "num_hidden_layers": 5, "block_size": 16, "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33]}
    }  # fmt: skip
    for name, config in (("t", target), ("d", drafter)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    pair = draft_pair(str(tmp_path / "t"), str(tmp_path / "d"))
    assert pair.target.dense_weights == QWEN.target.dense_weights
    assert pair.drafter.dense_weights == QWEN.drafter.dense_weights
    assert draft_pair("Qwen/Qwen3-8B", "auto") is QWEN
    (tmp_path / "d" / "config.json").write_text("no JSON")
    with pytest.raises(ConfigError, match="cannot be read"):
        draft_pair(str(tmp_path / "t"), str(tmp_path / "d"))
    with pytest.raises(ConfigError, match="catalogue"):
        draft_pair(str(tmp_path / "none"), "auto")
