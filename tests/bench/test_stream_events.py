"""Server-sent events from pieces cut anywhere, malformed ones refused."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.bench.http_client import Received, ServerError
from ddtree.bench.stream_events import event_texts, stream_events


def received(*pieces):
    timed = tuple((float(number), piece) for number, piece in enumerate(pieces))
    return Received(0.0, float(len(pieces)), timed, is_stream=True)


def cut(data, places):
    edges = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


@given(
    values=st.lists(st.dictionaries(st.text(), st.text() | st.integers()).filter(lambda d: "error" not in d)),
    ending=st.sampled_from(["\n", "\r\n", "\r"]),
    places=st.lists(st.integers(0, 10_000)),
)
def test_events_are_the_same_wherever_the_stream_was_cut(values, ending, places):
    texts = [json.dumps(value, ensure_ascii=False) for value in values]
    data = "".join(f"data: {text}{ending}{ending}" for text in [*texts, "[DONE]"]).encode()
    assert [event.value for event in stream_events(received(*cut(data, places)))] == values


def test_an_event_has_the_time_of_its_last_byte():
    events = stream_events(received(b'data: {"a": 1}\n', b'\ndata: {"b"', b": 2}\n\n"))
    assert [(event.time_s, event.value) for event in events] == [(1.0, {"a": 1}), (2.0, {"b": 2})]


def test_comments_names_and_several_data_lines():
    stream = b'\xef\xbb\xbf: ping\n\nevent: x\nid: 3\ndata: {"a":\ndata: 1}\n\nretry: 5\n\ndata:{"b": 2}\n\n'
    assert [event.value for event in stream_events(received(stream))] == [{"a": 1}, {"b": 2}]


def test_what_no_blank_line_ends_is_an_event_too():
    assert list(event_texts(received(b"data: [DONE]").pieces)) == [(0.0, "[DONE]")]
    assert list(event_texts(received(b"data: x\r").pieces)) == [(0.0, "x")]


@pytest.mark.parametrize(
    ("stream", "named"),
    [
        (b"data: {\n\n", "no JSON: '{'"),
        (b"data: [1]\n\n", "no object"),
        (b'data: {"error": {"message": "out of memory"}}\n\n', "out of memory"),
        (b'data: {"error": "stopped"}\n\n', "stopped"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "no JSON"),
    ],
)
def test_an_event_that_cannot_be_used_is_named(stream, named):
    with pytest.raises(ServerError, match="the stream") as raised:
        stream_events(received(stream))
    assert named in str(raised.value)
    assert len(str(raised.value)) < 400
