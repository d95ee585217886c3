"""Files that appear whole or not at all, also where the disk is full half way."""

import errno
import os
from pathlib import Path

import pytest

from ddtree.bench.report import write_files
from ddtree.bench.whole_files import write_whole
from ddtree.errors import ConfigError


@pytest.fixture
def full_disk(monkeypatch):
    """A disk that takes half of the second file of a process, and no more."""
    write, written = Path.write_bytes, []

    def write_some(path, data):
        written.append(path)
        if len(written) < 2:
            return write(path, data)
        write(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write_some)


def contents_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_replace_those_that_were_there(tmp_path):
    (tmp_path / "a").write_bytes(b"longer than before")
    write_whole({tmp_path / "a": b"new", tmp_path / "b": b""})
    assert contents_of(tmp_path) == {"a": b"new", "b": b""}


def test_a_full_disk_leaves_the_report_as_it_was(tmp_path, full_disk):
    (tmp_path / "index.html").write_text("good")
    (tmp_path / "report.md").write_text("good, too")
    with pytest.raises(ConfigError, match="No space left on device; give another --output"):
        write_files(tmp_path, {"index.html": b"new page", "report.md": b"new text"})
    assert contents_of(tmp_path) == {"index.html": b"good", "report.md": b"good, too"}


def test_a_folder_in_the_place_of_a_file_changes_no_other(tmp_path):
    (tmp_path / "report.md").mkdir()
    (tmp_path / "index.html").write_text("good")
    with pytest.raises(ConfigError, match="it is a folder"):
        write_files(tmp_path, {"index.html": b"new page", "report.md": b"new text"})
    assert (tmp_path / "index.html").read_text() == "good"
    assert {path.name for path in tmp_path.iterdir()} == {"index.html", "report.md"}
