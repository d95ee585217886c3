"""All outputs of a run judged together: wrong tokens and endings, planted faults, eps."""

import dataclasses

import pytest
import torch

from ddtree.errors import ConfigError
from ddtree.trace.judge import calibrated_eps, judge_outputs, largest_plain_gap
from ddtree.trace.outputs import Output
from ddtree.trace.replay import Replayer
from tiny_models import tiny_qwen3

STOP = (2,)
PROMPTS = [[60, 61, 62, 63], [5, 17, 91], [8, 44]]
SAMPLING = {"temperature": 0.0, "max_tokens": 20, "logit_bias": {2: -1e9}}


@pytest.fixture(scope="module")
def replayer():
    return Replayer(tiny_qwen3(vocab_size=97), STOP)


@pytest.fixture(scope="module")
def outputs(replayer):
    model, found = replayer._model, []
    for number, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(20):
                logits = model(torch.tensor([tokens])).logits[0, -1]
                logits[2] = float("-inf")
                tokens.append(int(logits.argmax()))
        found.append(Output(prompt, tuple(tokens[len(prompt) :]), SAMPLING, f"r{number}", {"type": "length"}))
    return found


def test_right_outputs_pass_and_planted_faults_are_found(replayer, outputs):
    judged = judge_outputs(replayer, outputs, 1e-3, 512, plant=True)
    assert judged.is_lossless
    assert (judged.num_outputs, judged.num_tokens) == (3, 60)
    assert judged.num_planted == judged.num_planted_found == 3
    assert judged.smallest_planted_gap > 1e-2


def test_each_wrong_token_is_named(replayer, outputs):
    tokens = list(outputs[1].tokens)
    tokens[7] = (tokens[7] + 1) % 97
    wrong = [outputs[0], dataclasses.replace(outputs[1], tokens=tokens), outputs[2]]
    judged = judge_outputs(replayer, wrong, 1e-3)
    assert not judged.is_lossless
    name, first, number = judged.first_violations()[0]
    assert (name, first.index, first.position) == ("r1", 7, 10)
    assert (first.emitted, first.expected) == (tokens[7], outputs[1].tokens[7])
    assert first.gap > 1e-2
    report = judged.to_json()
    assert report["violations"][0] | {"gap": 0} == {
        "output": "r1", "index": 7, "position": 10, "emitted": tokens[7],
        "expected": outputs[1].tokens[7], "gap": 0,
    }  # fmt: skip
    assert len(report["violations"]) == number == judged.to_json()["not_best"]


def test_findings_are_in_the_order_of_the_outputs(replayer, outputs):
    wrong = [dataclasses.replace(output, tokens=(*output.tokens[:5], 3, *output.tokens[6:]))
             for output in outputs]  # fmt: skip
    names = [name for name, _, _ in judge_outputs(replayer, wrong, 1e-3).first_violations()]
    assert names == ["r0", "r1", "r2"]


def test_a_wrong_ending_spoils_a_run_and_a_known_one_does_not(replayer, outputs):
    place = next(i for i in range(1, 19) if outputs[0].tokens[i] not in outputs[0].tokens[:i])
    sampling = SAMPLING | {"stop_token_ids": [outputs[0].tokens[place]]}
    early = [dataclasses.replace(outputs[0], sampling=sampling)]
    judged = judge_outputs(replayer, early, 1e-3)
    assert [name for name, _ in judged.endings] == ["r0"]
    assert not judged.is_lossless
    known = judge_outputs(replayer, early, 1e-3, overrun_tokens=20)
    assert (known.endings, len(known.known_endings)) == ([], 1)
    assert known.is_lossless


def test_eps_is_fixed_in_float32_and_measured_in_16_bits():
    assert calibrated_eps("float32", []) == 1e-3
    assert calibrated_eps("bfloat16", [0.125, 0.25]) == 0.5
    assert calibrated_eps("float16", [0.125, 0.0]) == 0.25
    assert calibrated_eps("bfloat16", []) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_eps_is_no_less_than_a_unit_of_the_format_at_a_logit_of_32(dtype):
    unit = torch.finfo(getattr(torch, dtype)).eps * 32
    assert calibrated_eps(dtype, [0.0]) == unit
    assert calibrated_eps(dtype, [0.49 * unit]) == unit
    assert calibrated_eps(dtype, [0.51 * unit]) == 1.02 * unit


def test_eps_comes_from_greedy_outputs_that_are_the_targets(replayer, outputs):
    assert largest_plain_gap(replayer, outputs, "plain.jsonl") < 1e-4
    sampled = dataclasses.replace(outputs[0], sampling={"temperature": 1.0, "seed": 1})
    with pytest.raises(ConfigError, match="no greedy output"):
        largest_plain_gap(replayer, [sampled], "plain.jsonl")
    wrong = dataclasses.replace(outputs[0], tokens=tuple(reversed(outputs[0].tokens)))
    with pytest.raises(ConfigError, match="at most 2 can be rounding"):
        largest_plain_gap(replayer, [wrong], "plain.jsonl")
