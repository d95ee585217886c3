"""Requests with sampling settings through the scheduler: equal to plain decoding with the same noise.

The reference is transformers, one token a pass. Every case runs alone and in a batch with all the others.
"""

import json

import pytest

from sglang_kit.checks import check_rounds
from sglang_kit.prompts import prompt
from sglang_kit.runs import request, run_engine, step

pytestmark = pytest.mark.sglang

NODE_BUDGET, BLOCK_SIZE = 12, 8
NEW_TOKENS = 40
TOP_LOGPROBS = 3
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
}
LOOPS = {"77": 3.0, "78": 3.0}  # so likely that penalties have something to count
FIXED = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "cool": {"temperature": 0.6},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "top_k_top_p": {"temperature": 1.2, "top_k": 20, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "all_filters": {"temperature": 1.1, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    "frequency": {"temperature": 0.5, "frequency_penalty": 0.7, "logit_bias": LOOPS},
    "presence": {"temperature": 0.5, "presence_penalty": 1.1, "logit_bias": LOOPS},
    "repetition": {"temperature": 0.5, "repetition_penalty": 2.0, "logit_bias": LOOPS},
    "penalties_greedy": {"temperature": 0.0, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "repetition_greedy": {"temperature": 0.0, "repetition_penalty": 1.4},
    "bias": {"temperature": 1.0, "logit_bias": {"77": 4.0, "155": -100.0}},
    "bias_greedy": {"temperature": 0.0, "logit_bias": {"77": 2.0, "155": -100.0}},
    "regex": {"temperature": 0.0, "regex": "[a-f]{5,9}(-[0-9]{2}){3}"},
    "regex_sampled": {"temperature": 1.0, "regex": "([a-z]{3} ){4}[0-9]+;"},
    "schema": {"temperature": 1.0, "json_schema": json.dumps(SCHEMA)},
    "everything": {
        "temperature": 1.1, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "frequency_penalty": 0.3,
        "presence_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {"90": 1.5},
    },
}  # fmt: skip
# Made from the greedy text, in `cases`.
FOUND = ("stop_token", "min_new_tokens", "min_new_tokens_sampled")
NAMES = (*FIXED, *FOUND)
WITHOUT_END = ("greedy", "temperature", "top_k_top_p", "repetition", "all_filters")


def prompt_of(name):
    """Cases made from the greedy text have its prompt."""
    index = 0 if name in FOUND else list(FIXED).index(name)
    return prompt(100 + index, 5 + index)


@pytest.fixture(scope="module")
def cases(llama_pair):
    """Sampling parameters by name."""
    from sglang_kit.reference import decode

    greedy = decode(llama_pair.target, prompt_of("greedy"), {"temperature": 0.0, "max_new_tokens": 30}).tokens
    stop = next(token for i, token in enumerate(greedy) if i >= 6 and token not in greedy[:i])
    found = {
        "stop_token": {"temperature": 0.0, "stop_token_ids": [stop]},
        "min_new_tokens": {"temperature": 0.0, "stop_token_ids": greedy[3:5], "min_new_tokens": 17},
        "min_new_tokens_sampled": {
            "temperature": 0.7, "stop_token_ids": list(range(20, 120)), "min_new_tokens": 21
        },
    }  # fmt: skip
    settings = FIXED | {name: found[name] for name in FOUND}
    return {
        name: params
        | {"max_new_tokens": NEW_TOKENS, "sampling_seed": 1000 + i, "ignore_eos": name in WITHOUT_END}
        for i, (name, params) in enumerate(settings.items())
    }


@pytest.fixture(scope="module")
def references(llama_pair, cases):
    """Each case's text; those without an end go on, so that their last rounds can be checked as well."""
    from sglang_kit.reference import decode

    more = {"max_new_tokens": NEW_TOKENS + 2 * BLOCK_SIZE}
    return {
        name: decode(llama_pair.target, prompt_of(name), params | (more if name in WITHOUT_END else {}))
        for name, params in cases.items()
    }


@pytest.fixture(scope="module")
def run(llama_pair, cases, references, tmp_path_factory):
    def requests(label, **options):
        return [
            request(f"{label}-{name}", prompt_of(name), params, plan=references[name].tokens, **options)
            for name, params in cases.items()
        ]

    logprobs = {"return_logprob": True, "top_logprobs_num": TOP_LOGPROBS}
    steps = [
        step(requests("alone", **logprobs), alone=True, flush=True),
        step(requests("batch"), flush=True),
    ]
    folder = tmp_path_factory.mktemp("sampling")
    return run_engine(folder, llama_pair, steps, config={"node_budget": NODE_BUDGET})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("label", ["alone", "batch"])
def test_texts_are_those_of_plain_decoding(run, references, label, name):
    assert run.tokens(f"{label}-{name}") == references[name].tokens[:NEW_TOKENS]


@pytest.mark.parametrize("name", WITHOUT_END)
@pytest.mark.parametrize("label", ["alone", "batch"])
def test_every_round_commits_what_the_heap_says(run, references, label, name):
    text = [*prompt_of(name), *references[name].tokens]
    check_rounds(run.rounds[f"{label}-{name}"], text, NODE_BUDGET, BLOCK_SIZE)


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_those_of_transformers(run, references, name):
    reported = run.outputs[f"alone-{name}"]["meta_info"]["output_token_logprobs"]
    tokens, log_probs = references[name].tokens[:NEW_TOKENS], references[name].log_probs[:NEW_TOKENS]
    assert [token for _, token, _ in reported] == tokens
    assert [value for value, _, _ in reported] == pytest.approx(log_probs, abs=2e-5)


def test_top_logprobs_hold_the_greedy_token(run, references):
    reported = run.outputs["alone-greedy"]["meta_info"]["output_top_logprobs"]
    assert [row[0][1] for row in reported] == references["greedy"].tokens[:NEW_TOKENS]
    assert all(len(row) == TOP_LOGPROBS for row in reported)


@pytest.mark.parametrize(
    "name", ["frequency", "presence", "repetition", "penalties_greedy", "min_new_tokens"]
)
def test_penalties_matter(llama_pair, cases, references, name):
    """Without them the reference says something else, so its equality above is one."""
    from sglang_kit.reference import decode

    neutral = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }
    without = decode(llama_pair.target, prompt_of(name), cases[name] | neutral)
    assert without.tokens[:NEW_TOKENS] != references[name].tokens[:NEW_TOKENS]


def test_sampled_requests_accept_drafts(run):
    lens = [r["accept_len"] for rid in run.rounds for r in run.rounds[rid]]
    assert sum(lens) / len(lens) > 2
