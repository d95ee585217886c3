"""The CUDA graph runner's steps on the CPU: static shapes, device-side prefix length, recorded steps."""

import dataclasses

import pytest
import torch
from torch.utils._pytree import tree_flatten

from ddtree.config import Mode, SamplingParams
from ddtree.engine.request import Request
from ddtree.engine.round_runner import EagerRunner, GraphRunner
from ddtree.engine.sampling import TokenChooser, choose_along_path, count_paths
from ddtree.stats import STAGES
from ddtree.tree import DraftMarginals, build_draft_trees, tree_layout
from engine_kit import (
    BLOCK_SIZE,
    PROMPT,
    VOCAB_SIZE,
    Recorder,
    plain,
    real_engine,
    rounds_of,
    scripted_engine,
    tiny_target,
)


class Recorded:
    """Stands in for a CUDA graph: a replay runs the step again and leaves the results where capture did."""

    def __init__(self, step):
        self.step, self.output = step, step()

    def replay(self):
        kept, _ = tree_flatten(flat(self.output))
        fresh, _ = tree_flatten(flat(self.step()))
        for old, new in zip(kept, fresh, strict=True):
            old.copy_(new)


def flat(output):
    """The tensors of nested tuples and dataclasses, in one order."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, tuple):
        return [tensor for part in output for tensor in flat(part)]
    if hasattr(output, "__dataclass_fields__"):
        return [tensor for name in output.__dataclass_fields__ for tensor in flat(getattr(output, name))]
    return []


class ReplayingRunner(GraphRunner):
    """The graph runner with recorded steps; warm-up and capture change the same state as on a GPU."""

    def _capture(self, step):
        sequence = self._sequence
        root_token, prefix_len = sequence.root_token.clone(), sequence.prefix_len.clone()
        step()
        sequence.root_token.copy_(root_token)
        sequence.prefix_len.copy_(prefix_len)
        extent = sequence.kv_extent

        def frozen():
            sequence.kv_extent = extent  # part of what a graph captures
            return step()

        recorded = Recorded(frozen)
        sequence.root_token.copy_(root_token)
        sequence.prefix_len.copy_(prefix_len)
        return recorded, recorded.output


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 1.0}, {"frequency_penalty": 1.7}, {"temperature": 1.0, "repetition_penalty": 1.3}],
    ids=str,
)
def test_static_steps_say_what_plain_decoding_says(target, fields):
    sampling = SamplingParams(max_tokens=40, **fields)
    expected = plain(target, sampling).tokens
    engine = scripted_engine(target, sampling)
    engine.drafter.append = lambda context, taps, window: None
    replaying(engine)
    for mode, budget in [(Mode.TREE, 16), (Mode.CHAIN, 1), (Mode.TREE, 4), (Mode.AR, 1), (Mode.TREE, 16)]:
        result = engine.generate(Request(PROMPT, sampling, mode, budget))
        assert result.tokens == expected, (mode, budget)


def replaying(engine):
    """The engine with recorded steps; like a GPU's, its cache holds zeros where nothing was written."""
    engine.pair.kv_cache.data.zero_()
    engine.runner = ReplayingRunner(engine.pair, engine.sequence)
    return engine


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "frequency_penalty": 0.5}], ids=str)
def test_static_steps_give_the_eager_log_probabilities(target, fields):
    """They are read between two graphs; a greedy request without them is one graph a round, as ever."""
    sampling = SamplingParams(max_tokens=40, **fields)
    engine = scripted_engine(target, sampling)
    engine.drafter.append = lambda context, taps, window: None
    requests = [
        Request(PROMPT, sampling, mode, budget, top_logprobs=3)
        for mode, budget in [(Mode.TREE, 16), (Mode.CHAIN, 1), (Mode.TREE, 4)]
    ]
    eager = [engine.generate(request).logprobs for request in requests]
    replaying(engine)
    for request, expected in zip(requests, eager, strict=True):
        plain_request = dataclasses.replace(request, top_logprobs=None)
        assert len(engine.generate(plain_request).tokens) == 40
        kinds = {key[0] for key in engine.runner._graphs}
        assert ("verify" in kinds) == bool(fields or request is not requests[0])
        got = engine.generate(request).logprobs
        assert [entry.token for entry in got] == [entry.token for entry in expected]
        for seen, wanted in zip(got, expected, strict=True):
            assert seen.log_prob == pytest.approx(wanted.log_prob, abs=1e-4)
            values = [[log_prob for _, log_prob in entry.top] for entry in (seen, wanted)]
            assert values[0] == pytest.approx(values[1], abs=1e-4)
    assert {key[0] for key in engine.runner._graphs} == {"verify", "commit"} | (
        set() if fields else {"round"}
    )


# Key extents: 1024 twice, in caches of other sizes, then a step from 1024 to all of the cache.
CONTEXTS = [(256, 20), (600, 497), (1100, 1000)]


def drafted_requests(prompt_len):
    prompt = tuple(i * 7 % 32 for i in range(prompt_len))
    for fields in ({}, {"temperature": 1.0, "frequency_penalty": 0.3}):
        sampling = SamplingParams(max_tokens=16, **fields)
        for mode, budget in [(Mode.TREE, 16), (Mode.CHAIN, 1), (Mode.TREE, 64)]:
            yield Request(prompt, sampling, mode, budget)


@pytest.mark.parametrize(("max_context", "prompt_len"), CONTEXTS)
def test_static_steps_with_a_real_drafter_are_the_eager_ones(tmp_path, max_context, prompt_len):
    """Not only the same text: the same drafts, so the drafter's context is read and written alike."""
    engine = real_engine(tmp_path, max_context)
    requests = list(drafted_requests(prompt_len))
    eager = [rounds_of(engine, request) for request in requests]
    replaying(engine)
    for request, expected in zip(requests, eager, strict=True):
        got = rounds_of(engine, request)
        assert [seen.accept_tokens for seen in got] == [seen.accept_tokens for seen in expected]
        for seen, wanted in zip(got, expected, strict=True):
            assert seen.log_probs == pytest.approx(wanted.log_probs, abs=1e-4)
    assert any(len(seen.accept_tokens) > 1 for rounds in eager for seen in rounds)


@pytest.mark.parametrize(("max_context", "prompt_len"), CONTEXTS)
def test_a_context_without_the_caches_capacity_is_found_out(tmp_path, max_context, prompt_len):
    """The test above can fail: a drafter context as long as the text and a block is read past its end."""
    engine = real_engine(tmp_path, max_context)
    short = engine.drafter.new_context(max_context + BLOCK_SIZE)
    engine.pair = dataclasses.replace(engine.pair, draft_context=short)
    with pytest.raises(RuntimeError, match="size"):
        replaying(engine).generate(next(drafted_requests(prompt_len)))


def test_the_widest_tree_fits_at_the_end_of_the_context(tmp_path):
    """There the power of two passes the cache, which the extent may not."""
    engine = replaying(real_engine(tmp_path, max_context=40))
    request = Request(tuple(range(20)), SamplingParams(max_tokens=99), Mode.TREE, 1024)
    expected = engine.generate(dataclasses.replace(request, mode=Mode.AR)).tokens
    assert len(expected) == 20
    assert engine.generate(request).tokens == expected


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 1.0, "top_k": 9}, {"frequency_penalty": 1.7, "repetition_penalty": 1.2}],
    ids=str,
)
def test_choosing_along_the_path_is_choosing_everywhere(fields):
    generator = torch.Generator().manual_seed(5)
    chooser = TokenChooser(SamplingParams(**fields), PROMPT, VOCAB_SIZE, torch.device("cpu"))
    chooser.count(torch.tensor([7, 7, 9]))
    for _ in range(20):
        marginals = DraftMarginals.from_logits(torch.randn(1, 4, VOCAB_SIZE, generator=generator), 12)
        tree = build_draft_trees(marginals, torch.tensor([9]), 12)
        layout = tree_layout(tree, torch.tensor([30]))
        logits = torch.randn(13, VOCAB_SIZE, generator=generator)
        # Make the walk go somewhere: each node's best child is likely.
        for column in range(1, 13):
            logits[tree.parents[0, column], tree.tokens[0, column]] += 3.0
        counts = count_paths(tree.tokens[0], layout.ancestor_mask[0], VOCAB_SIZE)
        everywhere = chooser.choose(logits, layout.positions[0] + 1, counts)
        along = choose_along_path(chooser, logits, tree, layout)
        visited = along >= 0
        assert visited.sum() >= 2
        assert torch.equal(along[visited], everywhere[visited])


class Watch(Recorder):
    """Has the steps of every round timed, and keeps the times."""

    wants_stages = True

    def __init__(self):
        super().__init__()
        self.times = []

    def on_round(self, stats):
        super().on_round(stats)
        self.times.append((stats.round_ms, stats.stages_ms))


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "frequency_penalty": 0.3}], ids=str)
def test_timed_rounds_are_the_same_rounds(tmp_path, is_graph, fields):
    engine = real_engine(tmp_path, max_context=256)
    sampling = SamplingParams(max_tokens=16, **fields)
    for mode, budget in [(Mode.TREE, 16), (Mode.CHAIN, 1), (Mode.AR, 1)]:
        request = Request(tuple(range(20)), sampling, mode, budget)
        engine.runner = EagerRunner(engine.pair, engine.sequence)
        expected = rounds_of(engine, request)
        if is_graph:
            replaying(engine)
        watch = Watch()
        engine.generate(dataclasses.replace(request, observer=watch))
        assert [seen.accept_tokens for seen in watch.rounds] == [seen.accept_tokens for seen in expected]
        assert [seen.parents for seen in watch.rounds] == [seen.parents for seen in expected]
        timed = [(round_ms, stages) for round_ms, stages in watch.times if stages is not None]
        assert len(timed) == len(watch.rounds) - (is_graph and mode is not Mode.AR)  # a capture has no times
        for round_ms, stages in timed:
            assert tuple(stages) == STAGES
            assert all(taken_ms >= 0 for taken_ms in stages.values())
            assert sum(stages.values()) <= round_ms


def test_rounds_that_nobody_times_have_no_times(tmp_path):
    seen = []

    class Plain(Watch):
        wants_stages = False

        def on_round(self, stats):
            seen.append(stats.stages_ms)

    request = Request(tuple(range(20)), SamplingParams(max_tokens=8), Mode.TREE, 8, observer=Plain())
    real_engine(tmp_path, max_context=256).generate(request)
    assert set(seen) == {None}
