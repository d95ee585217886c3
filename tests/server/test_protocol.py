"""Every field of a request: what is taken, what is refused, and that refusals name the field."""

import json

import pytest

from server_kit import MODEL

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hi"}]


def document(path, **fields):
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "Hi"}
    return {"model": MODEL, "max_tokens": 2, **prompt, **fields}


REFUSED_ON_BOTH = [
    ({"n": 2}, "n", "one answer"),
    ({"n": True}, "n", "one answer"),
    ({"best_of": 3}, "best_of", "one answer"),
    ({"echo": True}, "echo", "not repeated"),
    ({"suffix": "end"}, "suffix", "not filled in"),
    ({"response_format": {"type": "json_object"}}, "response_format", "plain text"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "plain text"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ({"functions": [{}]}, "functions", "not supported"),
    ({"modalities": ["text", "audio"]}, "modalities", "answers are text"),
    ({"audio": {"voice": "x"}}, "audio", "answers are text"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
    ({"store": True}, "store", "nothing is stored"),
    ({"service_tier": "flex"}, "service_tier", "one tier"),
    ({"invented": 1}, "invented", "unknown field"),
    ({"invented": None}, "invented", "unknown field"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
    ({"max_tokens": "5"}, "max_tokens", "valid integer"),
    ({"max_tokens": True}, "max_tokens", "valid integer"),
    ({"max_tokens": 10**30}, "max_tokens", "less than or equal"),
    ({"max_tokens": 512}, None, "context is 512"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens", "differ"),
    ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"temperature": 101}, "temperature", "less than or equal to 100"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_p": 1.1}, "top_p", "less than or equal to 1"),
    ({"top_k": -1}, "top_k", "greater than or equal to 0"),
    ({"min_p": 2}, "min_p", "less than or equal to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
    ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "greater than or equal to -2"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
    ({"logit_bias": {"five": 1}}, "logit_bias.five", "match pattern"),
    ({"logit_bias": {"05": 1}}, "logit_bias.05", "match pattern"),
    ({"logit_bias": {"260": 1}}, "logit_bias", "ids from 0 to 259"),
    ({"logit_bias": [1]}, "logit_bias", "valid dictionary"),
    ({"logit_bias": {"5": 10**400}}, "logit_bias.5", "not allowed"),
    ({"seed": 2**63}, "seed", "less than"),
    ({"seed": 0.5}, "seed", "valid integer"),
    ({"stop": ""}, "stop", "from 1 to 1024 characters"),
    ({"stop": ["a", ""]}, "stop", "from 1 to 1024 characters"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": "a" * 1025}, "stop", "from 1 to 1024 characters"),
    ({"stop": 5}, "stop", "neither a text nor a list"),
    ({"stop_token_ids": [260]}, "stop_token_ids", "ids from 0 to 259"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0", "greater than or equal to 0"),
    ({"ignore_eos": 1}, "ignore_eos", "valid boolean"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "without stream"),
    ({"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage", "unknown field"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation", "False"),
    ({"ddtree": {"mode": "forest"}}, "ddtree.mode", "'ar', 'chain' or 'tree'"),
    ({"ddtree": {"budget": 0}}, "ddtree.budget", "from 1 to 1024"),
    ({"ddtree": {"budget": "many"}}, "ddtree.budget", "auto"),
    ({"ddtree": {"budget": True}}, "ddtree.budget", "from 1 to 1024"),
    ({"ddtree": {"mode": "ar", "budget": 5}}, "ddtree.budget", "no effect"),
    ({"ddtree": {"rounds": True}}, "ddtree.rounds", "without stream"),
    ({"ddtree": {"width": 1}}, "ddtree.width", "unknown field"),
    ({"ddtree": "tree"}, "ddtree", "not allowed"),
    ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
    ({"model": "other"}, "model", "this server has 'tiny'"),
]  # fmt: skip
REFUSED_OF_A_TEXT = [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "neither a text"),
    ({"prompt": [""]}, "prompt", "empty"),
    ({"prompt": ["a", "b"]}, "prompt", "2 prompts"),
    ({"prompt": [[1], [2]]}, "prompt", "2 prompts"),
    ({"prompt": [1, "a"]}, "prompt", "neither a text"),
    ({"prompt": [True]}, "prompt", "neither a text"),
    ({"prompt": [1.0]}, "prompt", "neither a text"),
    ({"prompt": {"text": "a"}}, "prompt", "neither a text"),
    ({"prompt": [260]}, "prompt", "ids from 0 to 259"),
    ({"prompt": [-1]}, "prompt", "ids from 0 to 259"),
    ({"prompt": [10**40]}, "prompt", "ids from 0 to 259"),
    ({"prompt": "a" * 511}, "prompt", "context is 512"),
    ({"prompt": None}, "prompt", "neither a text"),
    ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"logprobs": True}, "logprobs", "valid integer"),
    ({"messages": HELLO}, "messages", "unknown field"),
]
REFUSED_OF_A_CHAT = [
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": "Hi"}, "messages", "valid list"),
    ({"messages": ["Hi"]}, "messages.0", "not allowed"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "missing"),
    ({"messages": [{"content": "Hi"}]}, "messages.0.role", "missing"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "neither a text"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content", "neither a text"),
    ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages.0.content", "a part"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "image_url"),
    ({"messages": [{"role": "user", "content": [{"type": []}]}]}, "messages.0.content", "only text"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content", "a text part"),
    ({"messages": [{"role": "tool", "content": "4"}]}, "messages.0", "tools and functions"),
    ({"messages": [{"role": "king", "content": "Hi"}]}, "messages.0.role", "'system', 'developer'"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "messages.0", "tool_calls"),
    ({"messages": [{"role": "user", "content": "a", "mood": "b"}]}, "messages.0.mood", "unknown field"),
    ({"messages": [*HELLO, {"role": "system", "content": "a"}]}, "messages", "system comes first"),
    ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages", "context is 512"),
    ({"logprobs": 2}, "logprobs", "valid boolean"),
    ({"top_logprobs": 2}, "top_logprobs", "without logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"prompt": "Hi"}, "prompt", "unknown field"),
]
CASES = [
    *((path, *case) for path in (CHAT, TEXT) for case in REFUSED_ON_BOTH),
    *((TEXT, *case) for case in REFUSED_OF_A_TEXT),
    *((CHAT, *case) for case in REFUSED_OF_A_CHAT),
]


def test_refusals_name_the_field(client):
    wrong = []
    for path, change, param, told in CASES:
        answer = client.ask(path, **document(path, **change))
        status = 404 if "model" in change else 400
        error = answer.error if answer.status >= 400 else {}
        expected = ("messages" if path == CHAT else "prompt") if param is None else param
        if answer.status != status or error["param"] != expected or told not in error["message"]:
            wrong.append((path, change, answer.status, error))
        elif error["type"] != "invalid_request_error" or "alue error" in error["message"]:
            wrong.append((path, change, error))
    assert wrong == []
    assert client.service.metrics.tokens.collect()[0].samples == [], "nothing of this reached the engine"


TAKEN_ON_BOTH = [
    {"n": 1, "best_of": 1, "echo": False, "suffix": None, "tools": [], "tool_choice": "none"},
    {"response_format": {"type": "text"}, "modalities": ["text"], "store": False, "service_tier": "auto"},
    {"parallel_tool_calls": True, "audio": None, "functions": None, "reasoning_effort": None},
    {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"},
    {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1},
    {"temperature": 2, "top_p": 0.1, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2},
    {"presence_penalty": -2, "frequency_penalty": 2.0, "logit_bias": {"5": -100, "0": 0.5}},
    {"max_tokens": 2, "max_completion_tokens": 2},
    {"max_tokens": None, "max_completion_tokens": 3},
    {"seed": -(2**63)},
    {"stop": None, "stop_token_ids": None, "seed": None, "stream": None, "stream_options": None},
    {"stop": "x", "stop_token_ids": [5], "ignore_eos": True},
    {"stop": [], "stop_token_ids": [], "logit_bias": {}, "ddtree": {}},
    {"ddtree": {"mode": "ar", "budget": "auto", "rounds": False}},
    {"ddtree": {"mode": "chain", "budget": None}},
    {"ddtree": {"mode": "tree", "budget": 1}},
    {"model": None},
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_changes_nothing_is_taken(client, path):
    for change in TAKEN_ON_BOTH:
        answer = client.ask(path, **document(path, **change))
        assert answer.status == 200, (change, answer.body)


def test_a_developer_speaks_as_the_system(client):
    roles = ("developer", "system")
    counts = [
        client.ask(CHAT, max_tokens=1, messages=[{"role": role, "content": "a"}, *HELLO]).json()["usage"]
        for role in roles
    ]
    assert counts[0] == counts[1]


def test_without_a_template_there_is_no_chat(client, engine):
    engine.tokenizer.chat_template, before = None, engine.tokenizer.chat_template
    try:
        assert "use /v1/completions" in client.ask(CHAT, **document(CHAT)).error["message"]
    finally:
        engine.tokenizer.chat_template = before
    assert client.ask(CHAT, **document(CHAT)).status == 200


def test_without_a_drafter_there_is_plain_decoding_only(open_client, engine):
    engine.drafter, before = None, engine.drafter
    try:
        client = open_client(mode="ar")
        assert client.ask(TEXT, **document(TEXT)).json()["ddtree"]["mode"] == "ar"
        refused = client.ask(TEXT, **document(TEXT, ddtree={"mode": "chain"}))
        assert (refused.status, refused.error["param"]) == (400, "ddtree.mode")
    finally:
        engine.drafter = before


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "send a JSON object"),
        (b"null", "send a JSON object"),
        (b'"text"', "send a JSON object"),
        (b"\xff{}", "not UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8"),
        (b'{"prompt": "a", "prompt": "b"}', "'prompt' twice"),
        (b'{"prompt": "a", "ddtree": {"mode": "ar", "mode": "ar"}}', "'mode' twice"),
        (b'{"prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "-Infinity"),
        (b'{"prompt": "a", "temperature": 1e999}', "too large"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'{"prompt": "a", "user": "\\ud83d\\ude42 \\ude42"}', "surrogate"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "not allowed"),
        (b'{"prompt": "a"} {}', "not JSON"),
        (b"{'prompt': 'a'}", "not JSON"),
    ],
)
def test_what_is_no_json_object_is_refused(client, body, told):
    answer = client.send(TEXT, body)
    assert answer.status == 400
    assert told in answer.error["message"]
    assert len(answer.body) < 1000


@pytest.mark.parametrize("field", ["prompt", "user", "unknown"])
def test_any_depth_is_refused(client, field):
    for depth in range(100, 1100, 25):
        body = b'{"%s": %s1%s}' % (field.encode(), b"[" * depth, b"]" * depth)
        assert client.send(TEXT, body).status == 400, depth


def test_a_character_outside_the_first_plane_is_taken(client):
    assert client.send(TEXT, b'{"prompt": "\\ud83d\\ude42", "max_tokens": 1}').json()["usage"] == {
        "prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": ""},
        {"content-type": "application/json-seq"},
        {"content-encoding": "gzip"},
    ],
)
def test_other_kinds_of_bodies_are_refused(client, headers):
    answer = client.send(TEXT, json.dumps(document(TEXT)).encode(), **headers)
    assert answer.status == 400
    assert "Content-" in answer.error["message"]


def test_a_json_body_may_name_its_charset(client):
    kind = "Application/JSON; charset=utf-8"
    assert client.send(TEXT, json.dumps(document(TEXT)).encode(), **{"content-type": kind}).status == 200


def test_a_long_name_of_an_unknown_field_is_cut_in_the_refusal(client):
    error = client.ask("/v1/completions", prompt="a", **{"k" * 10_000: 1}).error
    assert error["param"] == "k" * 200
    assert len(error["message"]) < 500
