"""The server as the official client sees it: its types, its streams, its errors."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import openai
import pytest

from ddtree.config import SamplingParams
from server_kit import MODEL, alone, live_server, sample, wait_for

HELLO = [{"role": "user", "content": "Hello"}]
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.5, "seed": 7, "max_tokens": 16}
EXTRA = {"ddtree": {"mode": "tree", "budget": 6}}


@pytest.fixture
def connect(live):
    """Clients of the server, which never try again by themselves."""
    clients = []

    def make(kind=openai.OpenAI, **options):
        clients.append(kind(base_url=f"{live.url}/v1", api_key="any", max_retries=0, timeout=60, **options))
        return clients[-1]

    yield make
    for client in clients:
        if isinstance(client, openai.OpenAI):
            client.close()


def test_chat(connect, live):
    answer = connect().chat.completions.create(model=MODEL, messages=HELLO, **SAMPLED, extra_body=EXTRA)
    expected = alone(live.engine, "Hello", SamplingParams(**SAMPLED))
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.completion_tokens == len(expected.tokens)
    assert answer.model_extra["ddtree"]["rounds"] == expected.stats.verify_ct


def test_chat_stream(connect, live):
    stream = connect().chat.completions.create(
        model=MODEL, messages=HELLO, **SAMPLED, extra_body={"ddtree": EXTRA["ddtree"] | {"rounds": True}},
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    expected = alone(live.engine, "Hello", SamplingParams(**SAMPLED))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected.text
    assert chunks[-1].usage.completion_tokens == len(expected.tokens)
    rounds = [
        chunk.model_extra["ddtree"] for chunk in chunks if "round" in chunk.model_extra.get("ddtree", {})
    ]
    assert len(rounds) == expected.stats.verify_ct


def test_chat_log_probs(connect):
    answer = connect().chat.completions.create(
        model=MODEL, messages=HELLO, **SAMPLED, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert all(entry.logprob <= 0 for entry in content)


def test_completions(connect):
    client = connect()
    answer = client.completions.create(model=MODEL, prompt="Once", **SAMPLED, logprobs=2)
    stream = client.completions.create(model=MODEL, prompt="Once", **SAMPLED, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens


def test_an_answer_can_be_sent_back(connect):
    client = connect()
    first = client.chat.completions.create(model=MODEL, messages=HELLO, **SAMPLED).choices[0].message
    messages = [*HELLO, first.model_dump(), {"role": "user", "content": "And then?"}]
    second = client.chat.completions.create(model=MODEL, messages=messages, **SAMPLED)
    assert second.usage.prompt_tokens > len(HELLO[0]["content"])


def test_models(connect):
    client = connect()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "ddtree"


def test_several_clients_at_once_without_blocking(connect, live):
    async def ask(client, number):
        sampling = SAMPLED | {"seed": number}
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, **sampling, stream=True, extra_body=EXTRA
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run():
        async with connect(openai.AsyncOpenAI) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(6)))

    texts = asyncio.run(run())
    assert texts == [
        alone(live.engine, "Hello", SamplingParams(**SAMPLED | {"seed": number})).text for number in range(6)
    ]


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"model": "other"}, openai.NotFoundError, "this server has 'tiny'"),
        ({"n": 2}, openai.BadRequestError, "one answer"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "tools"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "plain text"),
        ({"max_tokens": 9999}, openai.BadRequestError, "context is 512"),
        ({"extra_body": {"ddtree": {"mode": "forest"}}}, openai.BadRequestError, "forest"),
    ],
)
def test_errors_are_the_clients_own(connect, change, error, told):
    with pytest.raises(error, match=told) as raised:
        connect().chat.completions.create(**{"model": MODEL, "messages": HELLO, **SAMPLED} | change)
    assert raised.value.request_id.startswith("req-")
    assert raised.value.type == "invalid_request_error"


def test_an_error_in_a_stream_is_raised(connect, live, caplog):
    live.engine.failures, live.engine.fail_after = [RuntimeError("broken")], 2
    stream = connect().chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=50, stream=True, extra_body={"ignore_eos": True}
    )  # sampled with a new seed: without it, the text may end before the failure
    with pytest.raises(openai.APIError, match="the server failed"):
        list(stream)


def test_a_closed_stream_frees_the_engine(connect, live):
    with connect().completions.create(
        model=MODEL, prompt="Once", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        live.engine.may_run.clear()
    wait_for(lambda: live.service.queue.is_idle, "the engine to be free")
    assert sample(live.service, "requests_total", endpoint="completions", outcome="cancelled") == 1
    live.engine.may_run.set()
    assert connect().completions.create(model=MODEL, prompt="Once", max_tokens=2).choices[0].text is not None


def test_the_key_and_the_queue(tiny_engine_of_server):
    with live_server(tiny_engine_of_server, "a-key", max_queue=1) as server:

        def client(key):
            return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)

        with client("other") as wrong, pytest.raises(openai.AuthenticationError, match="API key is wrong"):
            wrong.models.list()
        with client("a-key") as right:
            server.engine.may_run.clear()
            with ThreadPoolExecutor() as threads:
                ask = partial(right.completions.create, model=MODEL, prompt="a", max_tokens=2)
                inside = []
                for place in ("running", "waiting"):
                    inside.append(threads.submit(ask))
                    wait_for(partial(is_taken, server, place), f"a request to be {place}")
                with pytest.raises(openai.RateLimitError, match="waiting already") as raised:
                    ask()
                server.engine.may_run.set()
                assert all(call.result().choices for call in inside)
            assert int(raised.value.response.headers["retry-after"]) >= 1


def is_taken(server, place):
    sizes = server.service.queue.sizes()
    return (sizes["running"], sizes["waiting"]) == (1, int(place == "waiting"))
