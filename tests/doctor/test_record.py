"""Files of an installed package against RECORD."""

import pytest

from ddtree.doctor import record
from ddtree.doctor.record import check_record
from doctor_kit import install_wheel, write

WORKER = "sglang/srt/speculative/dflash_worker_v2.py"


@pytest.fixture
def wheel(tmp_path):
    """(RECORD, folder) of a whole installation."""
    return install_wheel(tmp_path) / "RECORD", tmp_path


def check(wheel):
    return check_record(*wheel, "sglang")


def test_a_whole_installation(wheel):
    write(wheel[1], {"sglang/__pycache__/junk.txt": "x", "sglang/srt/old.pyc": b"\0"})
    found = check(wheel)
    assert found.is_intact
    assert found.num_checked == 6


def test_changed_missing_and_extra_files_are_named(wheel):
    write(
        wheel[1],
        {WORKER: "class Worker: ...  # patched\n", "sglang/srt/a.py.bak": "", "sglang/srt/own/b.py": ""},
    )
    (wheel[1] / "sglang/srt/__init__.py").unlink()
    found = check(wheel)
    assert found.changed == (WORKER,)
    assert found.missing == ("sglang/srt/__init__.py",)
    assert found.extra == ("sglang/srt/a.py.bak", "sglang/srt/own/b.py")
    assert not found.is_intact


def test_a_file_that_became_a_folder_or_a_link_to_a_device_is_missing(wheel):
    worker = wheel[1] / WORKER
    worker.unlink()
    worker.symlink_to("/dev/zero")
    assert check(wheel).missing == (WORKER,)
    worker.unlink()
    worker.mkdir()
    assert check(wheel).missing == (WORKER,)


def test_rows_without_a_hash_are_looked_for_and_rows_outside_the_package_are_not(wheel):
    rows = f"{WORKER},,\nsglang/no.py,,\nsglang/../../etc/passwd,sha256=x,1\n../../bin/sglang,sha256=x,1\n"
    wheel[0].write_text(rows, encoding="utf-8")
    found = check(wheel)
    assert (found.num_checked, found.changed, found.missing) == (0, (), ("sglang/no.py",))


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_names_that_no_file_can_have_are_missing(wheel, name):
    with wheel[0].open("a", encoding="utf-8") as file:
        file.write(f"sglang/{name},sha256=x,1\n")
    assert check(wheel).missing == (f"sglang/{name}",)


def test_links_in_a_circle_are_survived(wheel):
    (wheel[1] / "sglang/round").symlink_to(wheel[1] / "sglang")
    (wheel[1] / WORKER).unlink()
    (wheel[1] / WORKER).symlink_to(wheel[1] / WORKER)
    assert check(wheel).missing == (WORKER,)


def test_files_that_cannot_be_read_are_named_apart(wheel, monkeypatch):
    read = record.digest_of

    def refuse(path, algorithm):
        if path.name == "dflash_worker_v2.py":
            raise PermissionError(13, "Permission denied")
        return read(path, algorithm)

    monkeypatch.setattr(record, "digest_of", refuse)
    found = check(wheel)
    assert (found.unreadable, found.changed, found.is_intact) == ((WORKER,), (), False)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (bytes(range(256)) * 40, "cannot be read"),
        (b"", "names no file of sglang"),
        (b"other/file.py,sha256=x,3\n", "names no file of sglang"),
        (b'sglang/a.py,"sha256=x\n', "cannot be read"),
        (b"sglang/a.py\nsglang/b.py,x\n", "names no file of sglang"),
    ],
)
def test_junk_in_place_of_record(wheel, content, problem):
    wheel[0].write_bytes(content)
    found = check(wheel)
    assert problem in found.problem
    assert not found.is_intact


def test_a_huge_record_is_not_read(wheel):
    with wheel[0].open("wb") as file:
        file.truncate(1 << 34)
    assert "17179869184 bytes" in check(wheel).problem


def test_a_record_that_is_not_there(wheel):
    wheel[0].unlink()
    assert "No such file" in check(wheel).problem
