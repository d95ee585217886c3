"""The file of a run: what is written comes back, and what is broken is refused by name."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench_kit import HEADER, cell
from ddtree.bench.run_format import Arm, CellKey, parse_cell, read_run, sorted_arms, unlike, unlike_workloads
from ddtree.bench.run_writer import RunWriter
from ddtree.config import Mode
from ddtree.errors import ConfigError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def write_run(path, cells=2):
    writer = RunWriter(path, HEADER)
    writer.session({"python": "3"})
    writer.engine("embedded ar", {"dtype": "float32"})
    for repeat in range(cells):
        writer.cell(cell(repeat=repeat, energy_j=1.5, accept_histogram={"1": 8}))
    return writer


def test_a_run_comes_back_as_it_was_written(path):
    written = write_run(path).run
    run = read_run(path)
    assert (run.header, run.sessions, run.engines) == (
        HEADER,
        [{"python": "3"}],
        {"embedded ar": {"dtype": "float32"}},
    )
    assert run.cells == written.cells
    assert run.cells[CellKey("embedded ar", "one", 1, 0.0, 1)].energy_j == 1.5


def test_a_cell_that_could_not_be_read_is_not_written(path):
    writer = write_run(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="energy_j"):
        writer.cell(cell(repeat=2, energy_j=float("nan")))
    assert path.read_bytes() == before
    assert len(writer.run.cells) == 2


def test_what_is_unknown_of_all_requests_is_not_written(path):
    write_run(path)
    record = json.loads(path.read_text().splitlines()[-1])
    assert "is_correct" not in record["requests"]
    assert "rank_histogram" not in record


def test_each_line_is_on_disk_when_the_call_returns(path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    write_run(path, cells=1)
    assert synced[-1] == path.stat().st_size
    assert len(synced) == len(path.read_bytes().splitlines())


@pytest.mark.parametrize("cut", [1, 10, 200])
def test_a_torn_last_line_is_left_out_and_written_over(path, cut):
    write_run(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    torn = read_run(path)
    assert (torn.num_torn, len(torn.cells)) == ((0, 2) if cut == 1 else (1, 1))  # all but its end is there
    writer = RunWriter(path, HEADER)
    if torn.num_torn:
        writer.cell(cell(repeat=1, energy_j=1.5, accept_histogram={"1": 8}))
    assert path.read_bytes() == whole
    assert read_run(path).num_torn == 0


def test_a_torn_first_line_is_begun_anew(path):
    write_run(path)
    path.write_bytes(path.read_bytes()[:60])
    RunWriter(path, HEADER)
    assert read_run(path).header == HEADER


@pytest.mark.parametrize(
    "content", [b"mine\n", b"{}", b"\xff\xfe", b'{"format":"ddtree-trace","version":1}\n', b"[1]\n"]
)
def test_another_file_is_refused_and_kept(path, content):
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is no benchmark run"):
        RunWriter(path, HEADER)
    assert path.read_bytes() == content


def test_a_broken_line_is_named(path):
    write_run(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"{}\n", *lines[3:]]))
    with pytest.raises(ConfigError, match="line 4 is not what it should be"):
        read_run(path)


@pytest.mark.parametrize(
    "change",
    [
        {"wall_s": 0},
        {"wall_s": "1"},
        {"requests": {"prompt": []}},
        {"requests": {"prompt": [0], "new_tokens": [1, 2]}},
        {"surprise": 1},
        {"arm": None, "type": "cell", "repeat": {}},
    ],
)
def test_a_cell_that_is_none_is_refused(path, change):
    write_run(path, cells=1)
    lines = path.read_text().splitlines()
    lines[-1] = json.dumps(json.loads(lines[-1]) | change)
    path.write_text("\n".join([*lines, ""]))
    with pytest.raises(ConfigError, match="is not what it should be"):
        read_run(path)


@pytest.mark.parametrize("field", ["settings", "sets", "models"])
def test_a_header_of_another_form_is_refused(path, field):
    write_run(path)
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([json.dumps(json.loads(first) | {field: [1]}) + "\n", *rest]))
    with pytest.raises(ConfigError, match="line 1"):
        read_run(path)


def test_a_full_disk_is_told_in_one_line_and_loses_nothing(path, monkeypatch):
    writer = write_run(path)
    before = path.read_bytes()

    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left on device; what was measured before is kept"):
        writer.cell(cell(repeat=2))
    assert path.read_bytes().startswith(before)
    assert len(read_run(path).cells) >= 2


def test_a_path_that_cannot_be_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for path, said in ((tmp_path, "Is a directory"), (tmp_path / "file" / "run", "File exists"),
                       (tmp_path / ("x" * 300), "File name too long")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            RunWriter(path, HEADER)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"settings": {**HEADER.settings, "seed": 1}}, "seed: 0, now 1"),
        ({"settings": {**HEADER.settings, "max_tokens": 9}}, "max_tokens: 8, now 9"),
        ({"sets": {"one": {"rows": 4, "sha256": "cc"}}}, "prompts of one"),
        ({"models": {"target": {"name": "other"}, "drafter": None}}, "target: .*tiny.*, now .*other"),
        ({"device": "NVIDIA H200"}, "device: cpu, now NVIDIA H200"),
    ],
)
def test_an_unlike_run_is_refused_by_what_differs(path, changes, named):
    write_run(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"is another run .*{named}.*another --output"):
        RunWriter(path, replace(HEADER, **changes))
    assert path.read_bytes() == before


def test_another_drafter_is_refused_and_a_first_one_is_not():
    with_drafter = replace(HEADER, models={**HEADER.models, "drafter": {"name": "a"}})
    other = replace(HEADER, models={**HEADER.models, "drafter": {"name": "b"}})
    assert unlike(HEADER, with_drafter) == unlike(with_drafter, HEADER) == []
    assert unlike(with_drafter, other) == ["drafter: {'name': 'a'}, now {'name': 'b'}"]
    assert unlike_workloads(with_drafter, other) == []


def test_a_run_grows_and_its_header_says_so(path):
    write_run(path)
    grown = replace(
        HEADER,
        settings={**HEADER.settings, "engines": ("embedded", "sglang")},
        sets={"three": {"rows": 1, "sha256": "cc"}},
        models={**HEADER.models, "drafter": {"name": "d"}},
    )
    RunWriter(path, grown)
    header = read_run(path).header
    assert header.settings["engines"] == ["embedded", "sglang"]
    assert list(header.sets) == ["one", "two", "three"]
    assert header.models["drafter"] == {"name": "d"}
    RunWriter(path, HEADER)
    assert read_run(path).header.models["drafter"] == {"name": "d"}
    assert len(read_run(path).cells) == 2


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("embedded ar", Arm("embedded", Mode.AR)),
        ("sglang tree:64", Arm("sglang", Mode.TREE, 64)),
        ("embedded tree:auto", Arm("embedded", Mode.TREE, "auto")),
        ("http://h:1/v1", Arm("http://h:1/v1", None)),
        ("http://h:1/v1 chain", Arm("http://h:1/v1", Mode.CHAIN)),
    ],
)
def test_an_arm_and_its_name(text, arm):
    assert Arm.parse(text) == arm
    assert str(arm) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        " ar",
        "embedded ",
        "embedded tree",
        "embedded tree:0",
        "embedded tree:064",
        "embedded beam",
        "embedded ar:4",
    ],
)
def test_a_name_that_is_no_arms_is_refused(text):
    with pytest.raises(ConfigError):
        Arm.parse(text)


def test_arms_in_order():
    ordered = ["h ar", "h chain", "h tree:16", "h tree:128", "h tree:auto", "i ar"]
    assert sorted_arms(reversed(ordered)) == ordered


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 50)), min_size=1, max_size=9))
def test_accept_length_is_tokens_over_rounds(counts):
    histogram = {}
    for length, rounds in counts:
        histogram[str(length)] = histogram.get(str(length), 0) + rounds
    tokens = sum(length * rounds for length, rounds in counts)
    found = cell(accept_histogram=histogram).accept_length
    assert found == pytest.approx(tokens / sum(rounds for _, rounds in counts))
    assert cell(accept_histogram=None).accept_length == pytest.approx(16 / 8)


def test_a_cell_without_requests_is_none():
    with pytest.raises(KeyError):
        parse_cell({"type": "cell"})


@pytest.mark.parametrize(
    "change",
    [
        {"arm": -1},
        {"arm": "embedded tree:0"},
        {"concurrency": 0},
        {"temperature": None},
        {"repeat": "0"},
        {"wall_s": float("inf")},
        {"accept_histogram": {"1": None}},
        {"accept_histogram": {"1": 0}},
        {"accept_histogram": {"1": 1e308}},
        {"accept_histogram": {"1026": 1}},
        {"rank_histogram": {"x": 1}},
        {"stages_ms": {"verify": -1}},
        {"between_tokens_ms": {"50": float("nan")}},
        {"peak_memory_bytes": "much"},
        {"outputs": 3},
        {"outputs": [3]},
        {"outputs": [{"path": "o", "num_bytes": -1, "sha256": ""}]},
        {"outputs": [{"path": "o", "num_bytes": 1}]},
    ],
)
def test_a_value_that_was_never_measured_is_refused_by_its_line(path, change):
    write_run(path, cells=1)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], json.dumps(json.loads(lines[-1]) | change)]) + "\n")
    with pytest.raises(ConfigError, match=f"line {len(lines)} is not what it should be"):
        read_run(path)


@pytest.mark.parametrize(
    ("column", "value"), [("new_tokens", "7"), ("decode_s", float("nan")), ("rounds", -1)]
)
def test_a_request_that_was_never_measured_is_refused(path, column, value):
    write_run(path, cells=1)
    lines = path.read_text().splitlines()
    record = json.loads(lines[-1])
    record["requests"][column][0] = value
    path.write_text("\n".join([*lines[:-1], json.dumps(record)]) + "\n")
    with pytest.raises(ConfigError, match=f"{column}="):
        read_run(path)


def test_a_device_is_no_run():
    with pytest.raises(ConfigError, match="is a device"):
        read_run(Path("/dev/full"))
