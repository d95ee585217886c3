"""`ddtree doctor`: the contract held against an SGLang that is not imported, as a table and as JSON."""

import importlib.machinery
import json
import os
import sys

import pytest

from ddtree.sglang_plugin import contract, contract_source
from ddtree.sglang_plugin.contract_rules import called, fields, optional, overridden

SOURCE = "def call(a, b=1): ...\nclass C:\n    x = 1\n    def f(self, a): ..."
TABLE = (
    *called("sglang.srt.small:call", "a"),
    *fields("sglang.srt.small:C", "x"),
    *overridden("sglang.srt.small:C", "f", "a"),
    *optional("colours", fields("sglang.srt.other:D", "y")),
)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A tiny SGLang on disk with a table for it, and none installed."""
    report = contract.make_report
    monkeypatch.setattr(contract, "make_report", lambda *arguments: report(*arguments, TABLE))
    monkeypatch.setattr(contract_source, "find_spec", lambda name: None)
    monkeypatch.delenv(contract.ALLOW_UNTESTED, raising=False)
    monkeypatch.delenv("DDTREE_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "sglang/__init__.py": "raise RuntimeError('imported')",
        "sglang/_version.py": "__version__ = '0.5.23'",
        "sglang/srt/__init__.py": "",
        "sglang/srt/small.py": SOURCE,
        "sglang/srt/other.py": "class D:\n    y = 1",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def test_an_sglang_that_fits(command, package):
    code, out, err = command("doctor", "--sglang-wheel", str(package))
    assert (code, err) == (0, "")
    assert "sglang.srt.small" in out
    assert out.splitlines()[-1] == f"DDTREE fits SGLang 0.5.23 ({package / 'sglang'}): 4 ok"


def test_an_sglang_that_does_not_fit_is_told_with_every_difference(command, package):
    (package / "sglang/srt/small.py").write_text("def call(a, c): ...\nclass C:\n    x = 1", encoding="utf-8")
    code, out, err = command("doctor", "--sglang-wheel", str(package))
    assert (code, err) == (1, "")
    assert "changed: sglang.srt.small:call (called): expected (a), found (a, c): it also requires c\n" in out
    assert "missing: sglang.srt.small:C.f (overridden): C has no f\n" in out
    assert out.splitlines()[-1].startswith("DDTREE does not fit SGLang 0.5.23")


def test_what_is_only_lost_does_not_end_with_1(command, package):
    (package / "sglang/srt/other.py").write_text("", encoding="utf-8")
    code, out, _ = command("doctor", "--sglang-wheel", str(package))
    assert code == 0
    assert "optional missing: sglang.srt.other:D.y (field)" in out
    assert "without it: colours" in out


def test_an_untested_version_does_not_fit(command, package, monkeypatch):
    (package / "sglang/_version.py").write_text("__version__ = '0.6.0'", encoding="utf-8")
    code, out, _ = command("doctor", "--sglang-wheel", str(package))
    assert code == 1
    assert f"sglang 0.6.0 is outside of the tested versions {contract.FIRST_TESTED}" in out
    monkeypatch.setenv(contract.ALLOW_UNTESTED, "1")
    assert command("doctor", "--sglang-wheel", str(package))[0] == 0
    (package / "sglang/_version.py").unlink()
    monkeypatch.delenv(contract.ALLOW_UNTESTED)
    code, out, _ = command("doctor", "--sglang-wheel", str(package))
    assert code == 1
    assert "all symbols fit, but the version is unknown (tested: 0.5.17 to 0.5.23)" in out.splitlines()[-1]


def test_json(command, package):
    code, out, _ = command("doctor", "--sglang-wheel", str(package), "--json")
    found = json.loads(out)["sglang"]
    assert (code, found["fits"], found["version"]) == (0, True, "0.5.23")
    assert [row["status"] for row in found["symbols"]] == ["ok"] * 4
    (package / "sglang/srt/small.py").write_text("", encoding="utf-8")
    code, out, _ = command("doctor", "--sglang-wheel", str(package), "--json")
    assert (code, json.loads(out)["sglang"]["fits"]) == (1, False)


def test_without_the_flag_the_installed_sglang_is_read_and_not_imported(command, package, monkeypatch):
    spec = importlib.machinery.PathFinder.find_spec("sglang", [str(package)])
    monkeypatch.setattr(contract_source, "find_spec", lambda name: spec)
    before = set(sys.modules)
    code, out, _ = command("doctor")
    assert (code, out.splitlines()[-2]) == (
        0, f"DDTREE fits SGLang 0.5.23 ({package / 'sglang'}): 4 ok",
    )  # fmt: skip
    assert not {name for name in set(sys.modules) - before if name.partition(".")[0] == "sglang"}


def test_no_sglang_is_told(command, package):
    code, out, err = command("doctor")
    assert (code, err) == (1, "")
    assert "SGLang is not installed" in out
    code, out, _ = command("doctor", "--json")
    assert (code, json.loads(out)["sglang"]["fits"]) == (1, False)


def test_a_path_that_is_no_sglang_is_refused(refused, package):
    assert "does not exist" in refused("doctor", "--sglang-wheel", str(package / "nothing"))
    assert "no SGLang was found" in refused("doctor", "--sglang-wheel", str(package / "sglang" / "srt"))
    (package / "sglang/srt/small.py").write_text("def broken(:", encoding="utf-8")
    assert "no Python source" in refused("doctor", "--sglang-wheel", str(package))


def test_paths_that_cannot_be_looked_at_are_refused_in_one_line(refused, package):
    assert "--sglang-wheel is empty" in refused("doctor", "--sglang-wheel", "")
    assert "neither a file nor a folder" in refused("doctor", "--sglang-wheel", os.devnull)
    assert "too long" in refused("doctor", "--sglang-wheel", "x" * 5000)
    assert "no-such-user-here" in refused("doctor", "--sglang-wheel", "~no-such-user-here/x")


def test_a_mistake_is_json_too_where_json_is_asked_for(command, package):
    code, out, err = command("doctor", "--sglang-wheel", str(package / "nothing"), "--json")
    message = json.loads(out)["error"]
    assert (code, err) == (2, f"Error: {message}\n")
    assert "does not exist" in message


def test_the_settings_of_the_installed_sglang_are_checked(command, package, monkeypatch):
    spec = importlib.machinery.PathFinder.find_spec("sglang", [str(package)])
    monkeypatch.setattr(contract_source, "find_spec", lambda name: spec)
    monkeypatch.setenv("DDTREE_CONFIG", '{"node_budget": 17}')
    code, out, err = command("doctor")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("settings: node_budget=17, ")
    code, out, _ = command("doctor", "--json")
    assert (code, json.loads(out)["settings"]["values"]["node_budget"]) == (0, 17)

    monkeypatch.setenv("DDTREE_CONFIG", '{"node_budgets": 17}')
    code, out, err = command("doctor")
    assert (code, err) == (1, "")
    assert out.splitlines()[-1].startswith("settings are wrong: DDTREE_CONFIG: unknown setting")
    code, out, _ = command("doctor", "--json")
    document = json.loads(out)
    assert (code, document["sglang"]["fits"], document["settings"]["fits"]) == (1, True, False)
    code, out, _ = command("doctor", "--sglang-wheel", str(package), "--json")
    assert (code, list(json.loads(out))) == (0, ["sglang"]), "another SGLang has its own settings"
