"""Ranks of stock SGLang on the CPU, each with its part of the heads and of the vocabulary."""

import os

import pytest

from sglang_kit.checks import check_rounds
from sglang_kit.prompts import prompt
from sglang_kit.runs import request, run_engine, step
from sglang_kit.sizes import BLOCK_SIZE

pytestmark = pytest.mark.sglang

NODE_BUDGET, NEW_TOKENS = 20, 24
CASES = {
    "greedy": {"temperature": 0.0},
    "greedy_long": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "sampling_seed": 5},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.5, "sampling_seed": 6},
}


def prompt_of(name):
    index = list(CASES).index(name)
    return prompt(200 + index, 4 + 9 * index)


@pytest.fixture(scope="module")
def references(qwen3_pair):
    from sglang_kit.reference import decode

    more = {"max_new_tokens": NEW_TOKENS + 2 * BLOCK_SIZE, "ignore_eos": True}
    return {name: decode(qwen3_pair.target, prompt_of(name), p | more).tokens for name, p in CASES.items()}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_texts_and_rounds_are_those_of_one_rank(qwen3_pair, references, tmp_path, num_ranks):
    own = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    requests = [request(name, prompt_of(name), p | own, plan=references[name]) for name, p in CASES.items()]
    # SGLang binds each rank to cores of its own.
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    bound = "|".join(cores[i % len(cores)] for i in range(num_ranks))
    run = run_engine(
        tmp_path,
        qwen3_pair,
        [step(requests)],
        config={"node_budget": NODE_BUDGET, "check_ranks": True},
        env={"SGLANG_CPU_OMP_THREADS_BIND": bound},
        tp_size=num_ranks,
    )
    assert f"TP{num_ranks - 1}" in run.log
    for name, text in references.items():
        assert run.tokens(name) == text[:NEW_TOKENS]
        check_rounds(run.rounds[name], [*prompt_of(name), *text], NODE_BUDGET, BLOCK_SIZE)
