"""Findings on the SGLang that would be imported, on fake installations."""

import json
from importlib.machinery import PathFinder

import pytest

from ddtree.doctor import installation, record
from ddtree.doctor.copies import Kind
from ddtree.doctor.installation import installation_section
from ddtree.doctor.report import Level
from doctor_kit import (
    PATCHED,
    EditableFinder,
    by_id,
    ids,
    install_editable,
    install_plugin,
    install_wheel,
    package_files,
    search,
    users_layout,
    write,
)


def look(*entries, environ=None, **options):
    section, copy = installation_section(search(*entries, **options), environ or {})
    assert all(f.why and f.todo for f in section.findings if f.level is not Level.OK)
    json.dumps(section.data)
    return section, copy


def test_an_installed_release_as_it_was_published(tmp_path):
    install_wheel(tmp_path)
    install_plugin(tmp_path)
    section, copy = look(tmp_path)
    assert {f.level for f in section.findings} == {Level.OK}
    assert ids(section) == ["installation.winner", "installation.record", "installation.plugin"]
    assert section.findings[0].what == f"SGLang 0.5.23 in {tmp_path / 'sglang'} (wheel)"
    assert copy.kind is Kind.WHEEL


def test_no_sglang(tmp_path):
    section, copy = look(tmp_path)
    assert ids(section, Level.ERROR) == ["installation.missing", "installation.plugin"]
    assert copy is None


def test_the_users_layout_source_tree_first(tmp_path):
    source, site = users_layout(tmp_path)
    section, copy = look(source, site)
    assert (copy.folder, copy.kind) == (source / "sglang", Kind.SOURCE)
    assert ids(section, Level.WARN) == ["installation.source", "installation.other"]
    (other,) = by_id(section.findings, "installation.other")
    assert "SGLang 0.5.13" in other.what
    assert str(site / "sglang") in other.what


def test_the_users_layout_without_the_source_tree(tmp_path):
    _, site = users_layout(tmp_path)
    section, _ = look(site)
    (changed,) = by_id(section.findings, "installation.changed")
    (extra,) = by_id(section.findings, "installation.extra")
    assert (changed.names, changed.what) == (PATCHED, "3 files differ from the wheel's")
    assert extra.names == tuple(f"{name}.bak" for name in PATCHED[1:])
    assert "sglang==0.5.13 puts the wheel's files back" in changed.todo
    assert section.data["record"]["changed"] == list(PATCHED)


def test_files_of_the_wheel_that_are_not_there_are_an_error(tmp_path):
    install_wheel(tmp_path)
    (tmp_path / "sglang/srt/speculative/dflash_worker_v2.py").unlink()
    (absent,) = by_id(look(tmp_path)[0].findings, "installation.absent")
    assert absent.level is Level.ERROR
    assert absent.what == "1 file is missing that the wheel has"


def test_a_record_of_junk_is_told(tmp_path):
    (install_wheel(tmp_path) / "RECORD").write_bytes(b"\0\xff")
    (found,) = by_id(look(tmp_path)[0].findings, "installation.record")
    assert found.level is Level.WARN
    assert "cannot be read" in found.what


def test_two_wheels(tmp_path):
    for name, version in (("a", "0.5.17"), ("b", "0.5.23")):
        install_wheel(tmp_path / name, version)
    section, copy = look(tmp_path / "a", tmp_path / "b")
    (other,) = by_id(section.findings, "installation.other")
    assert copy.version == "0.5.17"
    assert "0.5.23" in other.what


def test_an_editable_install_with_another_version_than_its_files(tmp_path):
    source, site = tmp_path / "clone/python", tmp_path / "site"
    write(source, package_files("0.5.20"))
    install_editable(site, tmp_path / "clone", "0.5.12")
    section, _ = look(site, source)
    assert ids(section, Level.WARN) == ["installation.version", "installation.source"]
    assert section.findings[2].what == "it is no installed release but an editable install"


def test_two_distributions_of_a_half_done_upgrade(tmp_path):
    install_wheel(tmp_path, "0.5.17")
    install_wheel(tmp_path, "0.5.23")
    assert by_id(look(tmp_path)[0].findings, "installation.distributions")


def test_a_folder_of_that_name_without_code_in_it(tmp_path):
    write(
        tmp_path / "home", {f"sglang/python/{name}": text for name, text in package_files("0.5.20").items()}
    )
    section, copy = look(tmp_path / "site", cwd=tmp_path / "home")
    (trap,) = by_id(section.findings, "installation.namespace")
    assert (copy, trap.level) == (None, Level.ERROR)
    assert f"whose package is {tmp_path / 'home/sglang/python/sglang'}" in trap.what


def test_the_trap_names_what_it_hides(tmp_path):
    (tmp_path / "home/sglang").mkdir(parents=True)
    write(tmp_path / "clone", package_files("0.5.20"))
    finders = (PathFinder, EditableFinder(tmp_path / "clone"))
    (trap,) = by_id(look(tmp_path / "home", finders=finders)[0].findings, "installation.namespace")
    assert "it hides SGLang 0.5.20" in trap.what


def test_a_folder_of_that_name_behind_a_package_is_harmless(tmp_path):
    (tmp_path / "home/sglang").mkdir(parents=True)
    install_wheel(tmp_path / "site")
    section, copy = look(tmp_path / "home", tmp_path / "site")
    (found,) = by_id(section.findings, "installation.namespace")
    assert (found.level, copy.version) == (Level.OK, "0.5.23")


def test_a_folder_of_that_name_that_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "sglang").mkdir()
    monkeypatch.setattr(installation.os, "access", lambda *_: False)
    (trap,) = by_id(look(tmp_path)[0].findings, "installation.namespace")
    assert "cannot be read by this user, and Python takes it" in trap.what


def test_files_that_cannot_be_read_are_an_error(tmp_path, monkeypatch):
    install_wheel(tmp_path)

    def refuse(path, algorithm):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(record, "digest_of", refuse)
    section, _ = look(tmp_path)
    (found,) = by_id(section.findings, "installation.unreadable")
    assert (found.level, len(found.names)) == (Level.ERROR, 6)
    assert section.data["record"]["unreadable"] == list(found.names)


def test_a_checkout_whose_state_git_does_not_tell(tmp_path):
    write(tmp_path, package_files("0.5.20"))
    (tmp_path / ".git").write_text("gitdir: /no/such/folder", encoding="utf-8")
    section, copy = look(tmp_path)
    (found,) = by_id(section.findings, "installation.git")
    assert found.what.startswith("git does not tell all of its state: ")
    assert copy.to_json()["git"]["problem"]


def test_a_package_that_is_a_link_is_told_with_its_place(tmp_path):
    write(tmp_path / "clone", package_files("0.5.20"))
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sglang").symlink_to(tmp_path / "clone/sglang")
    assert f"a link to {tmp_path / 'clone/sglang'}" in look(tmp_path / "site")[0].findings[0].what


def test_a_copy_in_the_working_directory_that_is_on_the_path_too(tmp_path):
    write(tmp_path, package_files("0.5.9"))
    assert by_id(look(tmp_path, cwd=tmp_path)[0].findings, "installation.cwd") == []


def test_a_copy_in_the_working_directory(tmp_path):
    write(tmp_path / "here", package_files("0.5.9"))
    install_wheel(tmp_path / "site")
    section, copy = look(tmp_path / "site", cwd=tmp_path / "here")
    (found,) = by_id(section.findings, "installation.cwd")
    assert copy.version == "0.5.9"
    assert "sglang serve takes: SGLang 0.5.23" in found.why


def test_a_single_file_in_the_way(tmp_path):
    (tmp_path / "sglang.py").write_text("", encoding="utf-8")
    section, copy = look(tmp_path)
    assert ids(section, Level.ERROR) == ["installation.module", "installation.plugin"]
    assert copy is None


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({}, Level.OK),
        ({"SGLANG_PLUGINS": ""}, Level.OK),
        ({"SGLANG_PLUGINS": "other, ddtree"}, Level.OK),
        ({"SGLANG_PLUGINS": "other"}, Level.ERROR),
    ],
)
def test_plugins_that_sglang_is_told_to_load(tmp_path, environ, level):
    install_plugin(tmp_path)
    assert by_id(look(tmp_path, environ=environ)[0].findings, "installation.plugin")[0].level is level
