"""The lines of a trace and the thread that writes them: whole, soon, and never in the way."""

import json
import logging
import math
import os
import threading

import pytest

from ddtree import trace_format
from ddtree.config import SamplingParams
from ddtree.errors import ConfigError
from ddtree.trace_format import (
    TraceEnd,
    TraceHeader,
    TraceInUseError,
    TraceRequest,
    TraceRound,
    TraceWriter,
    checkpoint_sha256,
    is_trace,
    sampling_fields,
    to_line,
)

HEADER = TraceHeader("embedded", {"name": "m"}, None, {}, "cpu", "float32", {}, "2026-01-01T00:00:00+00:00")
REQUEST = TraceRequest("r0", (1, 2), {}, "tree", "auto")
END = TraceEnd("r0", (3,), "length", {})


def a_round(number=1, **fields):
    return TraceRound("r0", number, 2, 3, "tree", 4, (5,), (0,), 1.5, **fields)


def lines_of(path):
    return path.read_bytes().splitlines(keepends=True)


def test_the_header_says_format_and_version():
    line = json.loads(to_line(HEADER))
    assert list(line)[:3] == ["format", "version", "engine"]
    assert (line["format"], line["version"], line["drafter"]) == ("ddtree-trace", 1, None)
    assert is_trace(to_line(HEADER))


def test_a_line_holds_what_was_given_and_nothing_that_was_left_out():
    assert json.loads(to_line(a_round())) == {
        "type": "round", "id": "r0", "round": 1, "position": 2, "root": 3, "mode": "tree", "node_budget": 4,
        "accept_tokens": [5], "accept_indices": [0], "round_ms": 1.5,
    }  # fmt: skip
    full = json.loads(to_line(a_round(tokens=(3, 5), parents=(-1, 0), target=((-0.5, 1.0),))))
    assert (full["tokens"], full["parents"], full["target"]) == ([3, 5], [-1, 0], [[-0.5, 1.0]])
    assert "log_probs" not in full


def test_lines_are_ascii_and_valid_json_whatever_they_hold():
    odd = TraceRequest("Grüße\n\udc80", (1 << 400,), {"a": math.inf, "b": [math.nan]}, "tree", 4)
    line = to_line(odd)
    assert line.isascii()
    assert line.count(b"\n") == 1
    values = json.loads(line, parse_constant=pytest.fail)
    assert (values["id"], values["prompt_tokens"]) == (odd.id, [1 << 400])
    assert values["sampling"] == {"a": None, "b": [None]}


def test_sampling_parameters_become_json():
    fields = sampling_fields(SamplingParams(temperature=0.5, logit_bias={7: -1.5}, stop=("x",)))
    assert json.loads(json.dumps(fields)) == fields | {"stop": ["x"], "stop_token_ids": []}
    assert (fields["temperature"], fields["logit_bias"]) == (0.5, {"7": -1.5})


def test_a_writer_writes_all_that_it_took_in_order(tmp_path):
    path = tmp_path / "t.jsonl"
    writer = TraceWriter(path)
    records = [HEADER, REQUEST, *(a_round(number) for number in range(1, 500)), END]
    for record in records:
        writer.write(record)
    writer.close()
    assert lines_of(path) == [to_line(record) for record in records]


def test_what_was_taken_is_in_the_file_soon_without_a_close(tmp_path):
    """As after a crash: nothing more is done with the writer."""
    path, written = tmp_path / "t.jsonl", threading.Event()
    writer = TraceWriter(path, poll=lambda is_last: written.set() if path.stat().st_size else None)
    writer.write(HEADER)
    writer.flush()
    assert written.wait(60)
    assert lines_of(path) == [to_line(HEADER)]
    writer.close()


def test_several_threads_write(tmp_path):
    path = tmp_path / "t.jsonl"
    writer = TraceWriter(path)
    threads = [
        threading.Thread(target=lambda n=n: [writer.write(a_round(n)) for _ in range(300)]) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    numbers = [json.loads(line)["round"] for line in lines_of(path)]
    assert [numbers.count(n) for n in range(4)] == [300] * 4


def test_poll_makes_records_and_is_told_of_the_last_call(tmp_path):
    path, calls = tmp_path / "t.jsonl", []

    def poll(is_last):
        calls.append(is_last)
        if is_last:
            writer.write(END)

    writer = TraceWriter(path, poll)
    writer.write(HEADER)
    writer.close()
    assert calls[-1] is True
    assert calls.count(True) == 1
    assert lines_of(path)[-1] == to_line(END)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_ends_the_trace_with_one_warning(caplog):
    writer = TraceWriter(trace_format.Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            writer.write(HEADER)
            writer.flush()
        writer.close()
        writer.write(END)
    (record,) = caplog.records
    assert "'/dev/full' ends here: No space left on device; decoding goes on without" in record.getMessage()
    assert writer.has_failed


@pytest.mark.parametrize("fault", [ValueError("no such thing"), OSError(5, "Input/output error")])
def test_an_error_in_the_thread_ends_the_trace_with_one_warning(tmp_path, caplog, fault):
    def poll(is_last):
        raise fault

    with caplog.at_level(logging.WARNING):
        writer = TraceWriter(tmp_path / "t.jsonl", poll)
        writer.close()
    (record,) = caplog.records
    assert str(fault.args[-1]) in record.getMessage()


def test_a_disk_that_does_not_answer_costs_bounded_memory_and_one_warning(tmp_path, caplog, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(trace_format, "MAX_PENDING", 10)
    monkeypatch.setattr(trace_format, "CLOSE_S", 0.01)
    monkeypatch.setattr(os, "write", lambda *_: answer.wait(60) and len(_[1]))
    writer = TraceWriter(tmp_path / "t.jsonl")
    writer.write(HEADER)
    writer.flush()
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            writer.write(a_round(number))
        writer.close()
    assert len(caplog.records) == 1
    assert len(writer._pending) <= 10
    answer.set()


def test_a_trace_is_replaced_but_only_when_there_is_a_new_one(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(to_line(HEADER) + to_line(REQUEST))
    TraceWriter(path).close()
    assert len(lines_of(path)) == 2
    writer = TraceWriter(path)
    writer.write(HEADER)
    writer.close()
    assert lines_of(path) == [to_line(HEADER)]


@pytest.mark.parametrize("content", [b"my notes\n", b"\xff\xfe", b'{"format": "other"}\n', b"[" * 100_000])
def test_a_file_that_is_no_trace_is_left_alone(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"notes.txt' is there and is no trace; name another one"):
        TraceWriter(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(("place", "reason"), [("", "Is a directory"), ("no/t", "No such file")])
def test_a_file_that_cannot_be_made_is_refused(tmp_path, place, reason):
    with pytest.raises(ConfigError, match=reason):
        TraceWriter(tmp_path / place)


def test_a_file_has_one_writer(tmp_path):
    path = tmp_path / "t.jsonl"
    first = TraceWriter(path)
    with pytest.raises(TraceInUseError, match="is being written"):
        TraceWriter(path)
    first.close()
    TraceWriter(path).close()


def test_a_pipe_can_be_written(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = TraceWriter(path)
    writer.write(HEADER)
    writer.close()
    assert os.read(reader, 1 << 16) == to_line(HEADER)
    os.close(reader)


def write_checkpoint(folder, weights):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(str(len(weights)))
    (folder / "model.safetensors").write_bytes(weights)
    return checkpoint_sha256(folder)


def test_a_checksum_tells_checkpoints_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_format, "BLOCK_BYTES", 8)
    weights = bytes(range(256)) * 4
    first = write_checkpoint(tmp_path / "a", weights)
    assert len(first) == 64
    assert write_checkpoint(tmp_path / "b", weights) == first
    trained = bytes(255 - value for value in weights)
    others = [trained, weights + b"x", b"x" + weights[1:], weights[:-1] + b"x", b"short"]
    sums = {write_checkpoint(tmp_path / f"c{i}", other) for i, other in enumerate(others)}
    assert len(sums | {first}) == 1 + len(others)
    (tmp_path / "b" / "config.json").write_text('{"a": 1}')
    assert checkpoint_sha256(tmp_path / "b") != first


def test_what_is_no_checkpoint_has_no_checksum(tmp_path):
    assert checkpoint_sha256(tmp_path) is None
    assert checkpoint_sha256(tmp_path / "none") is None
