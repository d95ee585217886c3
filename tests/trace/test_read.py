"""Traces are read as they were written, up to where they break off; what is no trace is refused by name."""

import json
import math
from dataclasses import MISSING, fields, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddtree.errors import ConfigError
from ddtree.trace.read import Trace, TracedRequest, gather, read_trace
from ddtree.trace_format import TraceEnd, TraceHeader, TraceRequest, TraceRound, to_line

HEADER = TraceHeader("embedded", {"name": "m"}, None, {}, "cpu", "float32", {}, "2026-01-01T00:00:00+00:00")
REQUEST = TraceRequest("r0", (1, 2), {"temperature": 0.5}, "tree", "auto")
ROUNDS = (
    TraceRound("r0", 1, 2, 3, "tree", 2, (5, 6), (0, 2), 1.5, (3, 4, 5), (-1, 0, 0), (0.0, -0.5, -1.0)),
    TraceRound("r0", 2, 4, 6, "ar", 0, (7,), (0,), 1.0, target=((-0.5, 0.25),), stages_ms={"draft": 0.5}),
)
END = TraceEnd("r0", (3, 5, 6, 7), "length", {"rounds": 2}, ((-0.5, 1.5),))
RECORDS = (HEADER, REQUEST, *ROUNDS, END)

numbers = st.floats(allow_nan=False, allow_infinity=False)
integers = st.integers() | st.just(10**4000) | st.just(-(1 << 64))
token_lists = st.lists(integers, max_size=5).map(tuple)
pairs = st.lists(st.tuples(numbers, numbers), max_size=3).map(tuple)
json_values = st.recursive(
    st.none() | st.booleans() | integers | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(), json_values, max_size=3)
texts = st.text(st.characters(exclude_categories=()))  # lone surrogates too
headers = st.builds(TraceHeader, texts, objects, st.none() | objects, objects, texts, texts, objects, texts)


def rounds_of(id):
    return st.builds(
        TraceRound, st.just(id), integers, integers, integers, texts, integers, token_lists, token_lists,
        numbers, token_lists, token_lists, st.lists(numbers, max_size=3).map(tuple), pairs,
        st.none() | objects,
    )  # fmt: skip


@st.composite
def traced_requests(draw, id):
    return TracedRequest(
        draw(st.builds(
            TraceRequest, st.just(id), token_lists, objects, texts, integers | texts, st.none() | texts
        )),
        tuple(draw(st.lists(rounds_of(id), max_size=3))),
        draw(st.none() | st.builds(TraceEnd, st.just(id), token_lists, texts, objects, pairs)),
    )  # fmt: skip


@st.composite
def traces(draw):
    ids = draw(st.lists(texts, max_size=3, unique=True))
    return Trace(draw(headers), tuple(draw(traced_requests(id)) for id in ids), False)


def interleaved(trace):
    """The trace's records, with the requests' rounds by turns."""
    yield trace.header
    yield from (each.request for each in trace.requests)
    for number in range(3):
        yield from (each.rounds[number] for each in trace.requests if number < len(each.rounds))
    yield from (each.end for each in trace.requests if each.end is not None)


def lines_of(records=RECORDS):
    return [to_line(record) for record in records]


@settings(max_examples=40)
@given(traces())
@example(gather(lines_of(), "t"))
def test_what_is_written_is_read_again(trace):
    assert gather(lines_of(interleaved(trace)), "t") == trace


@given(st.data())
def test_a_file_that_breaks_off_anywhere_is_read_up_to_there(data):
    whole = b"".join(lines_of())
    cut = data.draw(st.integers(len(to_line(HEADER)), len(whole)))
    trace = gather(whole[:cut].splitlines(keepends=True), "t")
    num_whole = whole[:cut].count(b"\n")
    rest = whole[:cut].rpartition(b"\n")[2]
    # A last line that lacks only its newline is whole.
    num_whole += bool(rest) and rest + b"\n" in lines_of()
    found = [trace.header, *(r for t in trace.requests for r in (t.request, *t.rounds, t.end) if r)]
    assert tuple(found) == RECORDS[:num_whole]
    assert trace.is_cut == (bool(rest) and rest + b"\n" not in lines_of())


@given(st.binary())
@example(b"[" * 100_000 + b"\n")
@example(b"1" * 5000 + b"\n")
@example(b'{"type": 1e999}\n')
def test_junk_is_refused_with_its_line_or_read_as_nothing(junk):
    """Never any other error; a junk line may be an object of an unknown type, and a last one broke off."""
    refusal = ""
    try:
        trace = gather([*lines_of(RECORDS[:2]), *junk.splitlines(keepends=True)], "the file")
    except ConfigError as error:
        refusal = str(error)
    assert refusal.startswith("the file line ") or trace.requests == (TracedRequest(REQUEST, (), None),)


@pytest.mark.parametrize("junk", [b"\n", b"junk\n", b"[]\n", b'{"type": "round", "id": "r0\n'])
def test_a_whole_line_of_junk_is_refused_even_at_the_end(junk):
    """Only what lacks its newline may have broken off."""
    with pytest.raises(ConfigError, match=r"^t line 6 is no JSON object: "):
        gather([*lines_of(), junk], "t")
    assert gather([*lines_of(), junk.rstrip(b"\n") or b"{"], "t").is_cut


@given(st.sampled_from(RECORDS[1:]), st.data())
def test_a_field_of_another_kind_is_refused_by_name(record, data):
    values = json.loads(to_line(record))
    name = data.draw(st.sampled_from(sorted(set(values) - {"type"})))
    before = lines_of(RECORDS[: RECORDS.index(record)])
    values[name] = wrong = data.draw(st.sampled_from([True, [[1]], [True], {"a": 1}, 10**400, ["x"]]))
    if isinstance(wrong, dict) and name in ("sampling", "stats", "stages_ms"):
        return
    if isinstance(wrong, int) and wrong is not True and name in ("round", "position", "root", "node_budget"):
        return
    with pytest.raises(ConfigError, match=rf"^t line {len(before) + 1} has {name}=.* which is not allowed"):
        gather([*before, json.dumps(values).encode() + b"\n"], "t")


@given(st.sampled_from(RECORDS), st.data())
def test_a_field_that_is_missing_is_named(record, data):
    values = json.loads(to_line(record))
    optional = {spec.name for spec in fields(record) if spec.default is not MISSING}
    needed = sorted(set(values) - {"type", "format", "version"} - optional)
    del values[name := data.draw(st.sampled_from(needed))]
    before = lines_of(RECORDS[: RECORDS.index(record)])
    with pytest.raises(ConfigError, match=rf"^t line {len(before) + 1} has no {name}$"):
        gather([*before, json.dumps(values).encode() + b"\n"], "t")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"format": "ddtree-trace", "version": 2}, r"version 2; this ddtree reads version 1; read it with"),
        ({"format": "ddtree-trace", "version": True}, r"version True; this ddtree reads"),
        ({"format": "ddtree-trace"}, r"version None; this ddtree reads"),
        ({"format": "other", "version": 1}, r"is no trace: its first line"),
        ({"prompt": "x", "tokens": []}, r"is no trace: its first line"),
        ([], r"is no trace: its first line"),
    ],
)
def test_another_version_or_no_trace_is_refused(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_unknown_fields_and_types_are_ignored():
    odd = [json.dumps(json.loads(line) | {"new": 1}).encode() + b"\n" for line in lines_of()]
    odd.insert(2, b'{"type": "comment", "text": "x"}\n')
    odd.insert(3, b"{}\n")
    assert gather(odd, "t") == gather(lines_of(), "t")


def test_text_that_is_not_ascii_is_read():
    line = to_line(replace(REQUEST, id="Grüße")).replace(b"\\u00fc", "ü".encode())
    assert gather([to_line(HEADER), line], "t").requests[0].request.id == "Grüße"


def test_a_number_that_was_not_finite_is_read_as_none_such():
    odd = replace(ROUNDS[0], log_probs=(0.0, -math.inf, math.nan))
    (traced,) = gather(lines_of([HEADER, REQUEST, odd]), "t").requests
    assert traced.rounds[0].log_probs[0] == 0.0
    assert all(map(math.isnan, traced.rounds[0].log_probs[1:]))


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([HEADER, REQUEST, REQUEST], "line 3 has a second request 'r0'"),
        ([HEADER, ROUNDS[0]], "line 2 has a line of 'r0', which is no running request"),
        ([HEADER, REQUEST, END, ROUNDS[0]], "line 4 has a line of 'r0'"),
        ([HEADER, REQUEST, END, END], "line 4 has a line of 'r0'"),
    ],
)
def test_lines_in_an_impossible_order_are_refused(records, message):
    with pytest.raises(ConfigError, match=message):
        gather(lines_of(records), "t")


def test_a_file_that_cannot_be_read_or_is_empty_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="empty: it is no trace"):
        read_trace(tmp_path / "empty")


def test_tokens_are_known_without_an_end():
    """From positions, so that a root which no round committed, as after a second prefill, is not lost."""
    again = replace(ROUNDS[1], round=3, position=6, root=9, accept_tokens=(10,))
    traced = TracedRequest(REQUEST, (*ROUNDS, again), None)
    assert traced.tokens == (3, 5, 6, 7, 9, 10)
    assert TracedRequest(REQUEST, (), None).tokens == ()
    assert TracedRequest(REQUEST, ROUNDS, END).tokens == END.tokens
