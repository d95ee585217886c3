"""What a chat answer says: counts, times, rounds, whatever of it a server leaves out."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.bench.chat_answer import chunk_times, read_answer, sglang_rounds
from ddtree.bench.http_client import Received, ServerError
from fake_server import HELLO, chunk, event, usage


def stream(*values):
    """One piece a value, a second apart, the first at 11."""
    pieces = tuple((11.0 + i, event(value)) for i, value in enumerate(values))
    return Received(10.0, 11.0 + len(values), pieces, is_stream=True)


def test_a_stream_as_openai_sends_it():
    answer = read_answer(stream(*HELLO))
    assert (answer.text, answer.finish_reason) == ("Hello!", "stop")
    assert (answer.prompt_tokens, answer.new_tokens, answer.tokens) == (5, 4, None)
    # The first chunk has a role and no text.
    assert (answer.begin_s, answer.first_s, answer.end_s) == (10.0, 12.0, 17.0)
    assert answer.chunk_times == ((12.0, 2), (13.0, 2))
    assert (answer.rounds, answer.accept_histogram) == (None, None)


def test_reasoning_is_new_tokens_and_not_the_answer():
    answer = read_answer(
        stream(
            chunk(reasoning_content="Hmm"),
            chunk(reasoning="..."),
            chunk(content="4"),
            chunk("stop"),
            usage(1, 9),
        )
    )
    assert answer.text == "4"
    assert (answer.first_s, answer.new_tokens) == (11.0, 9)
    assert sum(count for _, count in answer.chunk_times) == 9


def test_a_call_of_a_tool_is_new_tokens():
    answer = read_answer(stream(chunk(tool_calls=[{"index": 0}]), chunk("tool_calls"), usage(1, 6)))
    assert answer.chunk_times == ((11.0, 6),)


def test_chunks_that_tell_their_tokens_are_believed():
    values = [chunk(content=text) | usage(3, total) for text, total in (("a", 1), ("long text", 3), ("b", 7))]
    for value, text in zip(values, ("a", "long text", "b"), strict=True):
        value["choices"] = chunk(content=text)["choices"]
    answer = read_answer(stream(*values, chunk("length"), usage(3, 8)))
    assert answer.chunk_times == ((11.0, 1), (12.0, 2), (13.0, 5))
    assert answer.new_tokens == 8


def test_without_usage_tokens_are_counted_by_tokenizer_or_chunk():
    values = [
        chunk(role="assistant"),
        chunk(content="a b"),
        chunk(content=""),
        chunk(content=" c"),
        chunk("stop"),
    ]
    assert read_answer(stream(*values)).new_tokens == 2
    assert read_answer(stream(*values), lambda text: len(text.split())).new_tokens == 3


def test_nothing_but_an_end_token():
    answer = read_answer(stream(chunk(role="assistant", content=""), chunk("stop"), usage(5, 1)))
    assert (answer.text, answer.new_tokens, answer.chunk_times) == ("", 1, ())
    assert answer.first_s == 12.0


def test_a_server_that_does_not_stream():
    document = {
        "choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3},
    }
    body = json.dumps(document).encode()
    answer = read_answer(Received(0.0, 2.0, ((1.0, body[:9]), (2.0, body[9:])), is_stream=False))
    assert (answer.text, answer.new_tokens, answer.first_s, answer.chunk_times) == ("Hi", 3, None, ())


def test_ddtree_serve_tells_rounds_and_its_own_decode_time():
    summary = {"mode": "tree", "rounds": 3, "decode_s": 0.25}
    answer = read_answer(stream(*HELLO[:4], HELLO[4] | {"ddtree": summary}))
    assert (answer.rounds, answer.decode_s, answer.accept_histogram) == (3, 0.25, None)


@pytest.mark.parametrize("summary", [
    {"rounds": -1, "decode_s": -5.0}, {"rounds": 10**40, "decode_s": 10**400},
    {"rounds": 2.5, "decode_s": float("nan")}, {"rounds": True, "decode_s": float("inf")},
    {"rounds": None, "decode_s": "1"}, {"rounds": "3", "decode_s": 1e300},
])  # fmt: skip
def test_figures_of_a_server_that_cannot_be_are_not_known(summary):
    answer = read_answer(stream(*HELLO[:4], HELLO[4] | {"ddtree": summary}))
    assert (answer.rounds, answer.decode_s) == (None, None)


def test_sglang_tells_tokens_and_rounds():
    ext = {
        "spec_tokens_details": {"spec_verify_ct": 3, "spec_correct_drafts_histogram": [1, 0, 2]},
        "input_ids": [7, 8],
        "output_ids": [[4, 5, 6, 2]],
    }
    answer = read_answer(stream(*HELLO[:4], {"choices": [], "sglext": ext}, HELLO[4]))
    assert (answer.tokens, answer.prompt) == ((4, 5, 6, 2), (7, 8))
    assert (answer.rounds, answer.accept_histogram) == (3, {1: 1, 3: 2})


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (HELLO[:3], "broke off after 2 chunks"),
        ((), "broke off after 0 chunks"),
        ((*HELLO[:2], {"error": {"message": "CUDA out of memory"}}), "CUDA out of memory"),
        (({"choices": [3]},), "cannot be read"),
        (({"choices": [{"delta": "x"}]},), "cannot be read"),
        ((*HELLO[:4], usage(5, -1)), "completion_tokens=-1"),
        ((*HELLO[:4], usage(5, "many")), "completion_tokens='many'"),
        ((*HELLO[:4], usage(True, 3)), "prompt_tokens=True"),
        ((*HELLO[:4], usage(5, 10**12)), "completion_tokens=1000000000000"),
        (
            (*HELLO[:4], {"choices": [], "sglext": {"spec_tokens_details": {"spec_verify_ct": -1}}}),
            "SGLang's",
        ),
        (
            (*HELLO[:4], {"choices": [], "sglext": {"spec_tokens_details": {"spec_verify_ct": "x"}}}),
            "SGLang's",
        ),
    ],
)
def test_what_cannot_be_read_is_named(values, named):
    with pytest.raises(ServerError) as raised:
        read_answer(stream(*values))
    assert named in str(raised.value)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": "no"}', b'{"choices": []}'])
def test_a_whole_answer_that_is_none(body):
    with pytest.raises(ServerError):
        read_answer(Received(0.0, 1.0, ((1.0, body),), is_stream=False))


@given(
    texts=st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=20),
    new_tokens=st.integers(0, 100),
    data=st.data(),
)
def test_the_tokens_of_chunks_add_up(texts, new_tokens, data):
    told = [None] * len(texts)
    if data.draw(st.booleans()):
        told = data.draw(st.lists(st.integers(0, 120) | st.none(), min_size=len(texts), max_size=len(texts)))
    times = chunk_times(
        [(float(i), *pair) for i, pair in enumerate(zip(texts, told, strict=True))], new_tokens
    )
    assert sum(count for _, count in times) == new_tokens
    assert all(count > 0 for _, count in times)
    assert [time_s for time_s, _ in times] == sorted(time_s for time_s, _ in times)


def test_no_rounds():
    assert sglang_rounds({"finish_reason": None}) == (0, {})


def test_more_accept_lengths_than_a_tree_can_have_are_refused():
    with pytest.raises(ServerError, match="SGLang's figures"):
        sglang_rounds({"spec_verify_ct": 1, "spec_correct_drafts_histogram": [1] * 1026})
