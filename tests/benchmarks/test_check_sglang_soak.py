"""The load of check_sglang_soak and what it counts as a failure."""

import argparse
import json

import pytest

from check_sglang_soak import (
    allowed_gap,
    is_finished,
    pool_problem,
    replayable,
    run_wave,
    summary,
    was_cut_off,
    wave_requests,
)

PROMPTS = [[number] * (20 + 7 * number) for number in range(1, 40)]
CONTEXT = 512


def arguments(**changes):
    chosen = {"seed": 1, "grammar_backend": "none", "wave_requests": 200}
    return argparse.Namespace(**(chosen | changes))


def test_a_wave_follows_from_its_seed_and_number():
    args = arguments()
    wave = wave_requests(args, 3, PROMPTS, CONTEXT)
    assert wave == wave_requests(args, 3, PROMPTS, CONTEXT)
    assert wave != wave_requests(args, 4, PROMPTS, CONTEXT)
    assert wave != wave_requests(arguments(seed=2), 3, PROMPTS, CONTEXT)


def test_a_wave_is_mixed_and_every_request_is_allowed():
    wave = wave_requests(arguments(), 0, PROMPTS, CONTEXT)
    to_limit = [place for place, row in enumerate(wave) if row["sampling"]["max_new_tokens"] is None]
    assert len(wave) == 202
    assert to_limit[1] == to_limit[0] + 1  # they run side by side
    for place, row in enumerate(wave):
        sampling = row["sampling"]
        if place in to_limit:
            assert CONTEXT - 200 < len(row["tokens"]) < CONTEXT
            assert "abort_after_s" not in row
            continue
        assert 0 < len(row["tokens"]) <= CONTEXT // 2
        assert sampling.get("min_new_tokens", 0) <= sampling["max_new_tokens"]
        assert len(row["tokens"]) + sampling["max_new_tokens"] <= CONTEXT
    assert wave[to_limit[0]]["tokens"] != wave[to_limit[1]]["tokens"]
    for is_so in (
        lambda row: row["stream"],
        lambda row: "abort_after_s" in row,
        lambda row: row["sampling"]["ignore_eos"],
        lambda row: row["sampling"]["temperature"] == 0,
        lambda row: "min_p" in row["sampling"],
        lambda row: "repetition_penalty" in row["sampling"],
        lambda row: len(row["tokens"]) < 10,
    ):
        assert 5 < sum(is_so(row) for row in wave) < 195
    assert not any("regex" in row["sampling"] for row in wave)


def test_regular_expressions_end_by_themselves():
    wave = wave_requests(arguments(grammar_backend="xgrammar"), 0, PROMPTS, CONTEXT)
    with_regex = [row["sampling"] for row in wave if "regex" in row["sampling"]]
    assert len(with_regex) > 10
    assert not any(sampling["ignore_eos"] for sampling in with_regex)


@pytest.mark.parametrize(
    ("request_", "answer", "finished", "cut_off"),
    [
        ({}, {"tokens": [1], "finish": {"type": "length"}}, True, False),
        ({}, {"tokens": [1], "finish": {"type": "stop"}}, True, False),
        ({"abort_after_s": 1}, {"tokens": [1], "finish": {"type": "stop"}}, True, False),
        ({"abort_after_s": 1}, {"tokens": [1], "finish": {"type": "abort"}}, False, True),
        ({"abort_after_s": 1}, {"error": "ValueError: Request x was aborted"}, False, True),
        ({"abort_after_s": 1}, {"error": "ValueError: other"}, False, False),
        ({}, {"tokens": [1], "finish": {"type": "abort"}}, False, False),
        ({}, {"error": "RuntimeError: x"}, False, False),
    ],
)
def test_what_became_of_a_request(request_, answer, finished, cut_off):
    assert (is_finished(answer), was_cut_off(request_, answer)) == (finished, cut_off)


class FakeProcess:
    """Answers as an engine would, with a pool that is whole or not."""

    def __init__(self, answers=(), used=0):
        self.answers, self.used = list(answers), used

    def call(self, name, **arguments):
        return {
            "flush": {"success": True},
            "pool": {"used_tokens": self.used, "capacity_tokens": 100, "requests": 0},
            "run": {"wall_s": 1.0, "answers": self.answers},
        }[name]


def test_a_lost_slot_is_a_problem(monkeypatch):
    monkeypatch.setattr("check_sglang_soak.POOL_WAIT_S", 0)
    assert pool_problem(FakeProcess()) is None
    assert "'used_tokens': 16" in pool_problem(FakeProcess(used=16))


def test_a_wave_keeps_what_can_be_replayed():
    answers = [
        {"tokens": [1, 2], "finish": {"type": "length"}, "rounds": 1},
        {"tokens": [3], "finish": {"type": "abort"}},
        {"error": "RuntimeError: x"},
    ]
    requests = [{}, {"abort_after_s": 0.1}, {}]
    wave = run_wave(FakeProcess(answers), requests, 3)
    assert wave["answers"] == [{"tokens": [1, 2], "finish": {"type": "length"}}, None, None]
    assert (wave["finished"], wave["cut_off"], wave["tokens"]) == (1, 1, 3)
    assert wave["failed"] == [{"request": 2, "answer": {"error": "RuntimeError: x", "finish": None}}]
    assert wave["pool_problem"] is None


def test_eps_comes_from_a_replay_in_the_same_format(tmp_path):
    assert allowed_gap("float32", None) == 1e-3
    file = tmp_path / "replay.json"
    file.write_text(
        json.dumps({"settings": {"dtype": "bfloat16"}, "verdict": {"eps": 0.5}}), encoding="utf-8"
    )
    assert allowed_gap("bfloat16", file) == 0.5
    with pytest.raises(SystemExit, match="--eps-from"):
        allowed_gap("bfloat16", None)
    with pytest.raises(SystemExit, match="not float16"):
        allowed_gap("float16", file)


def test_without_the_plugin_only_greedy_outputs_follow_from_the_target():
    requests = [
        {"sampling": {"temperature": 0.0}},
        {"sampling": {"temperature": 1.0}},
        {"sampling": {"temperature": 0.0}},
    ]
    answers = [{"tokens": [1]}, {"tokens": [2]}, None]
    assert replayable("plain", requests, answers) == (requests[:1], answers[:1])
    assert replayable("ddtree:31", requests, answers) == (requests[:2], answers[:2])


def test_rows_are_summed():
    row = {
        "outputs": 2, "tokens": 9, "not_best": 1, "planted": 2, "planted_found": 2, "violations": [{}],
        "endings": [], "known_endings": [], "errors": [], "max_gap": 0.25,
        "gaps_above": {"0.125": 1, "0.5": 0},
    }  # fmt: skip
    both = summary([row, {**row, "max_gap": 0.5, "gaps_above": {"0.125": 2, "0.5": 1}}])
    assert (both["outputs"], both["violations"], both["max_gap"]) == (4, 2, 0.5)
    assert both["gaps_above"] == {"0.125": 3, "0.5": 1}
