"""The part of a trace that is read: its first requests and rounds, the rest counted."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.bench.trace_view_part import Limits, read_part
from ddtree.errors import ConfigError
from ddtree.trace.read import read_trace
from ddtree.trace_format import to_line
from trace_view_kit import HEADER, plain_request, write_trace


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Six requests of four rounds each."""
    folder = tmp_path_factory.mktemp("trace")
    return write_trace(folder / "t.jsonl", *(plain_request(f"r{number}", 4) for number in range(6)))


def test_a_small_trace_is_taken_whole(path):
    part = read_part(path)
    assert part.trace == read_trace(path)
    assert (part.num_rounds_left, part.requests_left) == (0, 0)


def test_requests_and_rounds_have_limits(path):
    part = read_part(path, Limits(max_requests=2, max_rounds=3))
    whole = read_trace(path).requests
    assert [each.request.id for each in part.trace.requests] == ["r0", "r1"]
    for taken, traced in zip(part.trace.requests, whole, strict=False):
        assert taken.rounds == traced.rounds[:3]
        assert taken.end == traced.end
    assert (part.requests_left, part.rounds_left, part.other_rounds_left) == (4, {"r0": 1, "r1": 1}, 16)
    assert part.num_rounds_left == 18


@pytest.mark.parametrize("is_interleaved", [False, True])
@settings(max_examples=25, deadline=None)
@given(max_bytes=st.integers(1, 6000))
def test_bytes_have_a_limit_and_nothing_is_lost_from_the_count(tmp_path_factory, is_interleaved, max_bytes):
    traced = [plain_request(f"r{number}", 4) for number in range(5)]
    lines = [[each.request, *each.rounds, each.end] for each in traced]
    if is_interleaved:
        lines = list(zip(*lines, strict=True))
    flat = [to_line(record) for record in itertools.chain(*lines)]
    file = tmp_path_factory.getbasetemp() / f"bytes-{is_interleaved}.jsonl"
    file.write_bytes(to_line(HEADER) + b"".join(flat))
    part = read_part(file, Limits(max_bytes=max_bytes))
    taken = part.trace.requests
    used = sum(len(to_line(record)) for each in taken for record in (each.request, *each.rounds))
    assert used <= max_bytes or sum(len(each.rounds) for each in taken) <= 1
    assert len(taken) + part.requests_left == 5
    assert sum(len(each.rounds) for each in taken) + part.num_rounds_left == 20
    for each in taken:
        assert [entry.round for entry in each.rounds] == list(range(1, len(each.rounds) + 1))
        assert len(each.rounds) + part.rounds_left.get(each.request.id, 0) == 4


def test_one_round_is_always_there(path):
    part = read_part(path, Limits(max_bytes=1))
    assert [len(each.rounds) for each in part.trace.requests] == [1]


def test_a_request_has_no_gaps_where_a_large_round_was_left_out(tmp_path):
    traced = plain_request("r0", 3)
    large = replace(traced.rounds[1], tokens=tuple(range(1000)))
    file = write_trace(tmp_path / "t", traced._replace(rounds=(traced.rounds[0], large, traced.rounds[2])))
    part = read_part(file, Limits(max_bytes=1500))
    assert [entry.round for entry in part.trace.requests[0].rounds] == [1]
    assert part.rounds_left == {"r0": 2}


def test_line_numbers_stay_true_behind_lines_left_out(path, tmp_path):
    lines = path.read_bytes().splitlines(keepends=True)
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(b"".join([*lines[:-3], b"no json\n", *lines[-3:]]))
    with pytest.raises(ConfigError, match=f"line {len(lines) - 2} is no JSON object"):
        read_part(broken, Limits(max_requests=1))


def test_a_last_line_that_broke_off_is_told(path, tmp_path):
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(path.read_bytes()[:-20])
    assert read_part(cut).trace.is_cut


@pytest.mark.parametrize("text", ["", "notes\n", '{"format":"ddtree-trace","version":2}\n'])
def test_what_is_no_trace_is_refused(tmp_path, text):
    (tmp_path / "t").write_text(text)
    with pytest.raises(ConfigError, match="trace"):
        read_part(tmp_path / "t")


@pytest.mark.parametrize("name", ["none.jsonl", "", "a\0b"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_part(tmp_path / name)


@pytest.mark.parametrize("name", ["max_requests", "max_rounds", "max_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_limit_is_a_whole_number_from_1(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value!r} is not allowed"):
        Limits(**{name: value})
