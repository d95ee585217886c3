"""`ddtree bench` with stock SGLang: the servers that it starts, and one at a URL, in all three modes."""

import json
import os
import zlib
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddtree.bench_config import BenchConfig
from sglang_kit.files import CONTROL_FILE, ROUNDS_FILE, read_lines
from sglang_kit.plugin import BACKEND_NAME, STOCK_DFLASH_VARIABLE
from sglang_kit.runs import environment, write_plans

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

NEW_TOKENS = 24
CHATS = [
    [{"role": "user", "content": text}]
    for text in ("Why is the sky blue?", "Write a sum.", "How many apples?")
]
FLAGS = (
    f"--attention-backend {BACKEND_NAME} --disable-cuda-graph --mem-fraction-static 0.3 "
    "--max-total-tokens 4096 --skip-server-warmup"
)
REQUEST = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "seeds": [1, 2, 3], "concurrency": 2}


def rid_of(tokens):
    return f"prompt-{zlib.crc32(repr(list(tokens)).encode())}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def config(qwen3_pair):
    return BenchConfig(
        engines=("sglang",), budgets=(7,), concurrency=(1, 2), device="cpu", dtype="float32",
        model=str(qwen3_pair.target_path), drafter=str(qwen3_pair.drafter_path), sglang_args=FLAGS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def arms(request):
    """With their algorithms; the chain's with --slow, since each server takes a minute to start."""
    chain = {"chain": "DFLASH"} if request.config.getoption("--slow") else {}
    return {"ar": None, "tree:7": "DDTREE", **chain}


@pytest.fixture(scope="module")
def prompts(config):
    from ddtree.bench.chat_tokens import ChatTokens, load_tokenizer

    encode = ChatTokens(load_tokenizer(config.model))
    return [encode(chat) for chat in CHATS]


@pytest.fixture(scope="module")
def plain(qwen3_pair, prompts):
    """What transformers says, greedily."""
    from sglang_kit.reference import decode

    params = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS}
    return [tuple(decode(qwen3_pair.target, list(prompt), params).tokens) for prompt in prompts]


@pytest.fixture(scope="module")
def runs(config, folder, prompts, plain, arms):
    """By arm: the answers of its own server, the same over its OpenAI API, and what it says of itself."""
    from ddtree.bench import openai_engine, sglang_server
    from ddtree.bench.run_format import Arm

    plans = [
        {"rid": rid_of(prompt), "plan": [*prompt, *tokens]}
        for prompt, tokens in zip(prompts, plain, strict=True)
    ]
    write_plans(folder, plans)
    (folder / CONTROL_FILE).write_text("{}", encoding="utf-8")
    body_of = sglang_server.generate_body
    runs = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(folder, {}, {STOCK_DFLASH_VARIABLE: "1"}).items():
            patch.setenv(name, value)
        patch.setattr(
            sglang_server,
            "generate_body",
            lambda tokens, *rest: body_of(tokens, *rest) | {"rid": rid_of(tokens)},
        )
        for plan in arms:
            engine = sglang_server.start_engine(Arm.parse(f"sglang {plan}"), config, folder / "logs")
            try:
                _, own = engine.run(CHATS, **REQUEST)
                engine.flush()
                port = engine.info()["command"].split("--port ")[1].split()[0]
                url = openai_engine.open_engine(Arm(f"http://127.0.0.1:{port}/v1", None), config)
                _, over_url = url.run(CHATS, **REQUEST)
                runs[plan] = own, over_url, engine.info(), url.info()
                url.close()
            finally:
                engine.close()
    return runs


def test_all_arms_say_what_plain_decoding_says(runs, plain, prompts):
    for plan, (own, over_url, _, _) in runs.items():
        assert [answer.tokens for answer in own] == plain, plan
        assert [answer.prompt for answer in own] == prompts
        assert [answer.tokens for answer in over_url] == plain, plan
        assert [answer.prompt for answer in over_url] == prompts, "the server's own template"
        assert [answer.text for answer in over_url] == [answer.text for answer in own]


def test_times_and_counts_of_answers_fit(runs):
    for own, over_url, _, _ in runs.values():
        for answer in [*own, *over_url]:
            assert answer.new_tokens == len(answer.tokens)
            assert answer.finish_reason in ("stop", "length")
            times = [
                answer.begin_s,
                answer.first_s,
                *(time_s for time_s, _ in answer.chunk_times),
                answer.end_s,
            ]
            assert times == sorted(times)
            assert sum(count for _, count in answer.chunk_times) == answer.new_tokens


def test_rounds_are_those_that_the_plugin_ran(runs, prompts, folder):
    own, over_url, _, _ = runs["tree:7"]
    rounds = read_lines(folder / ROUNDS_FILE)
    for answer, prompt in zip(own, prompts, strict=True):
        lengths = [line["accept_len"] for line in rounds if line["rid"] == rid_of(prompt)]
        # SGLang has launched one more when it sees that a request has ended.
        assert answer.rounds in (len(lengths), len(lengths) - 1)
        assert answer.accept_histogram == Counter(lengths[: answer.rounds])
        assert (
            sum(length * count for length, count in answer.accept_histogram.items()) >= answer.new_tokens - 1
        )
    assert sum(answer.rounds for answer in own) < sum(answer.new_tokens - 1 for answer in own) / 1.5
    for answer in over_url:  # nothing is planted there
        assert sum(answer.accept_histogram.values()) == answer.rounds


def test_plain_decoding_has_no_rounds(runs):
    assert all(answer.rounds == 0 and answer.accept_histogram is None for answer in runs["ar"][0])


@pytest.mark.slow
def test_chain_has_rounds(runs):
    for answer in runs["chain"][0]:
        assert sum(answer.accept_histogram.values()) == answer.rounds > 0


def test_servers_say_how_they_run(runs, arms):
    algorithms = {arm: info["settings"].get("speculative_algorithm") for arm, (_, _, info, _) in runs.items()}
    assert algorithms == arms
    for _, _, info, over_url in runs.values():
        assert info["dtype"] == over_url["dtype"] == "float32"
        assert info["version"] == over_url["version"]
        assert over_url["server"] == "sglang"
        assert over_url["token_counts"] == "by the server"
        assert "api_key" not in json.dumps(info)


def test_names_of_request_fields_are_those_of_the_installed_release():
    """A field that was renamed would be ignored, and rounds silently unknown."""
    from ddtree.bench.chat_request import EXACT_CHUNKS, EXTRAS
    from ddtree.bench.server_facts import ServerKind

    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    protocol = Path(spec.origin).parent / "srt" / "entrypoints" / "openai" / "protocol.py"
    text = protocol.read_text(encoding="utf-8")
    assert ServerKind.SGLANG in EXACT_CHUNKS
    for name in (*EXTRAS[ServerKind.SGLANG], "continuous_usage_stats", "spec_correct_drafts_histogram"):
        assert f"{name}:" in text, f"{name} (in {os.fspath(protocol)})"
