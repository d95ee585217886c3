"""What the routes answer: the engine's own texts, in OpenAI's shapes, whole and in chunks."""

import json
import re
from itertools import pairwise

import pytest

from ddtree.config import Mode, SamplingParams
from ddtree.engine.request import Request
from server_kit import MAX_CONTEXT, MODEL, alone, events_of, sample

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello 你好"}]
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5, "seed": 3, "max_tokens": 20}


@pytest.mark.parametrize("mode", list(Mode))
def test_a_chat_answer_is_the_engines(client, engine, mode):
    answer = client.ask(CHAT, model=MODEL, messages=HELLO, ddtree={"mode": mode}, **SAMPLED)
    expected = alone(engine, "Hello 你好", SamplingParams(**SAMPLED), mode=mode, node_budget=6)
    assert answer.status == 200
    document = answer.json()
    assert document["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": expected.text, "refusal": None},
            "logprobs": None,
            "finish_reason": str(expected.finish_reason),
        }
    ]
    assert document["object"] == "chat.completion"
    assert document["model"] == MODEL
    prompt_tokens = len(engine.encode("Hello 你好"))
    assert document["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(expected.tokens),
        "total_tokens": prompt_tokens + len(expected.tokens),
    }
    summary = document["ddtree"]
    assert (summary["mode"], summary["seed"], summary["rounds"]) == (mode, 3, expected.stats.verify_ct)
    assert summary["budget"] == (6 if mode is Mode.TREE else None)
    assert summary["accept_length"] == round(expected.stats.accept_length, 4)


@pytest.mark.parametrize("prompt", ["Once", ["Once"], "tokens", "list of tokens"])
def test_a_text_is_continued(client, engine, prompt):
    tokens = tuple(engine.tokenizer.encode("Once"))
    given = {"tokens": list(tokens), "list of tokens": [list(tokens)]}.get(str(prompt), prompt)
    document = client.ask(TEXT, prompt=given, temperature=0).json()
    expected = engine.generate(Request(tokens, SamplingParams(max_tokens=16), Mode.AR))
    assert document["object"] == "text_completion"
    assert document["choices"][0]["text"] == expected.text
    assert document["usage"]["completion_tokens"] == 16, "OpenAI's default"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stream_says_the_same(client, path):
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "Once"}
    whole = client.ask(path, **prompt, **SAMPLED).json()
    streamed = client.ask(path, **prompt, **SAMPLED, stream=True, stream_options={"include_usage": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events_of(streamed.body)
    assert last["usage"] == whole["usage"]
    assert last["choices"] == []
    for name in ("rounds", "accept_length", "seed"):
        assert last["ddtree"][name] == whole["ddtree"][name]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["usage"] is None for chunk in chunks)
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    if path == CHAT:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == whole["choices"][0]["message"]["content"]
        assert choices[-1]["delta"] == {}
    else:
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]


def test_usage_is_streamed_only_where_it_is_wanted(client):
    chunks = events_of(client.ask(CHAT, messages=HELLO, max_tokens=3, stream=True).body)
    assert not any("usage" in chunk for chunk in chunks)
    assert chunks[-1]["ddtree"]["rounds"] >= 1
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_rounds_are_told_one_by_one(client, engine):
    chunks = events_of(
        client.ask(TEXT, prompt="Once", max_tokens=30, seed=1, stream=True, ddtree={"rounds": True}).body
    )
    rounds = [chunk["ddtree"] for chunk in chunks if "round" in chunk.get("ddtree", {})]
    summary = chunks[-1]["ddtree"]
    assert [described["round"] for described in rounds] == [*range(1, summary["rounds"] + 1)]
    for described in rounds:
        nodes, path = described["nodes"], described["accept_indices"]
        assert nodes[0] == {"text": described["root"], "parent": -1, "log_prob": 0.0}
        assert all(node["parent"] < index for index, node in enumerate(nodes))
        assert all(nodes[after]["parent"] == before for before, after in pairwise(path))
        assert 1 <= len(nodes) - 1 <= described["node_budget"] == 6
    committed = sum(len(described["accept_indices"]) for described in rounds)
    assert committed >= 29
    assert summary["accept_length"] == round(committed / len(rounds), 4)


def test_no_seed_gives_another_text_and_the_answer_names_it(client):
    first, second = (client.ask(TEXT, prompt="Once", max_tokens=30).json() for _ in range(2))
    assert first["choices"] != second["choices"]
    again = client.ask(TEXT, prompt="Once", max_tokens=30, seed=first["ddtree"]["seed"]).json()
    assert again["choices"] == first["choices"]


@pytest.mark.parametrize("mode", list(Mode))
def test_a_chats_log_probs_are_the_engines(client, engine, mode):
    fields = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "ddtree": {"mode": mode}, **SAMPLED}
    document = client.ask(CHAT, **fields).json()
    content = document["choices"][0]["logprobs"]["content"]
    expected = alone(engine, "Hello 你好", SamplingParams(**SAMPLED), mode=mode, top_logprobs=2).logprobs
    assert len(content) == len(expected) == document["usage"]["completion_tokens"]
    for entry, wanted in zip(content, expected, strict=True):
        assert entry["logprob"] == wanted.log_prob
        assert [top["logprob"] for top in entry["top_logprobs"]] == [number for _, number in wanted.top]
    raw = b"".join(bytes(entry["bytes"]) for entry in content)
    text = document["choices"][0]["message"]["content"]
    assert raw.decode(errors="replace").removesuffix("</s>") == text
    streamed = events_of(client.ask(CHAT, **fields, stream=True).body)
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    assert [entry for part in parts if part for entry in part["content"]] == content


def test_a_texts_log_probs_stand_at_its_characters(client):
    fields = {"prompt": "Once", "max_tokens": 40, "logprobs": 1, "seed": 2}
    whole = client.ask(TEXT, **fields).json()["choices"][0]
    logprobs = whole["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 40
    for index, (token, offset) in enumerate(zip(logprobs["tokens"], logprobs["text_offset"], strict=True)):
        if not token.startswith(("bytes:", "<")):
            assert whole["text"][offset : offset + len(token)] == token
        assert logprobs["token_logprobs"][index] == logprobs["top_logprobs"][index][token]
    streamed = events_of(client.ask(TEXT, **fields, stream=True).body)
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    offsets = [offset for part in parts if part for offset in part["text_offset"]]
    assert offsets == logprobs["text_offset"]


def test_a_special_token_takes_no_room_in_the_text(client):
    fields = {"prompt": "Once", "max_tokens": 3, "logprobs": 0, "logit_bias": {"1": 100}, "temperature": 0}
    choice = client.ask(TEXT, **fields).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("", ["<s>"] * 3)
    assert choice["logprobs"]["text_offset"] == [0, 0, 0]


@pytest.mark.parametrize(("logprobs", "alternatives"), [(0, 0), (3, 3)])
def test_as_many_alternatives_as_asked_for(client, logprobs, alternatives):
    document = client.ask(TEXT, prompt="Once", max_tokens=2, logprobs=logprobs, temperature=0).json()
    for found in document["choices"][0]["logprobs"]["top_logprobs"]:
        assert len(found) == max(1, alternatives), "the chosen token is always there"


def test_a_stop_text_ends_the_answer_and_is_not_shown(client):
    text = client.ask(TEXT, prompt="Once", max_tokens=40, seed=2).json()["choices"][0]["text"]
    stop = text[10:13]
    document = client.ask(TEXT, prompt="Once", max_tokens=40, seed=2, stop=[stop]).json()
    assert document["choices"][0]["text"] == text[: text.index(stop)]
    assert document["choices"][0]["finish_reason"] == "stop"
    assert document["usage"]["completion_tokens"] < 40


def test_logit_bias_forces_a_token(client):
    document = client.ask(TEXT, prompt="Once", max_tokens=5, temperature=0, logit_bias={"70": 100}).json()
    assert len(set(document["choices"][0]["text"])) == 1


def test_roles_parts_and_names_reach_the_template(client, engine):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "Ann", "content": [{"type": "text", "text": text} for text in "ab"]},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": None, "annotations": []},
    ]  # fmt: skip
    document = client.ask(CHAT, messages=messages, max_tokens=4, temperature=0).json()
    text = "<s>system:Be brief.\n<s>user(Ann):a\nb\n<s>assistant:\n<s>assistant:"
    tokens = tuple(engine.tokenizer.encode(text, add_special_tokens=False))
    expected = engine.generate(Request(tokens, SamplingParams(max_tokens=4), Mode.AR))
    assert document["choices"][0]["message"]["content"] == expected.text
    assert document["usage"]["prompt_tokens"] == len(tokens)


def test_a_chat_goes_on_to_the_end_of_the_context(client):
    messages = [{"role": "user", "content": "a" * 460}]
    document = client.ask(CHAT, messages=messages, ignore_eos=True, temperature=0).json()
    assert document["usage"]["total_tokens"] == MAX_CONTEXT
    assert document["choices"][0]["finish_reason"] == "length"


def test_the_models(client):
    card = client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", MAX_CONTEXT)
    assert client.get(f"/v1/models/{MODEL}").json() == card
    missing = client.get("/v1/models/other/one")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


def test_a_served_name_is_the_only_one(open_client):
    client = open_client(served_model_name="org/model")
    assert client.get("/v1/models/org/model").status == 200
    assert client.ask(TEXT, model="org/model", prompt="a", max_tokens=1).json()["model"] == "org/model"
    refused = client.ask(TEXT, model=MODEL, prompt="a", max_tokens=1)
    assert (refused.status, refused.error["param"], refused.error["code"]) == (
        404,
        "model",
        "model_not_found",
    )


def test_health_metrics_and_stats(client):
    client.ask(CHAT, messages=HELLO, max_tokens=12, temperature=0)
    client.ask(TEXT, prompt="")
    health, metrics, stats = (client.get(path) for path in ("/health", "/metrics", "/v1/ddtree/stats"))
    assert (health.status, health.json()) == (200, {"status": "ok"})
    assert metrics.headers["content-type"].startswith("text/plain")
    lines = metrics.body.decode().splitlines()
    assert 'ddtree_server_requests_total{endpoint="chat_completions",outcome="ok"} 1.0' in lines
    assert 'ddtree_server_requests_total{endpoint="completions",outcome="invalid"} 1.0' in lines
    assert 'ddtree_server_tokens_total{kind="completion"} 12.0' in lines
    assert "ddtree_server_running_requests 0.0" in lines
    document = stats.json()
    assert document["requests"]["chat_completions"] == {"ok": 1}
    rounds = document["rounds"]["tree"]
    assert sum(document["accept_histogram"].values()) == rounds
    assert 11 / rounds <= document["accept_length"] <= 8
    assert document["engine"]["block_size"] == 8
    assert document["queue"] == {"waiting": 0, "running": 0, "max_waiting": 128}


def test_the_metrics_that_dashboards_name_exist(client):
    client.ask(TEXT, prompt="Once", max_tokens=9, ignore_eos=True)
    names = set(re.findall(r"^# TYPE (\w+)", client.get("/metrics").body.decode(), flags=re.MULTILINE))
    assert {f"ddtree_server_{name}" for name in (
        "requests_total", "tokens_total", "queue_requests", "running_requests", "queue_wait_seconds",
        "time_to_first_token_seconds", "inter_token_seconds", "request_seconds", "accept_length",
        "accept_depth_total", "rounds_total", "node_budget", "round_seconds", "stage_seconds_total",
    )} <= names  # fmt: skip
    service = client.service
    assert sample(service, "accept_length_count") == sample(service, "rounds_total", mode="tree")
    assert sample(service, "node_budget") == 6
    assert sample(service, "accept_length_bucket", le="16.0") == sample(service, "accept_length_count")
    assert sample(service, "inter_token_seconds_count") == 8
    alone_ct = sample(service, "accept_length_bucket", le="1.0")
    correct_ct = sample(service, "accept_length_count") - alone_ct
    assert sample(service, "accept_depth_total", depth="1") == correct_ct
    assert sample(service, "accept_depth_total", depth="0") == 0


@pytest.mark.parametrize(
    "accept",
    ["text/plain;version=..;escaping=foo", "application/openmetrics-text;version=xyz", "*/*;q=zz;;,,"],
)
def test_metrics_for_a_scraper_that_asks_for_no_known_version(client, accept):
    answer = client.get("/metrics", accept=accept)
    assert (answer.status, answer.headers["content-type"].split(";")[0]) == (200, "text/plain")
    assert b"ddtree_server_running_requests 0.0" in answer.body


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ({"authorization": "Bearer right-key"}, 200),
        ({"authorization": "bearer right-key"}, 200),
        ({"authorization": "Bearer wrong-key"}, 401),
        ({"authorization": "Bearer right-key-and-more"}, 401),
        ({"authorization": "Basic right-key"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({}, 401),
    ],
)
def test_the_api_key(open_client, header, status):
    client = open_client(api_key="right-key")
    answer = client.get("/v1/models", **header)
    assert answer.status == status
    if status == 401:
        assert answer.error["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "right-key" not in answer.body.decode()


def test_the_api_key_guards_no_more_than_the_api(open_client):
    client = open_client(api_key="right-key")
    for path in ("/health", "/metrics", "/", "/static/icon.svg"):
        assert client.get(path).status == 200
    for path in ("/v1/completions", "/v1/ddtree/stats", "/v1/nothing"):
        assert client.get(path).status == 401


def test_what_is_not_there_is_said_in_openais_shape(client):
    assert client.get("/nothing").error["message"] == "there is nothing at /nothing"
    wrong = client.get(CHAT)
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    assert wrong.error["type"] == "invalid_request_error"
    assert client.get("/static/nothing.js").status == 404
    assert client.get("/static/../app.py").status == 404
    assert client.get("/docs").status == 404, "FastAPI's page of documentation loads scripts from elsewhere"


def test_answers_carry_an_id_and_headers_for_browsers(client):
    first, second = client.get("/health"), client.get("/")
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    for answer in (first, second):
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_schema_names_every_field(client):
    document = client.get("/openapi.json").json()
    body = document["components"]["schemas"]["ChatRequest"]
    assert {"messages", "logit_bias", "ddtree", "max_completion_tokens"} <= set(body["properties"])
    assert body["additionalProperties"] is False
    assert "429" in document["paths"][CHAT]["post"]["responses"]
    assert json.dumps(document).count("$defs") == 0


def test_a_body_of_one_byte_too_many(open_client):
    client = open_client(max_body_bytes=1024)
    frame = json.dumps({"prompt": "", "max_tokens": 1}).encode()
    for size, status in ((1024, 400), (1025, 413)):  # for the shorter one the context is too short
        body = frame.replace(b'""', b'"' + b"a" * (size - len(frame)) + b'"')
        assert len(body) == size
        for pieces in (body, [body[:500], body[500:]]):
            assert client.send(TEXT, pieces).status == status
    announced = client.send(TEXT, b"{}", **{"content-length": "9" * 5000})
    assert (announced.status, announced.error["code"]) == (413, "body_too_large")
