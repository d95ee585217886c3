"""Page size 16, prompts in chunks, a pool too small for all requests, and a window wider than the tree."""

import pytest

from sglang_kit.checks import check_rounds
from sglang_kit.prompts import prompt
from sglang_kit.runs import request, run_engine, step
from sglang_kit.sizes import BLOCK_SIZE

pytestmark = pytest.mark.sglang

PAGE_SIZE, CHUNK_TOKENS, POOL_TOKENS = 16, 16, 352
NODE_BUDGET = 4  # fewer nodes than the block has drafts: the window is the block, the rest of it padding
NEW_TOKENS = 40
SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 0.5, "presence_penalty": 1.5, "logit_bias": {"77": 3.0, "78": 3.0}},
    {"temperature": 0.7, "frequency_penalty": 0.6, "repetition_penalty": 1.3},
)
GREEDY = (0, 3, 6)
LENGTHS = (1, 15, 16, 17, 33, 50, 40, 24, 31)


def params_of(i):
    return SETTINGS[i % len(SETTINGS)] | {
        "max_new_tokens": NEW_TOKENS, "sampling_seed": 30 + i, "ignore_eos": True
    }  # fmt: skip


@pytest.fixture(scope="module")
def texts(qwen3_pair):
    from sglang_kit.reference import decode

    prompts = [prompt(300 + i, length) for i, length in enumerate(LENGTHS)]
    more = {"max_new_tokens": NEW_TOKENS + 2 * BLOCK_SIZE}
    return [(p, decode(qwen3_pair.target, p, params_of(i) | more).tokens) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def run(qwen3_pair, texts, tmp_path_factory):
    together = [request(f"together-{i}", p, params_of(i), plan=text) for i, (p, text) in enumerate(texts)]
    reuse = []
    for i in GREEDY:
        p, text = texts[i]
        short = params_of(i) | {"max_new_tokens": 12}
        reuse.append(request(f"seen-{i}", p, params_of(i), plan=text))
        reuse.append(request(f"reuse-{i}", [*p, *text[:20]], short, plan=text[20:]))
    return run_engine(
        tmp_path_factory.mktemp("pages"),
        qwen3_pair,
        [step(together), step(reuse, alone=True, flush=True)],
        config={"node_budget": NODE_BUDGET},
        # SGLang's page allocator is a Triton kernel; its own switch has requests retracted now and then.
        env={"TRITON_INTERPRET": "1", "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "9"},
        page_size=PAGE_SIZE,
        chunked_prefill_size=CHUNK_TOKENS,
        max_total_tokens=POOL_TOKENS,
    )


def test_texts_and_rounds_are_those_of_plain_decoding(run, texts):
    for i, (p, text) in enumerate(texts):
        assert run.tokens(f"together-{i}") == text[:NEW_TOKENS]
        for round_ in run.rounds[f"together-{i}"]:
            check_rounds([round_], [*p, *text], NODE_BUDGET, BLOCK_SIZE)


def num_retractions(run, i):
    return run.outputs[f"together-{i}"]["meta_info"]["num_retractions"]


def test_requests_were_retracted_and_prompts_chunked(run):
    """Penalties must go on counting where they were, and texts are as they should be."""
    retracted = [i for i in range(len(LENGTHS)) if num_retractions(run, i) > 0]
    assert any(i not in GREEDY for i in retracted)
    assert run.log.count("Prefill batch") > len(LENGTHS) + 5


def test_cached_pages_are_reused(run, texts):
    for i in GREEDY:
        p, text = texts[i]
        assert run.tokens(f"reuse-{i}") == text[20:32]
        whole_pages = (len(p) + 20 - 1) // PAGE_SIZE * PAGE_SIZE
        assert run.outputs[f"reuse-{i}"]["meta_info"]["cached_tokens"] == whole_pages


def test_the_pools_return_to_their_size(run):
    assert run.pool
    for line in run.pool:
        assert line["free_slots"] == line["slots"]
        assert line["free_rows"] == line["rows"]
