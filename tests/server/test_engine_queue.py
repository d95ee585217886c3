"""Waiting, leaving, failing and stopping: whatever happens to a request, the next one gets its answer."""

import asyncio
import gc
import json
import logging
import threading
import time

import pytest

from ddtree.server import engine_queue
from ddtree.server.engine_queue import THREAD_NAME, Job
from ddtree.server.exchange import Exchange
from server_kit import call, events_of, post, sample

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SHORT = {"prompt": "Once", "max_tokens": 4, "temperature": 0}
LONG = {"prompt": "Once", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


def is_free(client):
    """Nothing waits or runs, and the metrics say so too."""
    sizes = client.service.queue.sizes()
    gauges = [sample(client.service, name) for name in ("queue_requests", "running_requests")]
    return sizes["waiting"] == sizes["running"] == 0 and gauges == [0, 0]


async def until(is_true, what):
    end = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < end, f"waited for {what}"
        await asyncio.sleep(0.005)


def queued(client):
    """Requests that were read and wait for the engine."""
    return len(client.service.queue._waiting)


def outcome(client, name, endpoint="completions"):
    return sample(client.service, "requests_total", endpoint=endpoint, outcome=name)


def test_a_full_queue_is_429_and_what_was_taken_is_answered(open_client, engine):
    client = open_client(max_queue=3)

    async def run():
        engine.may_run.clear()
        taken = [asyncio.create_task(post(client.app, TEXT, SHORT))]
        await until(lambda: len(engine.started) == 1, "the first request to run")
        taken += [asyncio.create_task(post(client.app, TEXT, SHORT)) for _ in range(3)]
        await until(lambda: queued(client) == 3, "three requests to wait")
        refused = [await post(client.app, TEXT, SHORT) for _ in range(2)]
        engine.may_run.set()
        return refused, await asyncio.gather(*taken)

    refused, taken = client.run(run())
    for answer in refused:
        assert (answer.status, answer.error["code"]) == (429, "queue_full")
        assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert [answer.status for answer in taken] == [200] * 4
    assert len({answer.json()["choices"][0]["text"] for answer in taken}) == 1
    assert is_free(client)
    assert (outcome(client, "ok"), outcome(client, "queue_full")) == (4, 2)


def test_requests_run_in_the_order_of_their_arrival(client, engine):
    async def run():
        engine.may_run.clear()
        tasks = []
        for number in range(5):
            tasks.append(asyncio.create_task(post(client.app, TEXT, SHORT | {"seed": number})))
            await until(lambda: queued(client) == len(tasks) - 1, "it to wait")
            await until(lambda: engine.started, "the first to run")
        engine.may_run.set()
        await asyncio.gather(*tasks)

    client.run(run())
    assert [request.sampling.seed for request in engine.started] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_frees_the_engine(client, engine, is_stream):
    async def run():
        gone = asyncio.Event()
        pieces = []
        leaving = asyncio.create_task(
            post(
                client.app, TEXT, LONG | {"stream": is_stream}, until_gone=gone.wait(), on_body=pieces.append
            )
        )
        await until(lambda: pieces or (not is_stream and engine.started), "it to begin")
        gone.set()
        await leaving
        await until(lambda: is_free(client), "the engine to be free")
        return await post(client.app, TEXT, SHORT)

    assert client.run(run()).status == 200
    assert outcome(client, "cancelled") == 1
    assert sample(client.service, "tokens_total", kind="completion") < 200


def test_a_client_that_leaves_the_queue_costs_nothing(client, engine):
    async def run():
        engine.may_run.clear()
        first = asyncio.create_task(post(client.app, TEXT, SHORT))
        await until(lambda: engine.started, "the first to run")
        gone = asyncio.Event()
        leaving = asyncio.create_task(post(client.app, TEXT, LONG, until_gone=gone.wait()))
        await until(lambda: queued(client) == 1, "the second to wait")
        gone.set()
        await leaving
        assert client.service.queue.sizes()["waiting"] == 0, "its place is free while the first still runs"
        engine.may_run.set()
        return await first

    assert client.run(run()).status == 200
    assert len(engine.started) == 1


def test_a_request_out_of_time_is_504(open_client, engine):
    client = open_client(request_timeout_s=0.2)

    async def run():
        engine.may_run.clear()
        first, second = await asyncio.gather(*(post(client.app, TEXT, SHORT) for _ in range(2)))
        engine.may_run.set()
        await until(lambda: is_free(client), "the engine to be free")
        return first, second

    for answer in client.run(run()):  # one ran, one waited
        assert (answer.status, answer.error["code"]) == (504, "timeout")
        assert "0.2 s" in answer.error["message"]
    assert outcome(client, "timeout") == 2


def test_a_stream_out_of_time_ends_with_an_error(open_client, engine):
    client = open_client(request_timeout_s=1.0)

    async def run():
        seen = []

        def hold(piece):
            seen.append(piece)
            if len(seen) == 2:
                engine.may_run.clear()

        answer = await post(client.app, TEXT, LONG | {"stream": True}, on_body=hold)
        engine.may_run.set()
        await until(lambda: is_free(client), "the engine to be free")
        return answer, await post(client.app, TEXT, SHORT)

    answer, after = client.run(run())
    assert answer.status == 200
    *chunks, last = events_of(answer.body)
    assert chunks
    assert last["error"]["code"] == "timeout"
    assert after.status == 200


def test_a_body_that_does_not_arrive_is_408(open_client):
    client = open_client(request_timeout_s=0.1)

    async def run():
        async def receive():
            await asyncio.Event().wait()

        sent = []

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": TEXT, "raw_path": TEXT.encode(), "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
            "root_path": "", "server": ("127.0.0.1", 80), "asgi": {"version": "3.0"},
        }  # fmt: skip
        await client.app(scope, receive, send)
        return sent

    start, body = client.run(run())
    assert start["status"] == 408
    assert "did not arrive" in json.loads(body["body"])["error"]["message"]


@pytest.mark.parametrize("fail_after", [0, 2])
def test_an_engine_error_is_500_and_the_next_request_works(client, engine, fail_after, caplog):
    engine.failures, engine.fail_after = [RuntimeError("secret of the engine")], fail_after
    with caplog.at_level(logging.ERROR, "ddtree.server"):
        failed = client.ask(TEXT, **SHORT)
    assert failed.status == 500
    assert failed.error["type"] == "server_error"
    assert "secret" not in failed.body.decode()
    [record] = caplog.records
    request_id = failed.headers["x-request-id"]
    assert request_id in record.getMessage()
    assert request_id in failed.error["message"]
    assert "secret" in str(record.exc_info[1])
    assert client.ask(TEXT, **SHORT).status == 200
    assert (outcome(client, "error"), is_free(client)) == (1, True)


def test_an_engine_error_in_a_stream_is_its_last_event(client, engine, caplog):
    engine.failures, engine.fail_after = [RuntimeError("secret")], 2
    answer = client.ask(CHAT, messages=[{"role": "user", "content": "a"}], max_tokens=50, stream=True)
    *chunks, last = events_of(answer.body)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert last["error"]["type"] == "server_error"
    assert "secret" not in answer.body.decode()
    assert client.ask(TEXT, **SHORT).status == 200


def test_an_error_before_the_first_token_is_a_status_in_a_stream_too(client, engine, caplog):
    engine.failures = [RuntimeError("secret")]
    assert client.ask(TEXT, **SHORT, stream=True).status == 500
    assert outcome(client, "error") == 1


def test_failures_in_a_row_show_in_the_health(client, engine, caplog):
    engine.failures = [RuntimeError("broken") for _ in range(3)]
    states = [client.get("/health")]
    for _ in range(4):
        client.ask(TEXT, **SHORT)
        states.append(client.get("/health"))
    assert [state.status for state in states] == [200, 200, 200, 503, 200]
    assert states[3].json() == {"status": "failing"}


def test_what_the_engine_refuses_is_the_clients_mistake(client, engine, monkeypatch):
    from ddtree.errors import ContextLengthError

    engine.failures = [ContextLengthError("too long")]
    answer = client.ask(TEXT, **SHORT)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert client.get("/health").status == 200


def test_draining_finishes_what_is_inside_and_takes_nothing_new(client, engine):
    queue = client.service.queue

    async def run():
        engine.may_run.clear()
        inside = [asyncio.create_task(post(client.app, TEXT, SHORT)) for _ in range(2)]
        await until(lambda: queued(client) == 1 and engine.started, "both to be inside")
        queue.drain()
        late, health = await post(client.app, TEXT, SHORT), await call(client.app, "GET", "/health")
        assert not queue.is_idle
        engine.may_run.set()
        answers = await asyncio.gather(*inside)
        await until(lambda: queue.is_idle, "the queue to be empty")
        return answers, late, health

    answers, late, health = client.run(run())
    assert [answer.status for answer in answers] == [200, 200]
    assert (late.status, late.error["code"], late.headers["retry-after"]) == (503, "shutting_down", "10")
    assert (health.status, health.json()) == (503, {"status": "stopping"})


def test_aborting_ends_streams_with_an_error_and_answers_with_503(client, engine):
    async def run():
        begun = asyncio.Event()
        stream = asyncio.create_task(
            post(client.app, TEXT, LONG | {"stream": True}, on_body=lambda piece: begun.set())
        )
        await begun.wait()
        waiting = asyncio.create_task(post(client.app, TEXT, SHORT))
        await until(lambda: queued(client) == 1, "the second to wait")
        client.service.queue.abort()
        return await stream, await waiting

    stream, waiting = client.run(run())
    assert events_of(stream.body)[-1]["error"]["code"] == "shutting_down"
    assert waiting.status == 503
    assert outcome(client, "shutdown") == 2


def test_the_end_of_the_application_leaves_no_thread(open_client, engine):
    def threads():
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("ddtree")}

    assert threads() == set()
    client = open_client()
    assert client.ask(TEXT, **SHORT).status == 200
    assert THREAD_NAME in threads()

    async def end():
        engine.may_run.clear()
        running = asyncio.create_task(post(client.app, TEXT, LONG))
        await until(lambda: len(engine.started) == 2, "it to run")
        await asyncio.to_thread(client.service.close)
        return await running

    assert client.run(end()).status == 503
    assert threads() == set()


def test_requests_of_every_end_leave_nothing_in_memory(open_client, engine, monkeypatch):
    monkeypatch.setattr(engine_queue.logger, "disabled", True)  # its records would hold the error's traceback
    client = open_client(request_timeout_s=500.0)

    async def leave():
        gone = asyncio.Event()
        await post(
            client.app, TEXT, LONG | {"stream": True}, until_gone=gone.wait(), on_body=lambda _: gone.set()
        )

    engine.failures = [RuntimeError("broken")]
    assert client.ask(TEXT, **SHORT).status == 500
    for is_stream in (False, True):
        assert client.ask(TEXT, **SHORT, stream=is_stream).status == 200
    assert client.ask(TEXT, prompt="").status == 400
    client.run(leave())
    client.run(until(lambda: is_free(client), "the engine to be free"))
    gc.collect()
    assert [found for found in gc.get_objects() if type(found) in (Job, Exchange)] == []


def test_a_long_prompt_leaves_the_event_loop_alone(client):
    """While a prompt of a megabyte is read, other requests are answered."""
    body = {"messages": [{"role": "user", "content": "the quick brown fox " * 50_000}]}

    async def run():
        reading = asyncio.create_task(post(client.app, CHAT, body))
        await asyncio.sleep(0)
        while not reading.done():
            health = await call(client.app, "GET", "/health")
            assert health.status == 200
            seen.append(health)
            await asyncio.sleep(0)
        return await reading

    seen = []
    answer = client.run(run())
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert len(seen) > 20, "the loop went on all the time"


def test_the_end_of_the_process_waits_for_the_engines_thread(client):
    """A daemon thread inside torch would abort the process at its end (SIGABRT instead of exit code 0)."""
    threads = [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]
    assert [thread.daemon for thread in threads] == [False]
