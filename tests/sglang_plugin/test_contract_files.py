"""What is wrong with a wheel or folder is one error that names the file; only absence is a missing module."""

import errno
import os
import zipfile
from pathlib import Path

import pytest

from ddtree.errors import ConfigError
from ddtree.sglang_plugin.contract_ast import SymbolMissing
from ddtree.sglang_plugin.contract_files import newest_metadata
from ddtree.sglang_plugin.contract_source import open_source

MEMBER = "sglang/srt/small.py"
FILES = {
    "sglang/__init__.py": b"",
    MEMBER: b"def f(a): ...\n" * 200,
    "sglang-0.5.20.dist-info/METADATA": b"Name: sglang\nVersion: 0.5.20\n",
}


@pytest.fixture
def folder(tmp_path):
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return tmp_path


def make_wheel(path, files=FILES, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def patched(path, offset, data):
    """The wheel with bytes of MEMBER's data (offset from its start) replaced."""
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo(MEMBER).header_offset + 30 + len(MEMBER) + offset
    content = bytearray(path.read_bytes())
    content[start : start + len(data)] = data
    path.write_bytes(content)


def directory_patched(path, offset, data):
    """The wheel with bytes of MEMBER's entry in the central directory replaced."""
    content = bytearray(path.read_bytes())
    start = content.rindex(MEMBER.encode()) - 46 + offset
    content[start : start + len(data)] = data
    path.write_bytes(content)


DAMAGES = {
    "zlib.error": (zipfile.ZIP_DEFLATED, patched, 0, b"\xff" * 8),
    "BadZipFile, checksum": (zipfile.ZIP_STORED, patched, 0, b"DEF"),
    "BadZipFile, header": (zipfile.ZIP_STORED, patched, -30 - len(MEMBER), b"XX"),
    "NotImplementedError": (zipfile.ZIP_STORED, directory_patched, 10, b"\x63\x00"),
    "RuntimeError, encrypted": (zipfile.ZIP_STORED, directory_patched, 8, b"\x01\x00"),
    "EOFError": (zipfile.ZIP_STORED, directory_patched, 20, b"\xff\xff\xff\x7f\xff\xff\xff\x7f"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_member_of_a_wheel_is_named(tmp_path, kind):
    compression, change, offset, data = DAMAGES[kind]
    wheel = make_wheel(tmp_path / "a.whl", compression=compression)
    assert open_source(wheel).find("sglang.srt.small:f").parameters == ("a",)
    change(wheel, offset, data)
    with pytest.raises(ConfigError, match=f"is damaged: its member {MEMBER} cannot be read: .") as caught:
        open_source(wheel).find("sglang.srt.small:f")
    assert str(wheel) in str(caught.value)


def test_a_wheel_that_was_cut_off_may_be_an_incomplete_download(tmp_path):
    wheel = make_wheel(tmp_path / "a.whl")
    for kept in (len(wheel.read_bytes()) // 2, 0):
        wheel.write_bytes(wheel.read_bytes()[:kept])
        with pytest.raises(ConfigError, match=r"as a wheel: .* \(an incomplete download\?\); give"):
            open_source(wheel)
    wheel.write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="as a wheel: File is not a zip file; give"):
        open_source(wheel)


@pytest.mark.parametrize("name", ["sglang/__init__.py", MEMBER, "sglang-0.5.20.dist-info/METADATA"])
def test_a_file_that_is_no_utf_8_is_named(folder, tmp_path, name):
    files = {**FILES, name: b"# caf\xe9\n"}
    (folder / name).write_bytes(files[name])

    def look(path):
        source = open_source(path)
        source.version()
        source.find("sglang")
        source.find("sglang.srt.small")

    for path in (folder, make_wheel(tmp_path / "a.whl", files)):
        with pytest.raises(ConfigError, match="is no UTF-8 text") as caught:
            look(path)
        assert name in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_the_text(folder):
    (folder / MEMBER).write_bytes(b"\xef\xbb\xbfdef f(a): ...")
    assert open_source(folder).find("sglang.srt.small:f").parameters == ("a",)


def refusing(monkeypatch, method, path, code):
    """Let one method of `Path` fail for one path, as the system would for another user."""
    real = getattr(Path, method)

    def call(self, *arguments, **options):
        if self == path:
            raise OSError(code, os.strerror(code), str(self))
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, method, call)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.EISDIR])
def test_a_file_that_cannot_be_read_is_no_missing_module(folder, monkeypatch, code):
    refusing(monkeypatch, "read_bytes", folder / MEMBER, code)
    with pytest.raises(ConfigError, match=os.strerror(code)) as caught:
        open_source(folder).find("sglang.srt.small:f")
    assert str(folder / MEMBER) in str(caught.value)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENOTDIR])
def test_a_file_that_is_not_there_is_a_missing_module(folder, monkeypatch, code):
    refusing(monkeypatch, "read_bytes", folder / MEMBER, code)
    with pytest.raises(SymbolMissing, match=r"no module sglang\.srt\.small"):
        open_source(folder).find("sglang.srt.small:f")


@pytest.mark.parametrize("place", ["", "sglang/srt"])
def test_a_folder_that_cannot_be_entered_is_named(folder, monkeypatch, place):
    refusing(monkeypatch, "stat", folder / place, errno.EACCES)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied") as caught:
        open_source(folder)
    assert str(folder / place) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = " + "-" * 20000 + "1", "nested too deeply|no Python source"),
        ("x = " + "(" * 20000 + ")" * 20000, "nested too deeply|no Python source"),
        ("x = 1\0", "no Python source"),
        ("def broken(:", "no Python source"),
    ],
)
def test_source_that_cannot_be_parsed_is_named(folder, text, told):
    (folder / MEMBER).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=told) as caught:
        open_source(folder).find("sglang.srt.small:f")
    assert MEMBER in str(caught.value)


def test_a_very_long_line_of_bases_is_refused(folder):
    classes = "class C0: ...\n" + "".join(f"class C{n}(C{n - 1}): ...\n" for n in range(1, 3000))
    (folder / MEMBER).write_text(classes, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"C2999\.f is nested too deeply"):
        open_source(folder).find("sglang.srt.small:C2999.f")


def test_where_the_package_lies_is_told(folder, monkeypatch):
    (folder / "python/sglang/srt").mkdir(parents=True)
    assert open_source(folder).files.where == str(folder / "sglang")
    assert open_source(folder / "python").files.where == str(folder / "python/sglang")
    monkeypatch.chdir(folder / "sglang")
    assert open_source(Path()).files.where == str(folder / "sglang")


def test_the_newest_of_many_distributions_counts(folder, tmp_path):
    name = "sglang-0.5.9.dist-info/METADATA"
    files = {**FILES, name: b"Version: 0.5.9\n"}
    (folder / name).parent.mkdir()
    (folder / name).write_bytes(files[name])
    assert open_source(folder).version() == "0.5.20"
    assert open_source(make_wheel(tmp_path / "a.whl", files)).version() == "0.5.20"
    assert newest_metadata([]) is None
