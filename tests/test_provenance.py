"""The record of a run names what can be repeated, and nobody."""

import getpass
import json
import platform
import subprocess
import sys

import pytest

from ddtree import provenance


def test_record_is_json_with_versions_and_machine():
    record = json.loads(json.dumps(provenance.provenance()))
    assert set(record) == {"time_utc", "command", "ddtree", "python", "packages", "machine"}
    assert set(record["packages"]) == set(provenance.PACKAGES)
    assert record["machine"]["cores"] >= 1
    assert record["machine"]["memory_bytes"] > 1 << 28


def test_record_names_neither_host_nor_working_directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bench.py"), "--out", str(tmp_path / "a b.json")])
    record = provenance.provenance()
    assert record["command"] == "bench.py --out 'a b.json'"
    text = json.dumps({key: value for key, value in record.items() if key != "time_utc"})
    assert f'"{platform.node()}"' not in text
    assert f"/{getpass.getuser()}/" not in text


def test_package_that_is_missing_has_no_version():
    assert provenance.package_version("no-such-distribution") is None


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """A git checkout of a package, one commit old."""
    source = tmp_path / "src" / "package"
    source.mkdir(parents=True)
    (source / "a.py").write_text("a = 1\n")
    monkeypatch.setattr(provenance, "SOURCE", source)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return source


def test_commit_and_changes_are_named(checkout):
    state = provenance.source_state()
    assert len(state["commit"]) == 40
    assert state["modified"] is False
    (checkout / "a.py").write_text("a = 2\n")
    assert provenance.source_state()["modified"] is True


def test_no_commit_outside_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "SOURCE", tmp_path / "lib" / "package")
    assert provenance.source_state() == {"commit": None, "modified": None}
