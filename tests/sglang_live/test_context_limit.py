"""Two requests side by side, each into the end of the context and of its row in the token table."""

import pytest

from sglang_kit import runs
from sglang_kit.prompts import prompt

pytestmark = pytest.mark.sglang

BLOCK_SIZE, CONTEXT_TOKENS = 16, 72
# So wide that twice the window, the reserve of DFLASH, is more than a row has behind the context.
NODE_BUDGET = 63
TEXT_TOKENS = CONTEXT_TOKENS - 2  # where plain decoding stops
LENGTHS = (30, 41)
PARAMS = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    from sglang_kit.models import write_pair

    return write_pair(tmp_path_factory.mktemp("block16"), block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def texts(pair):
    from sglang_kit.reference import decode

    prompts = [prompt(400 + length, length) for length in LENGTHS]
    return [(p, decode(pair.target, p, PARAMS | {"max_new_tokens": CONTEXT_TOKENS}).tokens) for p in prompts]


@pytest.fixture(scope="module", params=[1, 64], ids=lambda size: f"page{size}")
def run(pair, texts, tmp_path_factory, request):
    """Both orders, since a row that is too short runs into its neighbour behind it."""

    def requests(name, order):
        found = []
        for at, i in enumerate(order):
            p, text = texts[i]
            params = PARAMS | {"max_new_tokens": CONTEXT_TOKENS - len(p)}
            found.append(runs.request(f"{name}-{i}", p, params, plan=text, delay_s=0.05 * at))
        return found

    steps = [
        runs.step(requests("first", (0, 1)), flush=True),
        runs.step(requests("second", (1, 0)), flush=True),
    ]
    folder = tmp_path_factory.mktemp("limit")
    return runs.run_engine(
        folder, pair, steps, config={"node_budget": NODE_BUDGET}, env={"TRITON_INTERPRET": "1"},
        context_length=CONTEXT_TOKENS, page_size=request.param,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["first", "second"])
def test_texts_end_where_plain_decoding_ends_them(run, texts, name):
    for i, (p, text) in enumerate(texts):
        assert run.tokens(f"{name}-{i}") == text[: TEXT_TOKENS - len(p)]


def test_requests_ran_side_by_side_to_the_end(run):
    ends = [rounds[-1] for rounds in run.rounds.values()]
    assert any(end["batch_size"] == 2 for end in ends)
    assert max(end["prefix_len"] for end in ends) >= CONTEXT_TOKENS - BLOCK_SIZE


def test_the_pools_return_to_their_size(run):
    assert len(run.pool) >= 2
    assert all(line["free_slots"] == line["slots"] for line in run.pool)
