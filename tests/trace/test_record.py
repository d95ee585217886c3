"""Recorded requests: the rounds sum up to the tokens, trees and paths are sound, and nothing else changes."""

import dataclasses
import logging
import os
from pathlib import Path

import pytest

from ddtree.config import Mode, SamplingParams
from ddtree.engine.request import FinishReason, Request
from ddtree.errors import ConfigError, ContextLengthError, DDTreeError
from ddtree.trace.read import read_trace
from ddtree.trace.record import TraceRecorder
from ddtree.trace_format import Detail
from engine_kit import (
    PROMPT,
    VOCAB_SIZE,
    Recorder,
    plain,
    real_engine,
    rounds_of,
    scripted_engine,
    tiny_engine,
    tiny_target,
)
from tiny_models import tiny_llama

PLANS = [(Mode.AR, "auto"), (Mode.CHAIN, "auto"), (Mode.TREE, 12), (Mode.TREE, "auto")]
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=40),
    "sampled": SamplingParams(max_tokens=40, temperature=1.1, seed=7, top_k=30, logit_bias={3: 1.5}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"), tiny_llama(vocab_size=VOCAB_SIZE))


@pytest.fixture(scope="module")
def engines(target):
    """For each way of sampling an engine whose drafter is often right."""
    return {name: scripted_engine(target, sampling) for name, sampling in SAMPLINGS.items()}


def record(engine, path, *requests, detail=Detail.SUMMARY):
    """Generations and the trace of them."""
    with TraceRecorder(path, detail) as recorder:
        generations = [recorder.generate(engine, request) for request in requests]
    return generations, read_trace(path)


def check_tokens(traced, generation):
    """Rounds begin where the ones before ended, and their tokens are the request's."""
    assert traced.end.tokens == generation.tokens
    tokens = list(generation.tokens[:1])
    for number, each in enumerate(traced.rounds, 1):
        assert each.round == number
        assert each.position == len(traced.request.prompt_tokens) + len(tokens) - 1
        assert each.root == tokens[-1]
        assert len(each.accept_indices) == len(each.accept_tokens)
        tokens += each.accept_tokens
    assert tuple(tokens[: len(generation.tokens)]) == generation.tokens
    assert len(tokens) - len(generation.tokens) < len(traced.rounds[-1].accept_tokens)
    assert traced._replace(end=None).tokens == tuple(tokens)


def check_tree(each):
    """Prefix-closed, parents first, scores falling along links; the path is in it and carries the tokens."""
    assert (each.tokens[0], each.parents[0], each.log_probs[0]) == (each.root, -1, 0)
    assert len(each.tokens) == len(each.parents) == len(each.log_probs) <= each.node_budget + 1
    for node, parent in enumerate(each.parents[1:], 1):
        assert 0 <= parent < node
        assert each.log_probs[node] <= each.log_probs[parent]
    links = list(zip(each.parents[1:], each.tokens[1:], strict=True))
    assert len(set(links)) == len(links)
    path = each.accept_indices
    assert path[0] == 0
    assert [each.parents[node] for node in path[1:]] == list(path[:-1])
    assert [each.tokens[node] for node in path[1:]] == list(each.accept_tokens[:-1])
    assert (path[-1], each.accept_tokens[-1]) not in links


@pytest.mark.parametrize("detail", Detail)
@pytest.mark.parametrize(("mode", "budget"), PLANS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_rounds_sum_up_to_the_tokens(engines, tmp_path, name, mode, budget, detail):
    request = Request(PROMPT, SAMPLINGS[name], mode, budget)
    (generation,), trace = record(engines[name], tmp_path / "t", request, detail=detail)
    assert generation.tokens == engines[name].generate(request).tokens
    (traced,) = trace.requests
    check_tokens(traced, generation)
    assert len(traced.rounds) == generation.stats.verify_ct == traced.end.stats["rounds"]
    for each in traced.rounds:
        if detail is Detail.FULL:
            check_tree(each)
        else:
            assert (each.tokens, each.parents, each.log_probs, each.target) == ((), (), (), ())
    if mode is not Mode.AR and budget != "auto":
        assert max(len(each.accept_tokens) for each in traced.rounds) > 1
        assert {each.mode for each in traced.rounds} == {mode}


def test_a_traced_round_is_what_observers_are_told(engines, tmp_path):
    request = Request(PROMPT, SAMPLINGS["sampled"], Mode.TREE, 12)
    stats = rounds_of(engines["sampled"], request)
    _, trace = record(engines["sampled"], tmp_path / "t", request, detail=Detail.FULL)
    for each, told in zip(trace.requests[0].rounds, stats, strict=True):
        assert (each.tokens, each.parents) == (told.draft_tokens, told.parents)
        assert each.log_probs == pytest.approx(told.log_probs, abs=1e-6)
        assert (each.accept_tokens, each.accept_indices) == (told.accept_tokens, told.accept_indices)
        assert (each.position, each.node_budget) == (told.prefix_len, 12)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize(("mode", "budget"), [(Mode.AR, "auto"), (Mode.TREE, 8)])
def test_targets_are_the_log_probs_and_margins_of_emitted_tokens(engines, tmp_path, name, mode, budget):
    request = Request(PROMPT, SAMPLINGS[name], mode, budget)
    (generation,), trace = record(engines[name], tmp_path / "t", request, detail=Detail.FULL)
    (traced,) = trace.requests
    found = [*traced.end.first_target, *(pair for each in traced.rounds for pair in each.target)]
    known = engines[name].generate(dataclasses.replace(request, top_logprobs=2)).logprobs
    assert len(found) == len(generation.tokens)
    for (log_prob, margin), entry in zip(found, known, strict=True):
        assert log_prob == pytest.approx(entry.log_prob, abs=1e-5)
        assert margin == pytest.approx(entry.top[0][1] - entry.top[1][1], abs=1e-5)
        assert margin >= 0


@pytest.mark.parametrize("asked", [None, 0, 1, 5])
def test_what_comes_back_is_what_was_asked_for(engines, tmp_path, asked):
    observers = Recorder(), Recorder()
    engine, sampling = engines["greedy"], SAMPLINGS["greedy"]
    traced, alone = (
        Request(PROMPT, sampling, Mode.TREE, 8, observer=observer, top_logprobs=asked)
        for observer in observers
    )
    with TraceRecorder(tmp_path / "t", Detail.FULL) as recorder:
        stream = recorder.stream(engine, traced)
        chunks = list(stream)
        result = stream.result()
    plain_chunks = list(engine.stream(alone))
    assert chunks == plain_chunks
    assert result.logprobs == engine.generate(alone).logprobs
    half = len(observers[1].rounds) // 2
    assert observers[0].rounds == observers[1].rounds[:half]


def test_an_observer_that_wants_trees_gets_them_at_summary(engines, tmp_path):
    observer = Recorder()
    request = Request(PROMPT, SAMPLINGS["greedy"], Mode.TREE, 8, observer=observer)
    _, trace = record(engines["greedy"], tmp_path / "t", request)
    assert all(stats.draft_tokens for stats in observer.rounds)
    assert not any(each.tokens for each in trace.requests[0].rounds)


def test_the_request_and_the_header_say_what_was_asked_of_whom(engines, tmp_path):
    sampling = SAMPLINGS["sampled"]
    _, trace = record(engines["sampled"], tmp_path / "t", Request(PROMPT, sampling, Mode.TREE, 8))
    (traced,) = trace.requests
    assert (traced.request.prompt_tokens, traced.request.node_budget) == (PROMPT, 8)
    assert traced.request.sampling["logit_bias"] == {"3": 1.5}
    assert {n: traced.request.sampling[n] for n in ("temperature", "top_k", "seed")} == {
        "temperature": 1.1, "top_k": 30, "seed": 7,
    }  # fmt: skip
    header = trace.header
    assert (header.engine, header.device, header.dtype) == ("embedded", "cpu", "float32")
    assert (header.target, header.settings["model"]) == ({"name": "tiny"}, "tiny")
    assert set(header.versions) == {"ddtree", "python", "packages", "machine"}


def test_models_have_the_checksums_of_their_folders(tmp_path):
    engine = real_engine(tmp_path, max_context=64)
    engine.folder = tmp_path / "target"
    engine.config = dataclasses.replace(
        engine.config, model=str(tmp_path / "target"), drafter=str(tmp_path / "drafter")
    )
    _, trace = record(engine, tmp_path / "t", Request((1, 2, 3), SamplingParams(max_tokens=4)))
    sums = {trace.header.target["folder_sha256"], trace.header.drafter["folder_sha256"]}
    assert len(sums) == 2
    assert trace.header.drafter["name"] == str(tmp_path / "drafter")


def test_one_file_holds_many_requests_of_one_engine(engines, target, tmp_path):
    requests = [Request(PROMPT[:n], SamplingParams(max_tokens=n), Mode.TREE, 4) for n in (1, 2, 9)]
    generations, trace = record(engines["greedy"], tmp_path / "t", *requests)
    assert [traced.request.id for traced in trace.requests] == ["r0", "r1", "r2"]
    assert [traced.end.tokens for traced in trace.requests] == [g.tokens for g in generations]
    assert trace.requests[0].rounds == ()
    with TraceRecorder(tmp_path / "t") as recorder:
        recorder.generate(engines["greedy"], requests[0])
        with pytest.raises(ConfigError, match="a trace is of one engine"):
            recorder.generate(tiny_engine(target, None), requests[0])


def test_a_stop_ends_the_tokens_within_a_round(target, tmp_path):
    sampling = SAMPLINGS["greedy"]
    script = plain(target, sampling).tokens
    engine = scripted_engine(target, sampling)
    cuts = 0
    for stop in dict.fromkeys(script[4:20]):
        request = Request(PROMPT, SamplingParams(max_tokens=40, stop_token_ids=(stop,)), Mode.TREE, 16)
        (generation,), trace = record(engine, tmp_path / "t", request, detail=Detail.FULL)
        (traced,) = trace.requests
        if not traced.rounds:
            continue
        check_tokens(traced, generation)
        assert traced.end.finish_reason == generation.finish_reason == "stop"
        last = traced.rounds[-1]
        cuts += len(last.target) < len(last.accept_tokens)
    assert cuts > 0


def test_a_stream_that_is_left_or_cancelled_ends_as_cancelled(engines, tmp_path):
    request = Request(PROMPT, SAMPLINGS["greedy"], Mode.TREE, 4)
    with TraceRecorder(tmp_path / "t") as recorder:
        for chunk in recorder.stream(engines["greedy"], request):
            if len(chunk.tokens) > 1:
                break
        cancelled = recorder.stream(engines["greedy"], request)
        for _ in cancelled:
            cancelled.cancel()
        assert cancelled.result().finish_reason is FinishReason.CANCEL
        recorder.generate(engines["greedy"], request)  # the engine is free again
    left, cancelled, whole = read_trace(tmp_path / "t").requests
    assert [t.end.finish_reason for t in (left, cancelled, whole)] == ["cancel", "cancel", "length"]
    assert left._replace(end=None).tokens == left.end.tokens == whole.end.tokens[: len(left.end.tokens)]


def test_a_request_that_fails_has_no_end(engines, tmp_path):
    class Fault:
        wants_trees = wants_stages = False

        def on_round(self, stats):
            if stats.prefix_len > len(PROMPT) + 8:
                raise ZeroDivisionError

    request = Request(PROMPT, SAMPLINGS["greedy"], Mode.TREE, 4, observer=Fault())
    with TraceRecorder(tmp_path / "t") as recorder:
        with pytest.raises(ZeroDivisionError):
            recorder.generate(engines["greedy"], request)
        recorder.generate(engines["greedy"], dataclasses.replace(request, observer=None))
    failed, after = read_trace(tmp_path / "t").requests
    assert failed.end is None
    assert failed.rounds
    assert failed.tokens == after.tokens[: len(failed.tokens)]


def test_a_request_that_is_refused_leaves_nothing(engines, tmp_path):
    with TraceRecorder(tmp_path / "t") as recorder:
        with pytest.raises(ContextLengthError):
            recorder.stream(engines["greedy"], Request(tuple(range(200)) * 4))
        recorder.generate(engines["greedy"], Request(PROMPT, SamplingParams(max_tokens=2)))
    assert [t.request.id for t in read_trace(tmp_path / "t").requests] == ["r0"]


def test_a_stream_that_finds_the_engine_busy_may_run_later(engines, tmp_path):
    request = Request(PROMPT, SAMPLINGS["greedy"], Mode.TREE, 4)
    engine = engines["greedy"]
    with TraceRecorder(tmp_path / "t") as recorder:
        waiting = recorder.stream(engine, request)
        engine.acquire()
        with pytest.raises(DDTreeError, match="busy"):
            list(waiting)
        engine.lock.release()
        list(waiting)
        with pytest.raises(DDTreeError, match="runs once"):
            list(waiting)
    (traced,) = read_trace(tmp_path / "t").requests
    check_tokens(traced, waiting.result())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_changes_no_token(engines, caplog):
    request = Request(PROMPT, SAMPLINGS["greedy"], Mode.TREE, 8)
    with caplog.at_level(logging.WARNING), TraceRecorder(Path("/dev/full"), Detail.FULL) as recorder:
        generations = [recorder.generate(engines["greedy"], request) for _ in range(2)]
    assert {g.tokens for g in generations} == {engines["greedy"].generate(request).tokens}
    assert [r.getMessage() for r in caplog.records if "ends here" in r.getMessage()] != []
    assert len(caplog.records) == 1
