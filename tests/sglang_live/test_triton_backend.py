"""SGLang's own triton attention backend, unmodified, in Triton's interpreter: the code a GPU runs."""

import pytest

from sglang_kit.checks import check_rounds
from sglang_kit.prompts import prompt
from sglang_kit.runs import request, run_engine, step
from sglang_kit.sizes import BLOCK_SIZE

pytestmark = pytest.mark.sglang

NODE_BUDGET, NEW_TOKENS = 12, 14
PARAMS = (
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.9, "top_k": 40, "sampling_seed": 3, "ignore_eos": True},
)


@pytest.fixture(scope="module")
def texts(qwen3_pair):
    from sglang_kit.reference import decode

    prompts = [prompt(500 + i, 9 + 8 * i) for i in range(len(PARAMS))]
    more = {"max_new_tokens": NEW_TOKENS + 2 * BLOCK_SIZE}
    return [
        (p, decode(qwen3_pair.target, p, params | more).tokens)
        for p, params in zip(prompts, PARAMS, strict=True)
    ]


def test_texts_and_rounds_are_those_of_plain_decoding(qwen3_pair, texts, tmp_path):
    requests = [
        request(f"triton-{i}", p, params | {"max_new_tokens": NEW_TOKENS}, plan=text)
        for i, ((p, text), params) in enumerate(zip(texts, PARAMS, strict=True))
    ]
    run = run_engine(
        tmp_path,
        qwen3_pair,
        [step(requests)],
        config={"node_budget": NODE_BUDGET},
        env={"TRITON_INTERPRET": "1"},
        attention_backend="triton",
    )
    for i, (p, text) in enumerate(texts):
        assert run.tokens(f"triton-{i}") == text[:NEW_TOKENS]
        check_rounds(run.rounds[f"triton-{i}"], [*p, *text], NODE_BUDGET, BLOCK_SIZE)
