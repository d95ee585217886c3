"""The file of finished outputs: whose file it may append to, and what is cut from it."""

import hashlib
import os
import re
from pathlib import Path

import pytest

from ddtree.bench.outputs_file import OutputsFile
from ddtree.bench.run_format import OutputsMark
from ddtree.errors import ConfigError

LINE = b'{"prompt_tokens":[1],"tokens":[2]}\n'


def outputs_of(tmp_path, name="outputs.jsonl"):
    return OutputsFile(tmp_path / name, ("embedded",), "m", tmp_path / "run.jsonl")


def mark_of(data, path="outputs.jsonl"):
    return {path: OutputsMark(path, len(data), hashlib.sha256(data).hexdigest())}


@pytest.mark.parametrize("content", [b"notes without a newline", b"notes\n", b"\0\xff", LINE])
@pytest.mark.parametrize("marks", [{}, mark_of(b""), mark_of(LINE * 2), mark_of(LINE, "other.jsonl")])
def test_a_file_that_is_not_of_the_run_is_left_alone(tmp_path, content, marks):
    path = tmp_path / "outputs.jsonl"
    path.write_bytes(content)
    if "outputs.jsonl" in marks and not marks["outputs.jsonl"].num_bytes:
        marks = {"outputs.jsonl": OutputsMark("outputs.jsonl", len(content), "0" * 64)}
    with pytest.raises(ConfigError, match=r"outputs='.*outputs.jsonl' is not allowed: .*: name another file"):
        outputs_of(tmp_path).begin(marks)
    assert path.read_bytes() == content


@pytest.mark.parametrize("behind", [b"", LINE, b'{"prompt_tok'])
def test_what_the_run_does_not_have_is_cut(tmp_path, behind):
    path = tmp_path / "outputs.jsonl"
    path.write_bytes(LINE + behind)
    assert outputs_of(tmp_path).begin(mark_of(LINE)) == list(mark_of(LINE).values())
    assert path.read_bytes() == LINE


def test_a_folder_of_run_and_outputs_can_be_moved(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "outputs.jsonl").write_bytes(LINE)
    [mark] = outputs_of(tmp_path / "new").begin(mark_of(LINE))
    assert mark.path == "outputs.jsonl"


def test_a_look_changes_nothing(tmp_path):
    outputs_of(tmp_path, "new/outputs.jsonl").check({})
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "outputs.jsonl"
    path.write_bytes(LINE * 2)
    outputs_of(tmp_path).check(mark_of(LINE))
    assert path.read_bytes() == LINE * 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("file/outputs.jsonl", "file' is a file"),
        (".", "a file, not a folder or a device"),
        ("null", "a file, not a folder or a device"),
        ("run.jsonl", "another file than the run's"),
    ],
)
def test_a_path_that_cannot_be_one_is_refused(tmp_path, name, said):
    (tmp_path / "file").write_text("x")
    (tmp_path / "null").symlink_to(os.devnull)
    with pytest.raises(ConfigError, match=said):
        outputs_of(tmp_path, name).check({})


def names_of(*engines):
    outputs = OutputsFile(Path("runs/outputs.jsonl"), engines, "m", Path("run.jsonl"))
    assert {path.parent for path in outputs.paths} == {Path("runs")}
    return [path.name for path in outputs.paths]


def test_ordinary_engines_are_named_by_host_and_port():
    urls = ("http://h:1/v1", "https://h/v1", "http://127.0.0.1:30000/v1")
    assert names_of("embedded", "sglang", *urls) == [
        "outputs-embedded.jsonl",
        "outputs-sglang.jsonl",
        "outputs-h-1.jsonl",
        "outputs-h-https.jsonl",
        "outputs-127.0.0.1-30000.jsonl",
    ]


@pytest.mark.parametrize(
    "engines",
    [
        ("http://h:1/v1#A", "http://h:1/v1#B"),
        ("http://h:1/a/v1", "http://h:1/b/v1"),
        ("http://h:1/v1", "https://h:1/v1", "http://H:1/v1"),
        (f"http://{'a' * 100}:1/v1", f"http://{'b' + 'a' * 99}:1/v1"),
    ],
)
def test_servers_of_one_host_and_port_have_files_of_their_own(engines):
    names = names_of(*engines, "http://other:1/v1")
    assert len(set(names)) == len(engines) + 1
    assert names[-1] == "outputs-other-1.jsonl"
    assert names_of("http://other:1/v1", *reversed(engines)) == names[::-1]


@pytest.mark.parametrize("host", ["[::1]", "a\\b", "a*b", "a|b", "b\u00fccher", "..", "a" * 300])
def test_a_host_is_made_safe_as_a_file_name(host):
    name = names_of("embedded", f"http://{host}:8080/v1")[1]
    assert re.fullmatch(r"outputs-[A-Za-z0-9._-]{5,64}\.jsonl", name)
