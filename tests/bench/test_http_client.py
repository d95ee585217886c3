"""Requests so many at a time, with times of one clock, and every way in which a server can fail."""

import asyncio
import gzip
import itertools
import json
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from ddtree.bench.http_client import HttpClient, RequestRefusedError, ServerError, error_text, wait_s
from ddtree.errors import ConfigError
from fake_server import CHAT_PATH, HELLO, event, head, respond, says, serving


@pytest.fixture
def post_all():
    """Sends bodies to a fake server, and closes the clients after the test."""
    clients = []

    def post(fake, bodies, concurrency=1, **options):
        clients.append(HttpClient(fake.url, **options))
        return clients[-1].post_all(CHAT_PATH, bodies, concurrency)

    yield post
    for client in clients:
        client.close()
        client.close()


def bodies(count):
    return [{"number": number} for number in range(count)]


def echo(asked):
    return respond({"said": asked.json()["number"]})


def test_answers_come_in_the_order_of_the_bodies(post_all):
    async def slow_first(asked):
        number = asked.json()["number"]
        await asyncio.sleep(0.05 * (3 - number))
        async for piece in echo(asked):
            yield piece

    with serving(chat=slow_first) as fake:
        _, answers = post_all(fake, bodies(4), concurrency=4)
    assert [json.loads(answer.body)["said"] for answer in answers] == [0, 1, 2, 3]


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_so_many_requests_are_in_flight_and_no_more(post_all, concurrency):
    waiting = []

    async def until_all_are_there(asked):
        waiting.append(asked)
        async with asyncio.timeout(10):
            while len(waiting) < concurrency:  # as many must come before the first is answered
                await asyncio.sleep(0.001)
        async for piece in echo(asked):
            yield piece

    with serving(chat=until_all_are_there) as fake:
        post_all(fake, bodies(3 * concurrency), concurrency)
        assert fake.most_in_flight == concurrency


def test_times_are_in_order_of_one_clock(post_all):
    ticks = itertools.count(100)
    with serving(chat=says(*HELLO)) as fake:
        wall_s, [first, second] = post_all(fake, bodies(2), clock=lambda: float(next(ticks)))
    for answer in (first, second):
        times = [answer.begin_s, *(time_s for time_s, _ in answer.pieces), answer.end_s]
        assert times == sorted(set(times))
        assert answer.is_stream
    assert second.begin_s > first.end_s
    assert wall_s == second.end_s - first.begin_s
    assert first.begin_s == 100


def test_a_busy_server_is_asked_again(post_all):
    refusals = iter([respond({}, 429, retry_after="0"), respond({}, 503, retry_after="0")])
    with serving(chat=lambda asked: next(refusals, None) or echo(asked)) as fake:
        _, [answer] = post_all(fake, bodies(1))
        assert len(fake.asked) == 3
    assert answer.retry_ct == 2


def test_waiting_for_a_busy_server_ends(post_all):
    with serving(chat=lambda asked: respond({}, 429, retry_after="60")) as fake:
        begin_s = time.monotonic()
        with pytest.raises(ServerError, match=r"did not answer within 0\.2 s"):
            post_all(fake, bodies(1), limit_s=0.2)
        assert time.monotonic() - begin_s < 30


def test_how_long_to_wait():
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=20))
    assert wait_s("3", 0) == 3
    assert 10 < wait_s(later, 0) <= 20
    assert wait_s("nan", 0) == wait_s(None, 0) < wait_s(None, 1) < wait_s(None, 50) <= 60
    assert wait_s("99999", 0) == 60
    assert 0 < wait_s("Wed, 21 Oct 2015 07:28:00 GMT", 0) < 1


@pytest.mark.parametrize(
    ("status", "kind"), [(400, RequestRefusedError), (422, RequestRefusedError), (500, ServerError),
                         (503, ServerError), (502, ServerError)]
)  # fmt: skip
def test_a_refusal_is_told_with_its_status_and_reason(post_all, status, kind):
    with (
        serving(chat=lambda asked: respond({"error": {"message": "too\nlong"}}, status)) as fake,
        pytest.raises(kind, match=f"answered {status}: 'too long'"),
    ):
        post_all(fake, bodies(1))
    assert issubclass(RequestRefusedError, ConfigError)
    assert not issubclass(ServerError, ConfigError)


def test_a_failure_ends_the_other_requests(post_all):
    async def one_fails(asked):
        if asked.json()["number"] == 2:
            async for piece in respond({}, 500):
                yield piece
        await asyncio.sleep(60)

    with serving(chat=one_fails) as fake:
        with pytest.raises(ServerError, match="answered 500"):
            post_all(fake, bodies(6), concurrency=3)
        end_s = time.monotonic() + 10
        while fake.in_flight:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        assert len(fake.asked) <= 4


def test_a_stream_that_breaks_off_is_an_error(post_all):
    async def half(_asked):
        first = event(HELLO[1])
        yield head(kind="text/event-stream", transfer_encoding="chunked")
        yield f"{len(first):x}\r\n".encode() + first + b"\r\n"

    with serving(chat=half) as fake, pytest.raises(ServerError, match="broke off"):
        post_all(fake, bodies(1))


@pytest.mark.parametrize("answer", [b"\x00\xff no HTTP at all\r\n\r\n", b"", b"HTTP/1.1 2"])
def test_what_is_no_http_is_an_error(post_all, answer):
    async def nonsense(_asked):
        yield answer

    with serving(chat=nonsense) as fake, pytest.raises(ServerError, match="broke off"):
        post_all(fake, bodies(1))


def test_a_compressed_stream_is_read_though_none_was_asked_for(post_all):
    packed = gzip.compress(b"".join(map(event, HELLO)))

    async def compressed(_asked):
        yield head(kind="text/event-stream", content_encoding="gzip")
        for i in range(0, len(packed), 10):
            yield packed[i : i + 10]

    with serving(chat=compressed) as fake:
        _, [answer] = post_all(fake, bodies(1))
        assert fake.asked[0].headers["accept-encoding"] == "identity"
    assert answer.body == b"".join(map(event, HELLO))


def test_broken_compression_is_an_error(post_all):
    async def broken(_asked):
        yield head(kind="text/event-stream", content_encoding="gzip") + b"not gzip"

    with serving(chat=broken) as fake, pytest.raises(ServerError, match="broke off"):
        post_all(fake, bodies(1))


def test_nobody_there(post_all):
    with serving() as fake:
        pass
    with pytest.raises(ServerError, match=r"cannot be reached.*does the server run there"):
        post_all(fake, bodies(1))


def test_the_key_is_sent_and_a_wrong_one_is_told(post_all):
    def guarded(asked):
        is_right = asked.headers.get("authorization") == "Bearer secret"
        return respond({"data": []}, 200 if is_right else 401)

    with serving({"/v1/models": guarded}) as fake:
        with pytest.raises(RequestRefusedError, match="--api-key-env"):
            HttpClient(fake.url, api_key="other").get_json("/v1/models")
        assert HttpClient(fake.url, api_key="secret").get_json("/v1/models") == {"data": []}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "m"}}', "'m'"), (b'{"error": "e"}', "'e'"), (b'{"detail": "d"}', "'d'"),
        (b'{"message": "m"}', "'m'"), (b"<h1>Bad</h1>", "'<h1>Bad</h1>'"), (b"", "no reason given"),
        (b"\xff", "'\N{REPLACEMENT CHARACTER}'"),
    ],
)  # fmt: skip
def test_what_an_error_says(body, text):
    assert error_text(body) == text


def test_an_error_nested_too_deeply_is_shown_as_its_text():
    assert error_text(b"[" * 60_000).startswith("'[[[")
