"""Replay passes what plain decoding says, and catches what it does not say."""

import dataclasses
import math

import pytest
import torch

from ddtree.config import SamplingParams
from ddtree.trace import replay
from ddtree.trace.choice import EXCLUDED, gaps, kept_sets, token_counts
from ddtree.trace.outputs import Output, Sampling
from ddtree.trace.replay import Replayer, batches, swapped
from ddtree.tree.noise import keyed_gumbel, reference_uniform
from engine_kit import PROMPT as ENGINE_PROMPT
from engine_kit import VOCAB_SIZE, plain, tiny_target
from tiny_models import tiny_llama, tiny_qwen3

PROMPT = [5, 17, 91, 33, 8]
STOP = (2,)
EPS = 1e-3
MIXES = {
    "greedy": {"temperature": 0.0},
    "greedy top-k": {"top_k": 1},
    "cool": {"temperature": 0.7, "sampling_seed": 3},
    "warm": {"temperature": 1.0, "sampling_seed": 2**40 + 1},
    "top-k": {"top_k": 7, "sampling_seed": 4},
    "top-p": {"top_p": 0.8, "sampling_seed": 5},
    "both": {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "sampling_seed": 6},
    "min-p": {"min_p": 0.05, "sampling_seed": 7},
    "frequency": {"frequency_penalty": 0.6, "sampling_seed": 8},
    "presence": {"presence_penalty": 1.5, "temperature": 0.0},
    "repetition": {"repetition_penalty": 1.3, "sampling_seed": 9},
    "greedy repetition": {"repetition_penalty": 1.5, "temperature": 0.0},
    "bias": {"logit_bias": {"7": 4.0, "2": -5.0}, "sampling_seed": 10},
    "min new tokens": {"min_new_tokens": 20, "logit_bias": {"2": 6.0}, "sampling_seed": 11},
    "all": {
        "temperature": 1.3, "top_k": 60, "top_p": 0.97, "min_p": 0.01, "frequency_penalty": 0.2,
        "presence_penalty": 0.3, "repetition_penalty": 1.1, "min_new_tokens": 5, "sampling_seed": 12,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return tiny_qwen3(vocab_size=97)


def replayer(model):
    return Replayer(model, STOP, noise=keyed_gumbel)


def test_outputs_replayed_together_have_their_own_logits(model, monkeypatch):
    monkeypatch.setattr(replay, "BATCH_TOKENS", 48)
    generator = torch.Generator().manual_seed(0)
    sizes = [(5, 9), (1, 1), (11, 3), (2, 30), (30, 2), (5, 4), (1, 12), (60, 7)]
    draws = [torch.randint(97, (n + m,), generator=generator).tolist() for n, m in sizes]
    outputs = [
        Output(tokens[:n], tokens[n:], MIXES["greedy"]) for (n, _), tokens in zip(sizes, draws, strict=True)
    ]
    assert max(map(len, batches(outputs))) > 1
    together = dict(replayer(model).logits(outputs))
    assert sorted(together) == list(range(len(outputs)))
    for index, output in enumerate(outputs):
        context = torch.tensor([[*output.prompt, *output.tokens[:-1]]])
        with torch.inference_mode():
            alone = model(context).logits[0, len(output.prompt) - 1 :]
        torch.testing.assert_close(together[index], alone, atol=1e-4, rtol=0)


def test_counts_are_of_the_tokens_before_a_place():
    tokens = [3, 1, 3, 3, 0, 1]
    for begin, end in ((0, 6), (2, 5), (5, 6), (0, 1)):
        counts = token_counts(tokens, begin, end, 5, "cpu")
        assert counts.tolist() == [
            [tokens[:place].count(token) for token in range(5)] for place in range(begin, end)
        ]


def plain_choice(logits, output, sampling, position):
    """One token as plain decoding chooses it, number by number."""
    values = list(logits)
    for token in range(len(values)):
        count = output.count(token)
        if count:
            values[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
            values[token] *= (
                sampling.repetition_penalty if values[token] < 0 else 1 / sampling.repetition_penalty
            )
        if token in STOP and len(output) < sampling.min_new_tokens:
            values[token] = -math.inf
        values[token] += sampling.logit_bias.get(token, 0.0)
    if sampling.is_greedy("sglang"):
        return max(range(len(values)), key=lambda token: (values[token], -token))
    values = [value / sampling.temperature for value in values]
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    total = sum(math.exp(value) for value in values)
    best, best_score, mass = None, -math.inf, 0.0
    for rank, token in enumerate(order):
        share = math.exp(values[token]) / total
        keeps = (sampling.top_k <= 0 or rank < sampling.top_k) and mass <= sampling.top_p
        mass += share
        if not keeps or share < sampling.min_p * math.exp(values[order[0]]) / total:
            continue
        noise = -math.log(-math.log(reference_uniform(sampling.seed, position, token)))
        if values[token] + noise > best_score:
            best, best_score = token, values[token] + noise
    return best


@torch.inference_mode()
def decode(model, parameters, length=40, late=0, noise_offset=0, causal_break=None):
    """Plain decoding; faults: penalties `late` tokens behind, noise of another position, a wrong prefix."""
    sampling, output = Sampling.of(parameters), []
    for _ in range(length):
        context = [*PROMPT, *output]
        if causal_break is not None and len(output) > causal_break:
            context[len(PROMPT)] = 60  # as if the KV of the first emitted token were another one's
        logits = model(torch.tensor([context])).logits[0, -1].double().tolist()
        counted = output[: len(output) - late] if late else output
        position = len(PROMPT) + len(output) + noise_offset
        output.append(plain_choice(logits, counted, sampling, position))
    return Output(PROMPT, output, parameters)


@pytest.mark.parametrize("name", MIXES)
def test_plain_decoding_replays(model, name, monkeypatch):
    monkeypatch.setattr(replay, "ROWS", 16)  # an output is more than one part
    verdict = replayer(model).judge(decode(model, MIXES[name]), EPS)
    assert verdict.num_tokens == 40
    assert verdict.num_violations == 0
    assert verdict.max_gap < EPS / 10


@pytest.mark.parametrize("name", MIXES)
def test_swapped_tokens_are_caught(model, name):
    fault = swapped(decode(model, MIXES[name]))
    assert fault is not None
    verdict = replayer(model).judge(fault, EPS)
    assert verdict.max_gap > 10 * EPS
    assert verdict.first_violation.emitted == fault.tokens[verdict.first_violation.index]


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("frequency", {"late": 8}),
        ("presence", {"late": 1}),
        ("greedy repetition", {"late": 1}),
        ("warm", {"noise_offset": 1}),
        ("top-k", {"noise_offset": -1}),
        ("greedy", {"causal_break": 10}),
        ("top-p", {"causal_break": 10}),
    ],
)
def test_a_fault_of_the_engine_is_caught(model, name, fault):
    verdict = replayer(model).judge(decode(model, MIXES[name], **fault), EPS)
    assert verdict.max_gap > 10 * EPS


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        ("cool", {"temperature": 1.0}),
        ("top-k", {"top_k": -1}),
        ("top-p", {"top_p": 1.0}),
        ("min-p", {"min_p": 0.0}),
        ("bias", {"logit_bias": None}),
        ("min new tokens", {"min_new_tokens": 0}),
        ("warm", {"sampling_seed": 1}),
        ("repetition", {"repetition_penalty": 1.0}),
        ("cool", {"temperature": 0.0}),
    ],
)
def test_an_ignored_parameter_is_caught(model, name, ignored):
    output = decode(model, MIXES[name] | ignored)
    claimed = Output(output.prompt, output.tokens, MIXES[name])
    assert replayer(model).judge(claimed, EPS).max_gap > 10 * EPS


def test_a_violation_says_where_and_what(model):
    output = decode(model, MIXES["greedy"])
    tokens = list(output.tokens)
    tokens[25] = (tokens[25] + 1) % 97
    first = replayer(model).judge(Output(PROMPT, tokens, MIXES["greedy"]), EPS).first_violation
    assert (first.index, first.position) == (25, 30)
    assert (first.emitted, first.expected) == (tokens[25], output.tokens[25])


def test_a_near_tie_is_allowed_up_to_eps():
    logits = torch.tensor([[2.0, 2.01, 0.0]])
    greedy = Sampling(temperature=0.0)
    gap, best = gaps(logits, torch.tensor([0]), torch.tensor([9]), greedy, 0.02)
    assert gap.item() == pytest.approx(0.01, abs=1e-6)
    assert best.item() == 1


def test_sets_kept_are_bounds():
    scaled = torch.tensor([[3.0, 2.0, 1.995, 1.0]])
    maybe, surely = kept_sets(scaled, Sampling(top_k=2), 0.01)
    assert maybe.tolist() == [[True, True, True, False]]
    assert surely.tolist() == [[True, False, False, False]]
    maybe, surely = kept_sets(scaled, Sampling(top_k=2), 0.001)
    assert maybe.tolist() == surely.tolist() == [[True, True, False, False]]
    probs = scaled.softmax(-1)[0]
    edge = float(probs[0] + probs[1])  # what comes before the third token
    for top_p, expected in ((edge + 0.01, True), (edge - 0.01, False)):
        maybe, surely = kept_sets(scaled, Sampling(top_p=top_p), 1e-4)
        assert maybe[0, 2].item() == surely[0, 2].item() == expected
    maybe, surely = kept_sets(scaled, Sampling(top_p=edge), 0.01)
    assert maybe[0, 2]
    assert not surely[0, 2]
    least = float(probs[2] / probs[0])
    maybe, surely = kept_sets(scaled, Sampling(min_p=least), 0.01)
    assert maybe.tolist() == [[True, True, True, False]]
    assert surely.tolist() == [[True, False, False, False]]


def test_a_filtered_token_is_excluded_and_its_noise_does_not_count():
    logits = torch.tensor([[5.0, 0.0, 0.0]]).repeat(200, 1)
    positions = torch.arange(200)
    sampling = Sampling(top_k=1 + 1, temperature=4.0, seed=1)
    for token in (0, 1):
        gap, _ = gaps(logits, torch.full((200,), token), positions, sampling, 1e-6, keyed_gumbel)
        assert (gap == 0).any()
        assert (gap < EXCLUDED).all()
    only = Sampling(top_p=1e-4, temperature=4.0, seed=1)
    gap, best = gaps(logits, torch.full((200,), 1), positions, only, 1e-6, keyed_gumbel)
    assert (gap == EXCLUDED).all()
    assert (best == 0).all()


def test_masked_tokens_are_excluded(model):
    output = decode(model, MIXES["greedy"])
    tokens = torch.tensor(output.tokens)

    def all_but_emitted(regex, emitted):
        masks = torch.ones(len(emitted), 97, dtype=torch.bool)
        return masks.scatter_(1, tokens.unsqueeze(1), False)

    masked = Output(output.prompt, output.tokens, {"temperature": 0.0, "regex": "a"})
    assert Replayer(model, STOP, make_masks=all_but_emitted).judge(masked, EPS).max_gap == EXCLUDED
    with pytest.raises(ValueError, match="make_masks"):
        replayer(model).judge(masked, EPS)


def test_equal_tokens_cannot_be_swapped():
    assert swapped(Output(PROMPT, [4, 4, 4], {})) is None


# -- the embedded engine ---------------------------------------------------------------------------

EMBEDDED = {
    "greedy": SamplingParams(),
    "warm": SamplingParams(temperature=1.0, seed=-5),
    "top-k": SamplingParams(temperature=0.9, top_k=9, seed=2**62),
    "top-p": SamplingParams(temperature=1.0, top_p=0.7, seed=3),
    "both": SamplingParams(temperature=1.2, top_k=12, top_p=0.8, seed=4),
    "min-p": SamplingParams(temperature=1.0, min_p=0.05, seed=5),
    "penalties": SamplingParams(
        temperature=0.8, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.4, seed=6
    ),
    "greedy repetition": SamplingParams(repetition_penalty=1.5),
    "bias": SamplingParams(logit_bias={7: 4.0, 40: -3.0}, repetition_penalty=1.3, temperature=1.0, seed=7),
}


@pytest.fixture(scope="module")
def engine_model():
    return tiny_llama(vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def answers(engine_model, tmp_path_factory):
    """The engine's plain answer to each mix, as an output."""
    target = tiny_target(tmp_path_factory.mktemp("target"), engine_model)

    def answer(name):
        sampling = dataclasses.replace(EMBEDDED[name], max_tokens=40)
        tokens = plain(target, sampling).tokens
        return Output(ENGINE_PROMPT, tokens, dataclasses.asdict(sampling), name, order="embedded")

    return answer


@pytest.mark.parametrize("name", EMBEDDED)
def test_the_engines_answers_replay_in_its_own_order(engine_model, answers, name):
    verdict = replayer(engine_model).judge(answers(name), EPS)
    assert (verdict.num_tokens, verdict.num_violations) == (40, 0)
    assert verdict.max_gap < EPS / 10


@pytest.mark.parametrize("name", ["both", "penalties", "bias", "greedy repetition"])
def test_the_other_order_is_another_choice(engine_model, answers, name):
    output = dataclasses.replace(answers(name), order="sglang")
    assert output.read_sampling().depends_on_order
    assert replayer(engine_model).judge(output, EPS).max_gap > 10 * EPS


def test_shares_of_top_p_are_of_what_top_k_keeps():
    scaled = torch.tensor([[2.0, 1.0, 0.5, 0.4]])  # shares 0.55, 0.20, 0.12, 0.11
    sampling = Sampling(top_k=2, top_p=0.6)
    embedded, _ = kept_sets(scaled, sampling, 1e-4, "embedded")
    sglang, _ = kept_sets(scaled, sampling, 1e-4, "sglang")
    assert embedded.tolist() == [[True, False, False, False]]  # 0.73 of the two come before the second
    assert sglang.tolist() == [[True, True, False, False]]


def test_a_draw_without_noise_or_seed_is_refused(engine_model, answers):
    with pytest.raises(ValueError, match="noise and a seed"):
        Replayer(engine_model, STOP).judge(answers("warm"), EPS)
