"""The embedded engine as an arm: its answers are the engine's own, its figures those of its rounds."""

import itertools
from collections import Counter

import pytest
import torch

from ddtree.bench import embedded
from ddtree.bench.embedded import EmbeddedEngine, RoundTally, path_ranks, process_peak_bytes
from ddtree.bench.measure import figures
from ddtree.bench.run_format import Arm, CellKey
from ddtree.config import Mode, SamplingParams
from ddtree.engine.request import Request
from ddtree.errors import ConfigError, ContextLengthError
from ddtree.stats import STAGES, RoundStats
from engine_kit import rounds_of, scripted_engine, tiny_target

TEXTS = ("Why is the sky blue?", "And the sea?")
CHATS = [[{"role": "user", "content": text}] for text in TEXTS]
MAX_TOKENS = 24
ARMS = [Arm("embedded", Mode.AR), Arm("embedded", Mode.CHAIN), Arm("embedded", Mode.TREE, 16)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    target = tiny_target(tmp_path_factory.mktemp("target"))
    prompt = tuple(f"<user>{TEXTS[0]}<assistant>".encode())
    return scripted_engine(target, SamplingParams(max_tokens=MAX_TOKENS), prompt)


def run(engine, arm, temperature=0.0, seeds=(1, 2), **options):
    arm_engine = EmbeddedEngine(engine, arm, **options)
    return arm_engine.run(CHATS, max_tokens=MAX_TOKENS, temperature=temperature, seeds=seeds, concurrency=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_arms_give_the_answers_of_plain_decoding(engine, temperature):
    made = [[(answer.tokens, answer.text) for answer in run(engine, arm, temperature)[1]] for arm in ARMS]
    assert made[0] == made[1] == made[2]
    for number, seed in enumerate((1, 2)):
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=seed)
        plain = engine.generate(Request(engine.encode(TEXTS[number]), sampling, Mode.AR))
        assert made[0][number][0] == plain.tokens


def test_each_prompt_is_sampled_with_its_own_seed(engine):
    one, other = (run(engine, ARMS[0], 1.0, seeds)[1] for seeds in ((1, 2), (1, 3)))
    assert one[0].tokens == other[0].tokens
    assert one[1].tokens != other[1].tokens


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_histogram_rounds_and_chunks_agree(engine, arm):
    wall_s, answers = run(engine, arm)
    cell = figures(CellKey(str(arm), "one", 1, 0.0, 0), wall_s, answers)
    for answer, request in zip(answers, cell.requests, strict=True):
        assert len(answer.chunk_times) == request.rounds + 1
        assert sum(count for _, count in answer.chunk_times) == request.new_tokens == len(answer.tokens)
        assert answer.prompt_tokens == len(answer.prompt)
        assert 0 < request.first_token_s <= request.total_s
        assert 0 < request.decode_s <= request.total_s
    rounds = sum(request.rounds for request in cell.requests)
    assert sum(cell.accept_histogram.values()) == rounds
    committed = sum(int(n) * count for n, count in cell.accept_histogram.items())
    assert cell.accept_length == committed / rounds
    # The last round of a request may commit more than it has tokens left.
    assert 0 <= committed - sum(request.new_tokens - 1 for request in cell.requests) < 8 * len(answers)


def test_drafts_make_fewer_rounds(engine):
    rounds = [run(engine, arm)[1][0].rounds for arm in ARMS]
    assert rounds[0] == MAX_TOKENS - 1
    assert rounds[2] < rounds[1] < rounds[0]


def test_wall_time_is_the_sum_of_the_requests_and_first_tokens_come_from_the_clock(engine):
    clock = itertools.count(0.0, 0.5)
    wall_s, answers = run(engine, ARMS[2], clock=lambda: next(clock))
    for answer in answers:
        # One reading at the beginning, one a chunk, one at the end.
        assert answer.first_s - answer.begin_s == 0.5
        assert answer.total_s == 0.5 * (len(answer.chunk_times) + 1)
    assert wall_s == sum(answer.total_s for answer in answers)


def test_watched_rounds_tell_ranks_and_stage_times(engine):
    arm = EmbeddedEngine(engine, ARMS[2])
    seen = arm.observe(CHATS[:1], max_tokens=MAX_TOKENS, temperature=0.0, seeds=(1,))
    sampling = SamplingParams(max_tokens=MAX_TOKENS, seed=1)
    rounds = rounds_of(engine, Request(engine.encode(TEXTS[0]), sampling, Mode.TREE, 16))
    assert sum(seen.ranks.values()) == sum(each.num_correct_drafts for each in rounds)
    expected = Counter()
    for each in rounds:
        # The rank of a node is where it stands when its siblings are sorted by score.
        for node in each.accept_indices[1:]:
            siblings = [n for n, parent in enumerate(each.parents) if parent == each.parents[node]]
            expected[sorted(siblings, key=lambda n: -each.log_probs[n]).index(node)] += 1
    assert seen.ranks == dict(expected)
    assert max(seen.ranks) >= 1
    assert set(seen.stages_ms) == set(STAGES)
    assert all(stage_ms > 0 for stage_ms in seen.stages_ms.values())


def test_a_chain_has_only_first_ranks_and_plain_decoding_none(engine):
    options = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "seeds": (1,)}
    assert set(EmbeddedEngine(engine, ARMS[1]).observe(CHATS[:1], **options).ranks) == {0}
    assert EmbeddedEngine(engine, ARMS[0]).observe(CHATS[:1], **options).ranks == {}


@pytest.mark.parametrize(
    ("parents", "path", "ranks"),
    [((-1, 0, 0, 1, 1, 2), (0, 1, 4), [0, 1]), ((-1, 0, 0, 1, 2), (0, 2, 4), [1, 0]), ((-1,), (0,), [])],
)
def test_ranks_of_a_path(parents, path, ranks):
    assert path_ranks(parents, path) == ranks


def test_rounds_without_stage_times_leave_their_mean_alone():
    tally = RoundTally()
    for stages_ms in ({"draft": 2.0}, None, {"draft": 4.0}):
        tally.on_round(RoundStats(Mode.AR, 0, 0, 1, (5,), 1.0, stages_ms=stages_ms))
    assert tally.observed().stages_ms == {"draft": 3.0}


@pytest.mark.parametrize(
    ("prompts", "concurrency", "said"),
    [
        (CHATS, 2, "concurrency=2"),
        ([[*CHATS[0], {"role": "assistant", "content": "x"}]], 1, "a prompt of 2 messages"),
        ([[{"role": "system", "content": "x"}]], 1, "one of the user"),
    ],
)
def test_what_it_cannot_do_is_refused(engine, prompts, concurrency, said):
    options = {"max_tokens": 4, "temperature": 0.0, "seeds": (1,) * len(prompts), "concurrency": concurrency}
    with pytest.raises(ConfigError, match=said):
        EmbeddedEngine(engine, ARMS[0]).run(prompts, **options)


def test_a_prompt_that_does_not_fit_leaves_the_engine_usable(engine):
    long = [[{"role": "user", "content": "x" * 300}]]
    with pytest.raises(ContextLengthError):
        EmbeddedEngine(engine, ARMS[0]).run(long, max_tokens=4, temperature=0.0, seeds=(1,), concurrency=1)
    assert run(engine, ARMS[0])[1]


def test_what_it_says_of_itself(engine):
    info = EmbeddedEngine(engine, ARMS[2]).info()
    assert (info["device"], info["dtype"], info["block_size"]) == ("cpu", "float32", 8)
    assert info["threads"] == torch.get_num_threads()
    assert "process" in info["peak_memory"]


def test_the_peak_of_a_cpu_is_the_processs_own(engine):
    arm = EmbeddedEngine(engine, ARMS[0])
    arm.flush()
    assert arm.peak_memory_bytes() == process_peak_bytes()
    assert process_peak_bytes() > 100 << 20  # torch alone takes more


def test_the_peak_of_a_gpu_is_the_largest_of_the_cells_requests(engine, monkeypatch):
    peaks = iter((300, 500, 200, 100))
    reset = []
    monkeypatch.setattr(embedded.torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(embedded.torch.cuda, "max_memory_allocated", lambda device: next(peaks))

    class OnGpu(EmbeddedEngine):
        _is_cuda = True

    arm = OnGpu(engine, ARMS[0])
    options = {"max_tokens": 2, "temperature": 0.0, "seeds": (1, 2), "concurrency": 1}
    arm.run(CHATS, **options)
    assert (arm.peak_memory_bytes(), len(reset)) == (500, 2)
    arm.flush()
    assert arm.peak_memory_bytes() is None
    arm.run(CHATS, **options)
    assert arm.peak_memory_bytes() == 200
