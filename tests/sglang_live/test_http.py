"""`sglang serve` with DDTREE: completions, a stream, an abort, bad and refused requests, metrics."""

import json
import re
import threading
from functools import partial

import pytest
import requests

from sglang_kit.prompts import prompt
from sglang_kit.runs import request

pytestmark = pytest.mark.sglang

TIMEOUT_S = 60
NEW_TOKENS = 24
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "sampling_seed": 11}
PROMPT = prompt(700, 14)


@pytest.fixture(scope="module")
def greedy(qwen3_pair):
    from sglang_kit.reference import decode

    return decode(qwen3_pair.target, PROMPT, {"temperature": 0.0, "max_new_tokens": 2 * NEW_TOKENS}).tokens


@pytest.fixture(scope="module")
def sampled(qwen3_pair):
    from sglang_kit.reference import decode

    return decode(qwen3_pair.target, PROMPT, SAMPLED | {"max_new_tokens": NEW_TOKENS}).tokens


@pytest.fixture(scope="module")
def text_of():
    """Tokens -> text, as the server decodes them."""
    from ddtree.train.tiny_pair import tiny_tokenizer

    return partial(tiny_tokenizer().decode, skip_special_tokens=True)


@pytest.fixture(scope="module")
def server(qwen3_pair, greedy, sampled, tmp_path_factory):
    from sglang_kit.serving import serve

    plans = [request("planted", PROMPT, {}, plan=greedy), request("seeded", PROMPT, {}, plan=sampled)]
    with serve(
        tmp_path_factory.mktemp("http"),
        qwen3_pair,
        plans,
        {"node_budget": 15},
        enable_metrics=True,
        enable_custom_logit_processor=True,
        enable_return_hidden_states=True,
        served_model_name="tiny",
    ) as address:
        yield address


def post(server, path, body):
    return requests.post(f"{server}{path}", json=body, timeout=TIMEOUT_S)


def generate(server, params, **options):
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": NEW_TOKENS} | params} | options
    return post(server, "/generate", body)


def completion(server, **options):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0} | options
    return post(server, "/v1/completions", body)


def events(response):
    """The objects of an event stream."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_generate_gives_the_texts_of_plain_decoding(server, greedy, sampled):
    answer = generate(server, {"temperature": 0}, rid="planted").json()
    assert answer["output_ids"] == greedy[:NEW_TOKENS]
    assert answer["meta_info"]["spec_accept_length"] > 2
    answer = generate(server, SAMPLED, rid="seeded").json()
    assert answer["output_ids"] == sampled
    # Without planted drafts too: the text depends on the seed alone.
    assert generate(server, SAMPLED).json()["output_ids"] == sampled


def test_completions_take_a_seed(server, greedy, sampled, text_of):
    assert completion(server).json()["choices"][0]["text"] == text_of(greedy[:NEW_TOKENS])
    answer = completion(server, temperature=0.9, top_p=0.9, seed=11).json()
    assert answer["choices"][0]["text"] == text_of(sampled)
    assert answer["usage"]["completion_tokens"] == NEW_TOKENS


def test_a_stream_adds_up_to_the_text(server, greedy, text_of):
    pieces = events(completion(server, stream=True))
    assert len(pieces) > 2
    text = "".join(piece["choices"][0]["text"] for piece in pieces)
    assert text == text_of(greedy[:NEW_TOKENS])


def test_a_stop_string_ends_the_text_before_it(server, greedy, text_of):
    text = text_of(greedy)
    stop = next(text[i : i + 2] for i in range(8, len(text)) if re.fullmatch(r"[ -~]{2}", text[i : i + 2]))
    answer = completion(server, stop=[stop], max_tokens=2 * NEW_TOKENS).json()["choices"][0]
    assert answer["text"] == text[: text.index(stop)]
    assert answer["finish_reason"] == "stop"


def test_chat_answers(server):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 6}
    answer = post(server, "/v1/chat/completions", body)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["role"] == "assistant"


def test_a_request_can_be_aborted(server):
    answers = []
    params = {"temperature": 0, "max_new_tokens": 450, "ignore_eos": True}
    thread = threading.Thread(target=lambda: answers.append(generate(server, params, rid="aborted")))
    thread.start()
    while thread.is_alive():
        post(server, "/abort_request", {"rid": "aborted"})
        thread.join(0.05)
    body = answers[0].json()
    finish = body["meta_info"]["finish_reason"] if "meta_info" in body else body["error"]
    assert "abort" in json.dumps(finish).lower()


@pytest.mark.parametrize(
    "params", [{"temperature": -1}, {"top_p": 7}, {"max_new_tokens": -3}, {"regex": "a", "json_schema": "{}"}]
)
def test_a_bad_request_gets_a_400(server, params):
    assert generate(server, params).status_code == 400


def test_what_ddtree_does_not_support_gets_a_400_that_says_so(server, greedy):
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    refused = {
        "custom_logit_processor": DisallowedTokensLogitsProcessor().to_str(),
        "return_hidden_states": True,
    }
    for name, value in refused.items():
        answer = generate(server, {"temperature": 0}, **{name: value})
        assert answer.status_code == 400, f"{name}: {answer.text}"
        assert name in answer.text
        assert "DDTREE" in answer.text
    assert generate(server, {"temperature": 0}, lora_path="some-adapter").status_code == 400
    # Refusing left nothing behind.
    assert generate(server, {"temperature": 0}).json()["output_ids"] == greedy[:NEW_TOKENS]


def test_metrics_have_ours_and_sglangs(server):
    generate(server, {"temperature": 0}, rid="planted")
    text = requests.get(f"{server}/metrics", timeout=TIMEOUT_S).text
    values = dict(re.findall(r"^(ddtree_\w+|sglang:spec_\w+){.*} (\S+)$", text, flags=re.MULTILINE))
    rounds, tokens = float(values["ddtree_rounds_total"]), float(values["ddtree_committed_tokens_total"])
    assert 1 <= rounds < tokens
    assert float(values["ddtree_nodes_verified_total"]) == 15 * rounds
    assert float(values["ddtree_verify_width"]) == 16
    assert "sglang:spec_accept_length" in text
