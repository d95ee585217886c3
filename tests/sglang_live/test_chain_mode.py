"""Chains, and a cap on what a round commits: seed and position decide the text, not the tree."""

import pytest

from sglang_kit.checks import heap_accept_len
from sglang_kit.prompts import prompt
from sglang_kit.runs import request, run_engine, step
from sglang_kit.sizes import BLOCK_SIZE

pytestmark = pytest.mark.sglang

NEW_TOKENS, MOST_ACCEPT_TOKENS = 32, 4
SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "presence_penalty": 0.8, "repetition_penalty": 1.2},
)


@pytest.fixture(scope="module")
def cases(llama_pair):
    """Prompts, parameters, and more of the text than is asked for."""
    from sglang_kit.reference import decode

    more = {"max_new_tokens": NEW_TOKENS + 2 * BLOCK_SIZE}
    cases = []
    for i, settings in enumerate(SETTINGS):
        params = settings | {"max_new_tokens": NEW_TOKENS, "sampling_seed": i, "ignore_eos": True}
        p = prompt(600 + i, 12)
        cases.append((p, params, decode(llama_pair.target, p, params | more).tokens))
    return cases


def test_capped_chains_give_the_same_texts(llama_pair, cases, tmp_path):
    requests = [request(f"chain-{i}", p, params, plan=text) for i, (p, params, text) in enumerate(cases)]
    config = {"mode": "chain", "max_accept_tokens": MOST_ACCEPT_TOKENS}
    run = run_engine(tmp_path, llama_pair, [step(requests)], config=config)
    lens = set()
    for i, (p, _, text) in enumerate(cases):
        assert run.tokens(f"chain-{i}") == text[:NEW_TOKENS]
        for round_ in run.rounds[f"chain-{i}"]:
            assert {len(row) for row in round_["tokens"]} == {1}
            chain = heap_accept_len(round_, [*p, *text], node_budget=BLOCK_SIZE - 1)
            assert round_["accept_len"] == min(chain, MOST_ACCEPT_TOKENS)
            lens.add((chain > MOST_ACCEPT_TOKENS, round_["accept_len"]))
    assert (True, MOST_ACCEPT_TOKENS) in lens
    assert (False, 1) in lens
