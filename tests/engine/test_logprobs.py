"""Log-probabilities of new tokens are those of a plain prefill of the finished output, in every mode."""

import dataclasses
import itertools
import math
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree.config import EngineConfig, Mode, SamplingParams
from ddtree.draft.load import load_drafter
from ddtree.engine import decode_round
from ddtree.engine import logprobs as logprobs_module
from ddtree.engine.engine import Engine
from ddtree.engine.logprobs import pack_logprobs, unpack_logprobs
from ddtree.engine.request import FinishReason, Request
from ddtree.engine.target import load_target, load_target_config, make_stack
from ddtree.errors import ConfigError
from ddtree.tree.budget import PLAIN, CostTable, DraftPlan, NodeBudgetPolicy
from engine_kit import (
    BLOCK_SIZE,
    PROMPT,
    VOCAB_SIZE,
    ByteTokenizer,
    rounds_of,
    scripted_engine,
    tiny_target,
)
from tiny_models import tiny_llama, write_tiny_drafter

PLANS = [(Mode.AR, "auto"), (Mode.CHAIN, "auto"), (Mode.TREE, 1), (Mode.TREE, 4), (Mode.TREE, 64)]
SAMPLINGS = {
    "greedy": {},
    "hot": {"temperature": 1.3, "seed": 7},
    "cut": {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "greedy penalties": {"frequency_penalty": 1.7, "repetition_penalty": 1.3},
    "all": {
        "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {3: 4.5}, "seed": -5,
    },
}  # fmt: skip
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model():
    return tiny_llama(vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def target(model, tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"), model)


@torch.no_grad()
def replayed(model, prompt, tokens):
    """Log-probabilities [len(tokens), vocab] before each token: one pass of transformers over the output."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double(), -1)


def largest_gap(expected, logprobs):
    """How far log-probabilities are from the replayed ones [n, vocab]: the tokens' own and, by rank, the top.

    Raises where they contradict themselves: order, cut, or the token's number in `top`.
    """
    assert len(logprobs) == len(expected)
    gaps = []
    for row, entry in zip(expected, logprobs, strict=True):
        gaps.append(abs(entry.log_prob - float(row[entry.token])))
        best = row.topk(len(entry.top)).values.tolist()
        gaps += [abs(log_prob - value) for (_, log_prob), value in zip(entry.top, best, strict=True)]
        gaps += [abs(log_prob - float(row[token])) for token, log_prob in entry.top]
        assert all((-a[1], a[0]) < (-b[1], b[0]) for a, b in itertools.pairwise(entry.top))
        inside = dict(entry.top)
        if entry.token in inside:
            assert entry.log_prob == inside[entry.token]
        elif entry.top:
            assert entry.log_prob <= entry.top[-1][1]
    return max(gaps)


def check_result(model, request, result):
    """The result's log-probabilities against a replay of its tokens."""
    assert [entry.token for entry in result.logprobs] == list(result.tokens)
    assert all(len(entry.top) == request.top_logprobs for entry in result.logprobs)
    expected = replayed(model, request.prompt_tokens, result.tokens)
    assert largest_gap(expected, result.logprobs) < TOLERANCE


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_mode_gives_those_of_a_plain_prefill(model, target, name):
    sampling = SamplingParams(max_tokens=40, **SAMPLINGS[name])
    engine = scripted_engine(target, sampling)
    plain_tokens = None
    for mode, budget in PLANS:
        request = Request(PROMPT, sampling, mode, budget, top_logprobs=5)
        result = engine.generate(request)
        check_result(model, request, result)
        plain_tokens = plain_tokens or result.tokens
        assert result.tokens == plain_tokens  # so the values are the same in every mode too
    assert result.stats.accept_length > 2  # nodes off the first branch were read, not only roots


@given(
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40).map(tuple),
    plan=st.one_of(
        st.sampled_from([(Mode.AR, "auto"), (Mode.CHAIN, "auto")]),
        st.tuples(st.just(Mode.TREE), st.integers(1, 80)),
    ),
    sampling=st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 24),
        temperature=st.sampled_from([0.0, 0.6, 1.0]),
        top_k=st.sampled_from([0, 3]),
        frequency_penalty=st.sampled_from([0.0, 0.9]),
        logit_bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-5, 5), max_size=2),
        seed=st.integers(0, 99),
        stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4).map(tuple),
    ),
    top_logprobs=st.integers(0, 20),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_request_gives_those_of_a_plain_prefill(model, target, prompt, plan, sampling, top_logprobs):
    request = Request(prompt, sampling, *plan, top_logprobs=top_logprobs)
    check_result(model, request, scripted_engine(target, sampling, prompt).generate(request))


class TurningPolicy(NodeBudgetPolicy):
    """Goes through plain decoding, the chain and two trees in turn."""

    plans = (DraftPlan(Mode.TREE, 4), PLAIN, DraftPlan(Mode.TREE, 16), DraftPlan(Mode.CHAIN, BLOCK_SIZE - 1))

    def __init__(self):
        super().__init__(CostTable(dict.fromkeys(self.plans, 1.0)), BLOCK_SIZE - 1)
        self.turns = itertools.cycle(self.plans)

    def choose(self):
        return next(self.turns)


@pytest.mark.parametrize("name", ["greedy", "all"])
def test_plans_may_change_between_rounds(model, target, name):
    sampling = SamplingParams(max_tokens=60, **SAMPLINGS[name])
    engine = scripted_engine(target, sampling)
    engine._policy = TurningPolicy()
    request = Request(PROMPT, sampling, Mode.TREE, "auto", top_logprobs=3)
    assert {seen.mode for seen in rounds_of(engine, request)} == set(Mode)
    check_result(model, request, engine.generate(request))


def chunks_of(engine, request):
    stream = engine.stream(request)
    chunks = list(stream)
    result = stream.result()
    for chunk in chunks:
        assert [entry.token for entry in chunk.logprobs] == list(chunk.tokens)
    assert sum((chunk.logprobs for chunk in chunks), ()) == result.logprobs
    return chunks, result


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_a_round_cut_by_max_tokens_is_cut_alike(model, target, mode, max_tokens):
    whole = SamplingParams(max_tokens=40)
    engine = scripted_engine(target, whole)
    request = Request(PROMPT, SamplingParams(max_tokens=max_tokens), mode, 16, top_logprobs=2)
    _, result = chunks_of(engine, request)
    assert len(result.logprobs) == max_tokens
    check_result(model, request, result)
    rounds = rounds_of(engine, request)
    if mode is Mode.TREE and max_tokens == 7:
        assert sum(len(seen.accept_tokens) for seen in rounds) > max_tokens - 1  # a round was cut


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("kind", ["stop token", "stop string"])
def test_the_token_that_ends_a_request_has_its_own(model, target, mode, kind):
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=3)
    engine = scripted_engine(target, sampling)
    tokens = engine.generate(Request(PROMPT, sampling, Mode.AR)).tokens
    at = next(i for i in range(10, 40) if tokens[i] not in tokens[:i] and 32 <= tokens[i] < 127)
    stop = {"stop_token_ids": (tokens[at],)} if kind == "stop token" else {"stop": (chr(tokens[at]),)}
    request = Request(PROMPT, dataclasses.replace(sampling, **stop), mode, 16, top_logprobs=4)
    chunks, result = chunks_of(engine, request)
    assert result.finish_reason is FinishReason.STOP
    assert chunks[-1].logprobs[-1].token == result.tokens[-1] == tokens[at]
    assert len(result.logprobs) == at + 1
    check_result(model, request, result)


def test_a_stream_left_early_has_those_of_its_tokens(target):
    sampling = SamplingParams(max_tokens=40)
    stream = scripted_engine(target, sampling).stream(
        Request(PROMPT, sampling, Mode.TREE, 16, top_logprobs=1)
    )
    chunks = iter(stream)
    seen = [*next(chunks).logprobs, *next(chunks).logprobs]
    chunks.close()
    assert list(stream.result().logprobs) == seen
    assert len(seen) > 1


@pytest.mark.parametrize("mode", list(Mode))
def test_a_request_without_them_does_no_work_for_them(target, monkeypatch, mode):
    sampling = SamplingParams(max_tokens=40, temperature=1.0)
    engine = scripted_engine(target, sampling)
    request = Request(PROMPT, sampling, mode, 16)
    asked = dataclasses.replace(request, top_logprobs=20)
    assert rounds_of(engine, request) == rounds_of(engine, asked)  # nor do they change a round
    assert engine.generate(request).tokens == engine.generate(asked).tokens

    def refuse(*_args):
        raise AssertionError("log-probabilities were computed")

    monkeypatch.setattr(logprobs_module.DraftMarginals, "from_logits", own_from_logits(refuse))
    chunks, result = list(engine.stream(request)), engine.generate(request)
    assert result.logprobs == ()
    assert all(chunk.logprobs == () for chunk in chunks)
    with pytest.raises(AssertionError, match="were computed"):
        engine.generate(asked)


def own_from_logits(refuse):
    """`DraftMarginals.from_logits` that lets only the drafter through: of the target's rows it refuses."""
    real = logprobs_module.DraftMarginals.from_logits

    def from_logits(logits, topk):
        return real(logits, topk) if logits.shape[1] == BLOCK_SIZE - 1 else refuse()

    return staticmethod(from_logits)


def planted(fault):
    """`path_logprobs` with a fault: rows of other nodes, or logits that are not the target's own."""
    real = logprobs_module.path_logprobs

    def faulty(logits, result, top_logprobs):
        indices = result.accept_indices
        if fault == "the token's own node":
            next_node = torch.cat((indices[:, 1:], indices[:, -1:]), 1)
            indices = torch.where(next_node >= 0, next_node, indices)
        elif fault == "the node before":
            indices = torch.cat((indices[:, :1], indices[:, :-1]), 1)
        elif fault == "nodes by depth":
            indices = torch.where(indices >= 0, torch.arange(indices.shape[1])[None], -1)
            indices = indices.clamp(max=logits.shape[0] - 1)
        elif fault == "next column":
            indices = torch.where(indices >= 0, (indices + 1) % logits.shape[0], -1)
        else:
            logits = logits / 0.9
        return real(logits, result._replace(accept_indices=indices), top_logprobs)

    return faulty


@pytest.mark.parametrize(
    "fault",
    ["the token's own node", "the node before", "nodes by depth", "next column", "after temperature"],
)
def test_planted_faults_are_seen(model, target, monkeypatch, fault):
    """The tests above can fail: each fault moves values by a hundred times what they allow."""
    sampling = SamplingParams(max_tokens=40, temperature=0.9)
    engine = scripted_engine(target, sampling)
    monkeypatch.setattr(decode_round, "path_logprobs", planted(fault))
    result = engine.generate(Request(PROMPT, sampling, Mode.TREE, 16, top_logprobs=0))
    expected = replayed(model, PROMPT, result.tokens)
    assert [entry.token for entry in result.logprobs] == list(result.tokens)
    assert largest_gap(expected, result.logprobs) > 100 * TOLERANCE


def rows_of(kind, generator):
    logits = torch.randn(6, 300, generator=generator) * 5
    if kind == "ties":
        return logits.round()
    if kind == "near ties":  # distinct logits of which many have one log-probability
        logits = torch.rand(6, 300, generator=generator) * 1e-5
        logits[:, 100] = 30.0
    elif kind == "certain":
        logits[:, 7] = 1e4
    return logits


@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["continuous", "ties", "near ties", "certain"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    top=st.integers(0, 20),
    vocab=st.sampled_from([300, 256, 21, 19, 3]),
)
@settings(max_examples=60, deadline=None)
def test_packed_rows_come_across_to_the_bit(seed, kind, dtype, top, vocab):
    generator = torch.Generator().manual_seed(seed)
    logits = rows_of(kind, generator)[:, :vocab].to(dtype)
    before = logits.clone()
    tokens = torch.randint(vocab, (6,), generator=generator)
    # Tokens among the best are the interesting ones.
    tokens[:3] = logits[:3].float().topk(3).indices[:, int(torch.randint(3, (1,), generator=generator))]
    packed = pack_logprobs(logits, tokens, top)
    assert torch.equal(logits, before)
    assert packed.shape == (6, 1 + 2 * min(top, vocab))
    entries = unpack_logprobs(packed.flatten().tolist(), packed.shape[1], tokens.tolist())
    expected = torch.log_softmax(logits.double(), -1)
    assert largest_gap(expected, entries) < 2e-6 * float(logits.float().abs().max() + 1)
    assert all(entry.log_prob <= 0 for entry in entries)


def test_rows_past_the_tokens_are_left_out():
    packed = pack_logprobs(torch.randn(4, 50), torch.tensor([1, 2, 3, 4]), 2)
    entries = unpack_logprobs(packed.flatten().tolist(), 5, [1, 2])
    assert [entry.token for entry in entries] == [1, 2]
    assert entries == unpack_logprobs(packed[:2].flatten().tolist(), 5, [1, 2])


@pytest.mark.parametrize("value", [-1, 21, True, 2.0, "5", math.nan])
def test_a_number_that_is_not_allowed_is_refused(value):
    with pytest.raises(ConfigError, match=r"top_logprobs=.* is not allowed: a whole number from 0 to 20"):
        Request(PROMPT, top_logprobs=value)


def pair_engine(folder, device):
    """A tiny pair as `Engine.load` sets it up on a device, in float32, and its transformers model."""
    model = tiny_llama(vocab_size=32, hidden_size=64, num_heads=4)  # head_dim 16, which the kernels take
    model.save_pretrained(folder / "target")
    dtype, device = torch.float32, torch.device(device)
    target_folder, limit = folder / "target", 256 + BLOCK_SIZE
    target = load_target(target_folder, load_target_config(target_folder), dtype, device, limit)
    drafter_folder = write_tiny_drafter(folder / "drafter", model, BLOCK_SIZE, max_position_embeddings=limit)
    drafter = load_drafter(
        drafter_folder, target.info, target.embed, target.head, dtype, device, limit, make_stack
    )
    config = EngineConfig(model="tiny", drafter="none", device=device.type, max_context_tokens=256)
    return Engine(target, drafter, ByteTokenizer(), config, frozenset(), device), model


def num_waits(engine, request):
    """Times that a request made the host wait for a CUDA device, as far as torch's debug mode sees."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.generate(request)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["greedy", "all"])
def test_on_a_device_they_are_right_and_cost_no_wait(tmp_path, device, name):
    """With CUDA graphs where there are any; requests without them stay as they are in between."""
    engine, model = pair_engine(tmp_path, device)
    sampling = SamplingParams(max_tokens=30, **SAMPLINGS[name])
    prompt = tuple(i * 7 % 32 for i in range(25))
    for mode, budget in [(Mode.TREE, 16), (Mode.CHAIN, "auto"), (Mode.AR, "auto"), (Mode.TREE, 4)]:
        request = Request(prompt, sampling, mode, budget)
        asked = dataclasses.replace(request, top_logprobs=5)
        expected = engine.generate(request).tokens
        result = engine.generate(asked)
        check_result(model, asked, result)
        assert engine.generate(request).tokens == expected == result.tokens
        if device == "cuda":  # now that all graphs are captured
            assert num_waits(engine, asked) == num_waits(engine, request)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packing_on_cuda_does_not_wait_and_agrees_with_the_cpu(dtype):
    logits = (torch.randn(16, 49152, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    tokens = logits.float().topk(3).indices[:, 2]
    moved, moved_tokens = logits.cuda(), tokens.cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = pack_logprobs(moved, moved_tokens, 20)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    entries = unpack_logprobs(packed.flatten().tolist(), 41, tokens.tolist())
    assert largest_gap(torch.log_softmax(logits.double(), -1), entries) < 1e-5
