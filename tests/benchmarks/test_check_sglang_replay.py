"""What check_sglang_replay asks for and how it judges a cell; the replay itself is in tests/trace."""

import argparse

import pytest
import torch

from check_sglang_replay import (
    MIXES,
    block_size,
    cell_name,
    is_lossless,
    judge_all,
    judge_cell,
    overruns_of,
    replays,
    requests_of,
    sampled_parameters,
    texts_as_plain,
)
from ddtree.trace.replay import Replayer
from sglang_common import Results
from tiny_models import tiny_qwen3

STOP = (2,)
PROMPTS = [[5, 17, 91], [8, 44], [60, 61, 62, 63]]


@pytest.fixture(scope="module")
def model():
    return tiny_qwen3(vocab_size=97)


@torch.inference_mode()
def greedy_answers(model, length=16):
    answers = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(length):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            logits[2] = float("-inf")  # no text ends early
            tokens.append(int(logits.argmax()))
        answers.append({"tokens": tokens[len(prompt) :], "finish": {"type": "length"}})
    return answers


def greedy_requests(length=16):
    requests = requests_of("greedy", PROMPTS, length, with_regex=False)
    for request in requests:
        request["sampling"]["logit_bias"] = {"2": -1e9}
    return requests


def test_a_greedy_cell_passes_and_its_planted_faults_are_found(model):
    row = judge_cell(Replayer(model, STOP), greedy_requests(), greedy_answers(model), 1e-3, 512, plant=True)
    assert (row["outputs"], row["tokens"], row["violations"], row["endings"]) == (3, 48, [], [])
    assert row["planted"] == row["planted_found"] == 3
    assert row["planted_smallest_gap"] > 1e-2
    assert is_lossless(row)


def test_a_wrong_token_ending_or_request_spoils_a_cell(model):
    replayer, requests = Replayer(model, STOP), greedy_requests()
    wrong, short, failed = (greedy_answers(model) for _ in range(3))
    wrong[1]["tokens"][4] = (wrong[1]["tokens"][4] + 1) % 97
    short[0]["tokens"] = short[0]["tokens"][:-1]
    failed[2] = {"error": "ValueError: no"}
    row = judge_cell(replayer, requests, wrong, 1e-3, 512, plant=False)
    assert (row["violations"][0]["output"], row["violations"][0]["index"]) == (1, 4)
    assert not is_lossless(row)
    row = judge_cell(replayer, requests, short, 1e-3, 512, plant=False)
    assert (row["violations"], row["endings"][0]["output"]) == ([], 0)
    assert not is_lossless(row)
    row = judge_cell(replayer, requests, failed, 1e-3, 512, plant=False)
    assert row["errors"] == [{"output": 2, "error": "ValueError: no"}]
    assert not is_lossless(row)


def engine(version, algorithm):
    return {"sglang": version, "settings": {"speculative_algorithm": algorithm}}


def test_an_overrun_of_the_release_that_has_them_spoils_no_cell(model):
    requests, answers = greedy_requests(), greedy_answers(model)
    for request, answer in zip(requests, answers, strict=True):
        tokens = answer["tokens"]
        request["sampling"]["stop_token_ids"] = [next(token for token in tokens if token != tokens[0])]
    known, unknown = (
        judge_cell(Replayer(model, STOP), requests, answers, 1e-3, 512, plant=False, overrun_tokens=n)
        for n in (15, 0)
    )
    assert (len(known["known_endings"]), known["endings"]) == (3, [])
    assert (unknown["known_endings"], len(unknown["endings"])) == ([], 3)
    assert is_lossless(known)
    assert not is_lossless(unknown)


def test_only_one_release_overruns_and_only_with_speculation():
    assert overruns_of(engine("0.5.17", "DDTREE"), 16) == 16
    assert overruns_of(engine("0.5.17", None), 16) == 0
    assert overruns_of(engine("0.5.18", "DDTREE"), 16) == 0
    assert block_size(argparse.Namespace(drafter="auto", model="smollm2-135m")) == 16
    assert block_size(argparse.Namespace(drafter="none", model="smollm2-135m")) == 0


def test_a_planted_fault_that_passes_is_no_proof(model):
    blind = judge_cell(Replayer(model, STOP), greedy_requests(), greedy_answers(model), 1e9, 512, plant=True)
    assert (blind["planted"], blind["planted_found"]) == (3, 0)
    assert not is_lossless(blind)


def test_short_outputs_get_no_planted_fault(model):
    requests, answers = greedy_requests(length=15), greedy_answers(model, length=15)
    row = judge_cell(Replayer(model, STOP), requests, answers, 1e-3, 512, plant=True)
    assert (row["outputs"], row["planted"]) == (3, 0)


def test_all_cells_are_judged_with_the_plain_arms_eps(model, tmp_path):
    results = Results(tmp_path / "r.json", {})
    cells = [("plain", 1, "greedy"), ("ddtree:31", 1, "greedy")]
    for arm, _, _ in cells:
        results.cells[cell_name(arm, 1, "greedy")] = {"answers": greedy_answers(model)}
        results.engines[arm] = engine("0.5.17", None) | {"context_tokens": 512}
    close = results.cells[cell_name("plain", 1, "greedy")]["answers"][0]["tokens"]
    close[5] = (close[5] + 1) % 97  # a plain output that is off sets eps
    replayer = Replayer(model, STOP)
    judge_all(replayer, results, cells, {"greedy": greedy_requests()}, "bfloat16", 4)
    verdict = results.verdict
    assert verdict["eps"] == pytest.approx(2 * verdict["plain_max_gaps"]["plain 1 greedy"])
    assert set(verdict["rows"]) == {"plain 1 greedy", "ddtree:31 1 greedy"}
    assert texts_as_plain(results, cells) == {"plain 1 greedy": "3 of 3", "ddtree:31 1 greedy": "2 of 3"}
    del results.cells["plain 1 greedy"]
    with pytest.raises(SystemExit, match="no eps"):
        judge_all(replayer, results, cells, {"greedy": greedy_requests()}, "bfloat16", 4)


def test_only_keyed_noise_is_replayed():
    assert replays("plain", "greedy")
    assert replays("ddtree:31", "sampled")
    assert not replays("dflash", "sampled")


def test_sampled_requests_cover_every_mix_with_seeds_of_their_own():
    requests = requests_of("sampled", [[1]] * 40, 32, with_regex=False)
    seeds = {request["sampling"]["sampling_seed"] for request in requests}
    assert len(seeds) == 40
    for mix in MIXES:
        kept = {key: value for key, value in mix.items() if key != "min_new_tokens"}
        assert any(kept.items() <= request["sampling"].items() for request in requests)
    for request in requests:
        assert request["sampling"].get("min_new_tokens", 0) <= request["sampling"]["max_new_tokens"]
    assert "regex" in sampled_parameters(3, with_regex=True)
    assert "regex" not in sampled_parameters(3, with_regex=False)
