"""The plugin's trace of an engine's rounds, beside what the tests' own recorder saw of them."""

import pytest

from ddtree.trace.figures import FigureCheck
from ddtree.trace.findings import round_findings
from ddtree.trace.read import read_trace
from ddtree.trace.replay import Replayer
from ddtree.trace.run_file import read_run
from sglang_kit.prompts import prompt
from sglang_kit.runs import request, run_engine, step

pytestmark = pytest.mark.sglang

NODE_BUDGET = 15
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SAMPLED = {"temperature": 0.9, "top_k": 20, "sampling_seed": 11, "frequency_penalty": 0.1, "ignore_eos": True}
LENGTHS = (1, 2, 9, 24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trace")


@pytest.fixture(scope="module")
def run(qwen3_pair, folder):
    from sglang_kit.reference import decode

    prompts = [prompt(seed, 12) for seed in range(len(LENGTHS))]
    plan = {"temperature": 0.0, "max_new_tokens": max(LENGTHS) + 8}
    plans = [decode(qwen3_pair.target, p, plan).tokens for p in prompts]
    requests = [
        request(f"{name}-{i}", p, params | {"max_new_tokens": num_tokens}, plan=plans[i])
        for name, params in (("greedy", GREEDY), ("sampled", SAMPLED))
        for i, (p, num_tokens) in enumerate(zip(prompts, LENGTHS, strict=True))
    ]
    aborted = request("aborted", prompts[0], GREEDY | {"max_new_tokens": 400}, abort_after_tokens=6)
    alone = request("alone", prompts[1], GREEDY | {"max_new_tokens": 12}, plan=plans[1])
    # The trace's thread has had its turn when the last request comes.
    last = request("last", prompts[1], GREEDY | {"max_new_tokens": 1}, delay_s=1.0)
    config = {"node_budget": NODE_BUDGET, "trace_file": "trace.jsonl", "trace_detail": "full"}
    steps = [step([*requests, aborted]), step([alone]), step([last])]
    return run_engine(folder, qwen3_pair, steps, config=config)


@pytest.fixture(scope="module")
def trace(run, folder):
    return read_trace(folder / "trace.jsonl")


@pytest.fixture(scope="module")
def traced(trace):
    return {each.request.server_id: each for each in trace.requests}


def test_the_header_says_who_decoded_with_what(trace, qwen3_pair):
    assert (trace.header.engine, trace.header.device, trace.header.dtype) == ("sglang", "cpu", "float32")
    assert trace.header.target["name"] == str(qwen3_pair.target_path)
    assert trace.header.drafter["folder_sha256"] != trace.header.target["folder_sha256"]
    assert trace.header.settings["node_budget"] == NODE_BUDGET


def test_requests_end_with_the_tokens_that_clients_got(run, traced):
    finished = [rid for rid in run.outputs if rid.startswith(("greedy", "sampled"))]
    assert len(finished) == 2 * len(LENGTHS)
    for rid in finished:
        assert list(traced[rid].end.tokens) == run.tokens(rid)
        assert traced[rid].end.finish_reason == "length"
    assert traced["aborted"].end.finish_reason == "abort"
    assert len(traced["aborted"].end.tokens) >= 6


def test_rounds_are_those_that_ran_and_no_more(run, traced):
    """One more runs under overlap after a request's end; its tokens are thrown away."""
    num_rounds = 0
    for rid in set(traced) - {"last"}:
        each = traced[rid]
        prompt_len = len(each.request.prompt_tokens)
        end = prompt_len + len(each.end.tokens) - 1
        seen = [
            (r["prefix_len"], r["root_token"], r["accept_len"])
            for r in run.rounds.get(rid, [])
            if r["prefix_len"] < end
        ]
        assert [(r.position, r.root, len(r.accept_tokens)) for r in each.rounds] == seen
        assert [r.round for r in each.rounds] == list(range(1, len(seen) + 1))
        assert each._replace(end=None).tokens[: len(each.end.tokens)] == (each.end.tokens if seen else ())
        num_rounds += len(seen)
    assert num_rounds > 20


def test_paths_are_of_columns_that_rise_from_the_root(traced):
    paths = [r.accept_indices for each in traced.values() for r in each.rounds]
    assert all(path[0] == 0 and list(path) == sorted(set(path)) for path in paths)
    assert any(len(path) > 2 for path in paths)
    assert max(max(path) for path in paths) <= NODE_BUDGET
    assert all(
        len(r.accept_tokens) == len(r.accept_indices) and r.round_ms > 0
        for each in traced.values() for r in each.rounds
    )  # fmt: skip


def test_sampling_parameters_are_in_the_names_of_ours(traced):
    greedy, sampled = traced["greedy-3"].request.sampling, traced["sampled-3"].request.sampling
    assert (greedy["temperature"], greedy["top_k"]) == (0.0, 0)
    assert (sampled["temperature"], sampled["top_k"], sampled["seed"]) == (0.9, 20, 11)
    assert (sampled["frequency_penalty"], sampled["max_tokens"]) == (0.1, LENGTHS[3])


def test_rounds_fit_their_trees(folder, traced):
    assert list(round_findings(read_run(folder / "trace.jsonl"))) == []
    rounds = [r for each in traced.values() for r in each.rounds]
    assert all(1 < len(r.tokens) == len(r.parents) <= NODE_BUDGET + 1 for r in rounds)
    assert all(r.log_probs[0] == 0 and list(r.log_probs) == sorted(r.log_probs, reverse=True) for r in rounds)


def test_figures_are_the_target_s_where_nothing_changed_the_logits(folder, qwen3_pair):
    run = read_run(folder / "trace.jsonl")
    check = FigureCheck(run.answers, slack=1e-2)
    replayer = Replayer(qwen3_pair.target, ())
    for index, logits in replayer.logits(run.outputs):
        check.add(index, logits)
    assert list(check.findings()) == []
    assert check.largest > 0
    # The others shared batches with penalties; prefill's token has no figure.
    known = [[figure is not None for figure in answer.margins] for answer in run.answers if answer.margins]
    assert known == [[False] + [True] * 11]
