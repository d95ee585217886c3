"""Ten thousand bodies that went wrong on the way: each is answered or refused in OpenAI's shape."""

import asyncio
import copy
import json
import random
from collections import Counter

import pytest

from ddtree.config import ServerConfig
from ddtree.server.app import create_app
from server_kit import Client, InstantEngine, call, events_of

NUM_BODIES = 10_000
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SHARED = {
    "model": "tiny", "max_tokens": 3, "max_completion_tokens": 3, "temperature": 0.5, "top_p": 0.9,
    "top_k": 5, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1,
    "logit_bias": {"70": -1.5}, "seed": 7, "stop": ["x", "yz"], "stop_token_ids": [5], "n": 1, "user": "u",
    "stream": True, "stream_options": {"include_usage": True}, "metadata": {"a": "b"}, "ignore_eos": True,
    "ddtree": {"mode": "tree", "budget": 6, "rounds": True}, "response_format": {"type": "text"}, "tools": [],
}  # fmt: skip
SEEDS = (
    (TEXT, SHARED | {"prompt": "Once upon a time 你好", "logprobs": 2}),
    (TEXT, {"prompt": [72, 101, 108]}),
    (CHAT, SHARED | {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi 🙂"}], "name": "Ann"},
            {"role": "assistant", "content": "Yes?", "tool_calls": None},
        ],
        "logprobs": True, "top_logprobs": 2,
    }),
    (CHAT, {"messages": [{"role": "user", "content": "Hi"}]}),
)  # fmt: skip
ODD = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.1, -0.0, 1e308, 5e-324,
    "", " ", "a", "\x00", "auto", "é" * 300, "\ud800", "</s><s>", "x" * 5000,
    [], [[]], [None], [[1, 2], [3]], ["a", 1], [0] * 2000,
    {}, {"": {}}, {"type": "text"}, {str(i): i for i in range(300)},
)  # fmt: skip
ODD_BYTES = (
    b"\x00",
    b"\xff",
    b"\\",
    b'"',
    b"{",
    b"}",
    b"[" * 50,
    b"NaN",
    b"1e999",
    b"\\ud800",
    b"\xed\xa0\x80",
    b",",
)


def places_of(value, found=None):
    """Every (container, key) in a document."""
    found = [] if found is None else found
    for key in value if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], dict | list):
            places_of(value[key], found)
    return found


def change_value(document, chance):
    container, key = chance.choice(places_of(document))
    kind = chance.randrange(5)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[chance.choice(["", "prompt", "messages", "Model", "content ", "type", "é"])] = (
            container.pop(key)
        )
    elif kind == 2:
        container[key] = [container[key]] * chance.choice([1, 2, 20])
    else:
        container[key] = copy.deepcopy(chance.choice(ODD))


def change_bytes(body, chance):
    at, size = chance.randrange(len(body) + 1), chance.randrange(1, 9)
    kind = chance.randrange(5)
    if kind == 0:
        return body[:at]
    if kind == 1:
        return body[:at] + body[at + size :]
    if kind == 2:
        return body[:at] + chance.randbytes(size) + body[at + size :]
    if kind == 3:
        return body[:at] + body[max(0, at - 20) : at] + body[at:]
    return body[:at] + chance.choice(ODD_BYTES) + body[at:]


def malformed(chance):
    """A path and a body that began as a request."""
    path, seed = chance.choice(SEEDS)
    document = copy.deepcopy(seed)
    for _ in range(chance.choice([0, 1, 1, 2, 4])):
        if document:
            change_value(document, chance)
    body = json.dumps(document, ensure_ascii=chance.random() < 0.7).encode(errors="surrogatepass")
    for _ in range(chance.choice([0, 0, 0, 1, 3])):
        body = change_bytes(body, chance)
    if chance.random() < 0.02:
        depth = chance.choice([10, 500, 5000])
        body = b'{"prompt": ' + b"[" * depth + body + b"]" * depth + b"}"
    pieces = [body] if chance.random() < 0.9 else [body[: len(body) // 2], b"", body[len(body) // 2 :]]
    return path, pieces


def check(answer):
    if answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        assert events_of(answer.body)
    elif answer.status == 200:
        assert answer.json()["choices"]
    else:
        assert answer.status in (400, 404, 413)
        assert answer.error["type"] == "invalid_request_error"
        assert len(answer.body) < 5000


@pytest.fixture
def instant(tiny_engine_of_server):
    engine = InstantEngine(tiny_engine_of_server)
    with Client(create_app(engine, ServerConfig(node_budget=6, max_body_bytes=12_000))) as client:
        yield client


def test_malformed_bodies_are_refused_or_answered(instant, caplog):
    chance = random.Random(20260417)

    async def run(count):
        statuses = Counter()
        for _ in range(count):
            path, pieces = malformed(chance)
            answer = await call(instant.app, "POST", path, pieces)
            try:
                check(answer)
            except AssertionError:
                pytest.fail(f"{path} {b''.join(pieces)[:2000]!r}: {answer}")
            statuses[answer.status] += 1
        return statuses

    statuses = instant.run(asyncio.wait_for(run(NUM_BODIES), 120))
    assert sum(statuses.values()) == NUM_BODIES
    assert statuses[400] > NUM_BODIES // 2
    assert min(statuses[200], statuses[413]) > NUM_BODIES // 1000, "enough of them are run, or too large"
    assert caplog.records == [], "nothing was logged as a fault of ours"
    assert instant.service.queue.is_idle


def test_a_fault_would_be_found(instant, monkeypatch, caplog):
    """A server that trips over a text does not pass the check."""
    from ddtree.server import asked

    monkeypatch.setattr(asked.RequestReader, "_text", lambda self, prompt: 1 // 0)
    answer = instant.ask(TEXT, prompt="a")
    with pytest.raises(AssertionError):
        check(answer)
