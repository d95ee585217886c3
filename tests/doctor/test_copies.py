"""Which SGLang would be imported, by the import system's rules and without importing."""

import importlib.machinery
import shutil
import subprocess
import sys

import pytest

from ddtree.doctor import copies
from ddtree.doctor.checkout import changed, find_checkout
from ddtree.doctor.copies import Kind, entry_points_of, files_version, find_copies, server_path
from doctor_kit import (
    EditableFinder,
    install_editable,
    install_plugin,
    install_wheel,
    package_files,
    search,
    write,
    write_dist,
)

PATH = importlib.machinery.PathFinder
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def test_a_wheel(tmp_path):
    record = install_wheel(tmp_path) / "RECORD"
    (copy,) = find_copies(search(tmp_path))
    assert (copy.folder, copy.found_by, copy.kind) == (tmp_path / "sglang", str(tmp_path), Kind.WHEEL)
    assert (copy.version, copy.installed_version, copy.record) == ("0.5.23", "0.5.23", record)
    assert copy.is_importable
    assert not {name for name in sys.modules if name.partition(".")[0] == "sglang"}


def test_nothing_is_found(tmp_path):
    assert find_copies(search(tmp_path, tmp_path / "nowhere")) == []


def test_of_two_copies_the_first_on_the_path_wins(tmp_path):
    for name, version in (("a", "0.5.17"), ("b", "0.5.23")):
        install_wheel(tmp_path / name, version)
    for names in (["a", "b"], ["b", "a"]):
        found = find_copies(search(*(tmp_path / name for name in names)))
        assert [copy.folder.parent.name for copy in found] == names
    assert len(find_copies(search(tmp_path / "a", tmp_path / "a"))) == 1


def test_two_entries_that_lead_to_one_folder_are_one_copy(tmp_path):
    """As lib64 and lib of a virtual environment, which are both on its path."""
    install_wheel(tmp_path / "lib")
    (tmp_path / "lib64").symlink_to(tmp_path / "lib")
    for entries in (["lib64", "lib"], ["lib", "lib64", "lib/", "lib64/../lib"]):
        (copy,) = find_copies(search(*(f"{tmp_path}/{entry}" for entry in entries)))
        assert (copy.kind, copy.folder, copy.num_distributions) == (
            Kind.WHEEL, tmp_path / entries[0] / "sglang", 1,
        )  # fmt: skip


def test_a_source_tree_and_a_folder_that_no_installer_knows(tmp_path):
    write(tmp_path / "python", package_files(None))
    (copy,) = find_copies(search(tmp_path / "python"))
    assert (copy.kind, copy.version, copy.told_version) == (Kind.FOLDER, None, "of unknown version")
    write(tmp_path / "python", {"pyproject.toml": ""})
    assert find_copies(search(tmp_path / "python"))[0].kind is Kind.SOURCE


def test_the_version_file_of_old_releases(tmp_path):
    write(tmp_path, {"version.py": "__version__ = '0.5.2'\n"})
    assert files_version(tmp_path) == "0.5.2"
    write(tmp_path, {"_version.py": "__version__ = '0.5.9'\n"})
    assert files_version(tmp_path) == "0.5.9"


def test_an_editable_install_by_path_file(tmp_path):
    source, site = tmp_path / "clone/python", tmp_path / "site"
    write(source, package_files("0.5.20"))
    install_editable(site, tmp_path / "clone", "0.5.19")
    (copy,) = find_copies(search(site, source))
    assert (copy.kind, copy.version, copy.installed_version) == (Kind.EDITABLE, "0.5.20", "0.5.19")


def test_an_editable_install_by_import_hook(tmp_path):
    source, site = tmp_path / "clone/python", tmp_path / "site"
    write(source, package_files("0.5.20"))
    install_editable(site, tmp_path / "clone")
    finders = (PATH, EditableFinder(source))
    (copy,) = find_copies(search(site, finders=finders))
    assert (copy.kind, copy.folder) == (Kind.EDITABLE, source / "sglang")
    assert copy.found_by == "the import hook doctor_kit.EditableFinder"


def test_a_folder_of_that_name_hides_an_import_hook_but_no_package(tmp_path):
    """Python's own finder is asked first, and takes a folder without __init__.py where nothing is better."""
    (tmp_path / "home/sglang").mkdir(parents=True)
    source = tmp_path / "clone/python"
    write(source, package_files("0.5.20"))
    hook = search(tmp_path / "home", finders=(PATH, EditableFinder(source)))
    assert [copy.kind for copy in find_copies(hook)] == [Kind.NAMESPACE, Kind.FOLDER]
    assert [copy.kind for copy in find_copies(search(tmp_path / "home", source))] == [
        Kind.FOLDER, Kind.NAMESPACE,
    ]  # fmt: skip


def test_a_finder_that_fails_does_not_hide_the_others(tmp_path):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            raise RuntimeError("broken hook")

    install_wheel(tmp_path)
    assert len(find_copies(search(tmp_path, finders=(Broken(), object(), PATH)))) == 1


def test_a_single_file_and_an_archive(tmp_path):
    (tmp_path / "sglang.py").write_text("", encoding="utf-8")
    (copy,) = find_copies(search(tmp_path))
    assert (copy.kind, copy.is_importable) == (Kind.MODULE, False)
    write(tmp_path / "in", package_files("0.5.23"))
    archive = shutil.make_archive(str(tmp_path / "all"), "zip", tmp_path / "in")
    (copy,) = find_copies(search(archive))
    assert (copy.kind, copy.is_importable) == (Kind.ARCHIVE, False)


@pytest.mark.parametrize("content", [b"\0\xff" * 100, b"", b"__version__ = 5", b"[" * 100_000])
def test_a_version_file_of_junk_names_no_version(tmp_path, content):
    write(tmp_path, {"_version.py": content})
    assert files_version(tmp_path) is None


@pytest.mark.parametrize(
    "text",
    [
        "__version__ = version = '0.5.23'",
        '__version__: str\n__version__ = "0.5.23"',
        "__version__='0.5.23'\n",
    ],
)
def test_version_files_of_several_kinds(tmp_path, text):
    write(tmp_path, {"_version.py": text})
    assert files_version(tmp_path) == "0.5.23"


def test_broken_distributions_are_survived(tmp_path):
    install_wheel(tmp_path)
    write_dist(tmp_path, "0.5.17", **{"METADATA": b"\xff\xfe\0", "direct_url.json": b"\0[", "RECORD": b"\0"})
    write_dist(tmp_path, "0.5.18", **{"direct_url.json": '{"url": 5, "dir_info": {"editable": true}}'})
    write_dist(tmp_path, "9", name="other", **{"entry_points.txt": "no section = [[["})
    (tmp_path / "sglang-0.5.19.dist-info").mkdir()
    install_plugin(tmp_path)
    (copy,) = find_copies(search(tmp_path))
    assert (copy.kind, copy.installed_version) == (Kind.WHEEL, "0.5.23")
    assert "ddtree" in entry_points_of(search(tmp_path), "sglang.srt.plugins")


def test_two_distributions_beside_one_package(tmp_path):
    install_wheel(tmp_path, "0.5.17")
    install_wheel(tmp_path, "0.5.23")
    (copy,) = find_copies(search(tmp_path))
    assert copy.num_distributions == 2


def test_the_path_that_a_server_has(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/venv/bin", "/one", "/two"])
    found = server_path()
    assert (found.entries, found.cwd) == ((str(tmp_path), "/one", "/two"), str(tmp_path))

    class SafePath:
        safe_path = True

    monkeypatch.setattr(copies.sys, "flags", SafePath)
    assert server_path().entries == ("/venv/bin", "/one", "/two")


def test_entries_that_python_passes_over(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/venv/bin", "", "a\0b", tmp_path, "relative", "/one"])
    assert server_path().entries == (str(tmp_path), "", "relative", "/one")
    assert find_copies(server_path()) == []

    def gone():
        raise FileNotFoundError

    monkeypatch.setattr(copies.os, "getcwd", gone)
    assert (server_path().entries, server_path().cwd) == (("/one",), None)


def test_the_working_directory_by_another_name_is_on_the_path_too(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    assert search(cwd=tmp_path).is_only_cwd(str(tmp_path))
    assert not search(tmp_path / "link", cwd=tmp_path).is_only_cwd(str(tmp_path))
    assert not search(tmp_path).is_only_cwd(str(tmp_path))


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A git checkout with one commit; returns its folder."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    write(tmp_path, package_files(None))
    write(tmp_path, {"README.md": "x"})
    for command in (
        ["init", "--quiet", "--initial-branch=main"], ["add", "."],
        ["-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "--message=one"],
    ):  # fmt: skip
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True, capture_output=True)
    return tmp_path


@needs_git
def test_a_checkout_with_its_commit_and_changed_files(checkout):
    folder = checkout / "sglang"
    clean = find_checkout(folder)
    assert (len(clean.commit), clean.branch, clean.dirty, clean.root) == (40, "main", (), str(checkout))
    write(checkout, {"README.md": "y", "sglang/srt/__init__.py": "# changed", "sglang/new.py": ""})
    assert sorted(find_checkout(folder).dirty) == ["sglang/new.py", "sglang/srt/__init__.py"]
    assert find_copies(search(checkout))[0].kind is Kind.SOURCE


@needs_git
def test_a_package_that_is_a_link_into_a_checkout(checkout, tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    (site / "sglang").symlink_to(checkout / "sglang")
    (copy,) = find_copies(search(site))
    assert (copy.kind, copy.checkout.root) == (Kind.SOURCE, str(checkout))
    assert copy.checkout.commit == find_checkout(checkout / "sglang").commit


@needs_git
def test_a_detached_head_has_a_commit_and_no_branch(checkout):
    subprocess.run(["git", "-C", str(checkout), "checkout", "--quiet", "--detach"], check=True)
    found = find_checkout(checkout / "sglang")
    assert (len(found.commit), found.branch, found.problem) == (40, "", "")


@needs_git
def test_variables_that_name_another_repository_are_not_followed(checkout, monkeypatch, tmp_path_factory):
    wanted = find_checkout(checkout / "sglang").commit
    monkeypatch.setenv("GIT_DIR", str(tmp_path_factory.mktemp("other") / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", "/")
    assert find_checkout(checkout / "sglang").commit == wanted


@needs_git
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda git: (git / "HEAD").write_bytes(b"\0\xff"), "not a git repository"),
        (lambda git: (git / "index").write_bytes(b"\0\xff"), "index"),
        (lambda git: (git / "HEAD").write_text("ref: refs/heads/none\n"), "ambiguous argument 'HEAD'"),
    ],
)
def test_what_git_does_not_tell_is_told_with_its_reason(checkout, change, problem):
    change(checkout / ".git")
    assert problem in find_checkout(checkout / "sglang").problem


def test_no_git(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    found = find_checkout(tmp_path)
    assert (found.commit, found.problem) == (None, "the program cannot be run: No such file or directory")


@needs_git
def test_a_checkouts_own_settings_run_no_program(checkout):
    trap = checkout / "trap"
    subprocess.run(
        ["git", "-C", str(checkout), "config", "core.fsmonitor", f"touch {trap}; false"], check=True
    )
    assert find_checkout(checkout / "sglang").commit
    assert not trap.exists()


def test_a_broken_checkout(tmp_path):
    (tmp_path / ".git").write_text("gitdir: /no/such/folder", encoding="utf-8")
    found = find_checkout(tmp_path / "sglang")
    assert (found.root, found.commit, found.dirty) == (str(tmp_path), None, ())


def test_paths_of_git_status():
    assert changed(" M a.py\0R  new.py\0old.py\0?? b c.txt\0") == ("a.py", "new.py", "b c.txt")
    assert changed("") == ()
