"""How requests begin, stream, stop and fail."""

import dataclasses
import itertools

import pytest
import torch

from ddtree.config import Mode, SamplingParams
from ddtree.engine.engine import choose_device
from ddtree.engine.request import FinishReason, Request
from ddtree.errors import ConfigError, ContextLengthError, DDTreeError
from engine_kit import (
    PROMPT,
    Recorder,
    plain,
    real_engine,
    rounds_of,
    scripted_engine,
    tiny_engine,
    tiny_target,
)

SAMPLING = SamplingParams(max_tokens=40, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def engine(target):
    return scripted_engine(target, SAMPLING)


def test_chunks_add_up_to_the_text(engine):
    stream = engine.stream(Request(PROMPT, SAMPLING, Mode.TREE, 16))
    chunks = list(stream)
    result = stream.result()
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert sum((chunk.tokens for chunk in chunks), ()) == result.tokens
    assert len(result.tokens) == 40
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason is result.finish_reason is FinishReason.LENGTH


def test_stats_add_up(engine):
    stats = engine.generate(Request(PROMPT, SAMPLING, Mode.TREE, 16)).stats
    assert stats.prompt_tokens == len(PROMPT)
    assert stats.new_tokens == 40
    assert sum(stats.accept_histogram.values()) == stats.verify_ct
    # The last round may commit more than max_tokens lets through; the first token comes from prefill.
    assert stats.accept_length * stats.verify_ct >= 39


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_is_exact(engine, mode, max_tokens):
    sampling = dataclasses.replace(SAMPLING, max_tokens=max_tokens)
    result = engine.generate(Request(PROMPT, sampling, mode, 16))
    assert len(result.tokens) == max_tokens
    assert result.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("mode", list(Mode))
def test_stop_token_ends_inside_a_round(target, engine, mode):
    tokens = plain(target, SAMPLING).tokens
    at = next(i for i in range(10, 40) if tokens[i] not in tokens[:i])
    sampling = dataclasses.replace(SAMPLING, stop_token_ids=(tokens[at],))
    result = engine.generate(Request(PROMPT, sampling, mode, 16))
    assert result.tokens == tokens[: at + 1]
    assert result.finish_reason is FinishReason.STOP
    assert result.text == bytes(tokens[:at]).decode(errors="replace")


def test_model_end_token_and_ignore_eos(target):
    tokens = plain(target, SAMPLING).tokens
    at = next(i for i in range(5, 40) if tokens[i] not in tokens[:i])
    engine = tiny_engine(target, None, eos_tokens=frozenset({tokens[at]}))
    assert engine.generate(Request(PROMPT, SAMPLING, Mode.AR)).tokens == tokens[: at + 1]
    ignoring = dataclasses.replace(SAMPLING, ignore_eos=True)
    assert engine.generate(Request(PROMPT, ignoring, Mode.AR)).tokens == tokens


@pytest.mark.parametrize("mode", list(Mode))
def test_stop_string_is_cut_out(target, engine, mode):
    tokens = plain(target, SAMPLING).tokens
    text = bytes(tokens).decode(errors="replace")
    at = next(i for i in range(8, 30) if text[i : i + 2].isascii() and text.find(text[i : i + 2]) == i)
    sampling = dataclasses.replace(SAMPLING, stop=(text[at : at + 2],))
    stream = engine.stream(Request(PROMPT, sampling, mode, 16))
    shown = "".join(chunk.text for chunk in stream)
    assert shown == stream.result().text == text[:at]
    assert stream.result().finish_reason is FinishReason.STOP


@pytest.mark.parametrize(("mode", "budget"), [(Mode.CHAIN, 1), (Mode.TREE, 16), (Mode.TREE, 64)])
def test_context_end_finishes_the_text(tmp_path, mode, budget):
    """Windows near the end reach past it by less than a block, where rotary tables end; the text does not."""
    engine = real_engine(tmp_path, max_context=40)
    prompt, sampling = tuple(range(5, 25)), SamplingParams(max_tokens=10_000)
    expected = engine.generate(Request(prompt, sampling, Mode.AR))
    assert len(prompt) + len(expected.tokens) == 40
    assert expected.finish_reason is FinishReason.LENGTH
    result = engine.generate(Request(prompt, sampling, mode, budget))
    assert result.tokens == expected.tokens
    assert result.finish_reason is FinishReason.LENGTH


def test_cancel_ends_after_the_round_and_frees_the_engine(engine):
    request = Request(PROMPT, SAMPLING, Mode.TREE, 4)
    stream = engine.stream(request)
    for _ in stream:
        stream.cancel()
    assert stream.result().finish_reason is FinishReason.CANCEL
    assert len(stream.result().tokens) < 40
    assert engine.generate(request).finish_reason is FinishReason.LENGTH


def test_leaving_the_loop_frees_the_engine(engine):
    request = Request(PROMPT, SAMPLING, Mode.TREE, 4)
    chunks = iter(engine.stream(request))
    next(chunks)
    with pytest.raises(DDTreeError, match="one request at a time"):
        engine.generate(request)
    chunks.close()
    assert len(engine.generate(request).tokens) == 40


def test_an_error_in_an_observer_frees_the_engine(engine):
    class Broken:
        wants_trees = wants_stages = False

        def on_round(self, stats):
            raise RuntimeError("observer broke")

    with pytest.raises(RuntimeError, match="observer broke"):
        engine.generate(Request(PROMPT, SAMPLING, Mode.TREE, 4, observer=Broken()))
    assert len(engine.generate(Request(PROMPT, SAMPLING, Mode.TREE, 4)).tokens) == 40


def test_observer_sees_rounds_that_add_up(engine):
    recorder = Recorder()
    result = engine.generate(Request(PROMPT, SAMPLING, Mode.TREE, 16, observer=recorder))
    tokens, at = list(result.tokens), 0
    for seen in recorder.rounds:
        assert seen.prefix_len == len(PROMPT) + at
        assert seen.root_token == seen.draft_tokens[0] == tokens[at]
        assert len(seen.draft_tokens) == len(seen.parents) == len(seen.log_probs) == seen.num_nodes + 1
        path = seen.accept_indices
        assert [seen.draft_tokens[i] for i in path[1:]] == list(seen.accept_tokens[:-1])
        assert all(seen.parents[child] == parent for parent, child in itertools.pairwise(path))
        shown = list(seen.accept_tokens)[: len(tokens) - at - 1]
        assert tokens[at + 1 : at + 1 + len(shown)] == shown
        at += len(seen.accept_tokens)


def test_a_stream_runs_once(engine):
    stream = engine.stream(Request(PROMPT, SAMPLING, Mode.TREE, 4))
    assert len(list(stream)) > 1
    tokens = stream.result().tokens
    with pytest.raises(DDTreeError, match="a stream runs once"):
        next(iter(stream))
    assert stream.result().tokens == tokens
    assert len(engine.generate(Request(PROMPT, SAMPLING, Mode.TREE, 4)).tokens) == 40


def test_a_stream_that_found_the_engine_busy_can_start_later(engine):
    first = iter(engine.stream(Request(PROMPT, SAMPLING, Mode.TREE, 4)))
    next(first)
    second = engine.stream(Request(PROMPT, SAMPLING, Mode.TREE, 4))
    with pytest.raises(DDTreeError, match="one request at a time"):
        next(iter(second))
    first.close()
    assert sum(len(chunk.tokens) for chunk in second) == 40


@pytest.mark.parametrize("mode", [Mode.AR, Mode.TREE])
def test_inference_mode_does_not_leak(engine, mode):
    """Neither to observers nor to whoever consumes the stream."""
    seen = []

    class Observer:
        wants_trees = True
        wants_stages = False

        def on_round(self, stats):
            seen.append(torch.is_inference_mode_enabled())

    for _ in engine.stream(Request(PROMPT, SAMPLING, mode, 4, observer=Observer())):
        seen.append(torch.is_inference_mode_enabled())
    assert len(seen) > 20
    assert not any(seen)


@pytest.mark.parametrize("mode", list(Mode))
def test_modes_may_be_named_by_their_strings(engine, mode):
    named, enum = (rounds_of(engine, Request(PROMPT, SAMPLING, m, 16)) for m in (mode.value, mode))
    assert [(r.accept_tokens, r.num_nodes) for r in named] == [(r.accept_tokens, r.num_nodes) for r in enum]
    assert {r.mode for r in named} == {mode}


@pytest.mark.parametrize(
    ("prompt", "fields", "error", "words"),
    [
        ((), {}, ConfigError, "at least one token"),
        ((1,) * 256, {}, ContextLengthError, "256 tokens, at most 255"),
        ((999,), {}, ConfigError, "ids from 0 to 255"),
        (PROMPT, {"node_budget": 0}, ConfigError, "node_budget=0"),
        (PROMPT, {"node_budget": 10**9}, ConfigError, "from 1 to 1024"),
        (
            PROMPT,
            {"node_budget": "16"},
            ConfigError,
            "node_budget='16' is not allowed: a whole number or auto",
        ),
        (PROMPT, {"node_budget": 16.7}, ConfigError, "node_budget=16.7 is not allowed"),
        (PROMPT, {"node_budget": True}, ConfigError, "node_budget=True is not allowed"),
        (PROMPT, {"node_budget": None}, ConfigError, "node_budget=None is not allowed"),
        (PROMPT, {"mode": None}, ConfigError, "one of ar, chain, tree"),
        ((-1,), {}, ConfigError, "ids from 0 to 255"),
        (
            PROMPT,
            {"sampling": SamplingParams(stop_token_ids=(2, 256))},
            ConfigError,
            "stop_token_ids has 256",
        ),
        (PROMPT, {"mode": "forest"}, ConfigError, "one of ar, chain, tree"),
        (PROMPT, {"sampling": SamplingParams(logit_bias={256: 1.0})}, ConfigError, "0 to 255"),
    ],
)
def test_bad_requests_are_refused(engine, prompt, fields, error, words):
    with pytest.raises(error, match=words):
        engine.generate(Request(prompt, **fields))


def test_drafting_without_a_drafter_is_refused(target):
    engine = tiny_engine(target, None)
    for mode in (Mode.CHAIN, Mode.TREE):
        with pytest.raises(ConfigError, match="without a drafter"):
            engine.generate(Request(PROMPT, SAMPLING, mode))


def test_empty_prompt_text_is_refused(engine):
    with pytest.raises(ConfigError, match="not empty"):
        engine.encode("  \n")
    assert engine.encode("hi", chat=False) == (104, 105)
    assert b"hi" in bytes(engine.encode("hi"))


def test_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="CUDA devices found"):
        choose_device("cuda:99")


def test_a_prompt_is_prefilled_in_pieces_as_in_one(target, engine, monkeypatch):
    request = Request(tuple(range(100)), SAMPLING, Mode.TREE, 16)
    whole = engine.generate(request).tokens
    monkeypatch.setattr("ddtree.engine.engine.PREFILL_CHUNK_TOKENS", 7)
    assert engine.generate(request).tokens == whole
