"""The order, figures and comparisons of bench_sglang."""

import argparse

import pytest

import bench_sglang
from bench_sglang import (
    accept_length,
    against_embedded,
    cell_name,
    check_context,
    figures,
    greedy,
    plan,
    show,
    summary,
)


def arguments(**changes):
    chosen = {
        "arms": ["plain", "dflash", "ddtree:15"], "sets": ["gsm8k", "humaneval"], "concurrency": [1, 8],
        "repeats": 3, "latency": False,
    }  # fmt: skip
    return argparse.Namespace(**(chosen | changes))


def answers(*counts, rounds=2):
    return [
        {"tokens": [0] * count, "rounds": rounds, "finish": {"type": "length"}, "begin_s": 1.0,
         "first_s": 1.5, "end_s": 1.5 + 0.1 * (count - 1)}
        for count in counts
    ]  # fmt: skip


def test_a_repeat_is_a_whole_grid_and_arms_take_turns():
    args = arguments()
    cells = list(plan(args))
    assert len(cells) == len(set(cells)) == 3 * 2 * 2 * 3
    assert [cell[3] for cell in cells] == sorted(cell[3] for cell in cells)
    groups = [cells[i : i + 3] for i in range(0, len(cells), 3)]
    for group in groups:
        assert {cell[0] for cell in group} == set(args.arms)
        assert len({cell[1:] for cell in group}) == 1
    first = [group[0][0] for group in groups if group[0][1:3] == (1, "gsm8k")]
    assert first == ["plain", "dflash", "ddtree:15"]  # a different arm begins in each repeat


def test_embedded_arms_run_once_and_streaming_last():
    args = arguments(arms=["ddtree:15", "embedded:15"], latency=True)
    cells = list(plan(args))
    assert [cell for cell in cells if cell[0] == "embedded:15"] == [
        ("embedded:15", 1, "gsm8k", 0),
        ("embedded:15", 1, "humaneval", 0),
    ]
    assert {cell[3] for cell in cells[-4:]} == {"streamed"}


def test_figures_of_a_batch():
    made = {"wall_s": 2.0, "answers": answers(11, 31)}
    cell = figures(made, streamed=False)
    assert cell == {"wall_s": 2.0, "tokens_per_s": 21.0, "tokens": [11, 31], "rounds": [2, 2]}
    cell = figures(made, streamed=True)
    assert cell["first_token_ms"] == 500.0
    assert cell["between_tokens_ms"] == 100.0


@pytest.mark.parametrize("fault", [{"error": "ValueError: x"}, {"finish": {"type": "abort"}}])
def test_a_failed_request_spoils_a_cell(fault):
    made = {"wall_s": 2.0, "answers": answers(11, 31)}
    made["answers"][1] |= fault
    with pytest.raises(RuntimeError, match="failed"):
        figures(made, streamed=False)


def test_accept_length_leaves_out_what_prefill_makes():
    cells = [{"tokens": [11, 31], "rounds": [4, 6]}, {"tokens": [3], "rounds": [2]}]
    assert accept_length(cells) == pytest.approx((10 + 30 + 2) / 12, abs=1e-4)
    assert accept_length([{"tokens": [9], "rounds": [0]}]) is None


def test_summary_takes_ratios_repeat_by_repeat():
    args = arguments(arms=["dflash", "ddtree:15"], sets=["gsm8k"], concurrency=[1])
    cells = {}
    for repeat, (base, tree) in enumerate([(100.0, 130.0), (50.0, 60.0), (200.0, 220.0)]):
        for arm, rate in (("dflash", base), ("ddtree:15", tree)):
            cell = {"tokens_per_s": rate, "tokens": [21], "rounds": [5]}
            cells[cell_name(arm, 1, "gsm8k", repeat)] = cell
    cells[cell_name("ddtree:15", 1, "gsm8k", "streamed")] = {"first_token_ms": 7.0, "tokens": [1]}
    base, tree = summary(cells, args)
    assert (base["tokens_per_s"], base["ratio_to_dflash"]) == (100.0, 1.0)
    assert (tree["tokens_per_s"], tree["slowest"], tree["fastest"]) == (130.0, 60.0, 220.0)
    assert tree["ratio_to_dflash"] == 1.2
    assert tree["ratio_range"] == [1.1, 1.3]
    assert tree["accept_length"] == 4.0
    assert tree["first_token_ms"] == 7.0


def test_summary_of_an_interrupted_run(capsys):
    args = arguments()
    cells = {cell_name("plain", 8, "humaneval", 0): {"tokens_per_s": 5.0, "tokens": [4], "rounds": [0]}}
    rows = summary(cells, args)
    assert [(row["arm"], row["repeats"], row["accept_length"]) for row in rows] == [("plain", 1, None)]
    assert "ratio_to_dflash" not in rows[0]
    show(rows)
    assert "plain" in capsys.readouterr().out


def test_pairs_with_the_embedded_engine():
    args = arguments(arms=["ddtree:15", "embedded:15", "embedded:31"], sets=["gsm8k"])
    same = {"tokens": [33, 65, 17], "rounds": [8, 16, 5]}
    cells = {cell_name("ddtree:15", 1, "gsm8k", 0): same, cell_name("embedded:15", 1, "gsm8k", 0): same}
    (row,) = against_embedded(cells, args)
    assert (row["node_budget"], row["difference_interval_95"]) == (15, [0.0, 0.0])
    assert row["plugin"] == row["embedded"] == pytest.approx(112 / 29, abs=1e-4)
    worse = {"tokens": [33, 65, 17], "rounds": [16, 32, 10]}
    cells[cell_name("ddtree:15", 1, "gsm8k", 0)] = worse
    (row,) = against_embedded(cells, args)
    assert row["interval_share"][1] < -0.4


def test_prompts_near_the_context_limit_are_refused():
    prompts = {"gsm8k": [[0] * 100, [0] * 300]}
    check_context(prompts, 128, 300 + 128 + bench_sglang.CONTEXT_MARGIN_TOKENS)
    with pytest.raises(SystemExit, match="context"):
        check_context(prompts, 128, 299 + 128 + bench_sglang.CONTEXT_MARGIN_TOKENS)


def test_requests_are_greedy():
    (made,) = greedy([[1, 2]], 9, stream=True)
    assert made == {
        "tokens": [1, 2], "sampling": {"temperature": 0.0, "max_new_tokens": 9}, "stream": True,
    }  # fmt: skip
