"""`ddtree doctor`: the contract held against an SGLang that is not imported, as a table and as JSON."""

import json
import os
import subprocess
import sys

import pytest

from ddtree.doctor import examine
from ddtree.sglang_plugin import contract
from ddtree.sglang_plugin.contract_rules import called, fields, optional, overridden
from doctor_kit import H200, around, install_plugin, package_files, write

SOURCE = "def call(a, b=1): ...\nclass C:\n    x = 1\n    def f(self, a): ..."
TABLE = (
    *called("sglang.srt.small:call", "a"),
    *fields("sglang.srt.small:C", "x"),
    *overridden("sglang.srt.small:C", "f", "a"),
    *optional("colours", fields("sglang.srt.other:D", "y")),
)
MORE = {"sglang/srt/small.py": SOURCE, "sglang/srt/other.py": "class D:\n    y = 1"}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A tiny SGLang on disk with a table for it, and none on the path; the machine has a GPU."""
    report = contract.make_report
    monkeypatch.setattr(contract, "make_report", lambda *arguments: report(*arguments, TABLE))
    monkeypatch.delenv(contract.ALLOW_UNTESTED, raising=False)
    write(tmp_path, {**package_files("0.5.23"), **MORE})
    (tmp_path / "empty").mkdir()
    see(monkeypatch, tmp_path / "empty")
    return tmp_path


def see(monkeypatch, *entries, environ=None, gpus=(H200,)):
    """Let the doctor look at a path of these folders."""
    found = around(*entries, cwd=entries[0], environ=environ, gpus=gpus)
    monkeypatch.setattr(examine, "Surroundings", lambda: found)


@pytest.fixture
def installed(package, monkeypatch):
    """The same SGLang on the path, and the plugin beside it."""
    install_plugin(package)
    see(monkeypatch, package)
    return package


def contract_line(out):
    """The verdict of the contract, without its level."""
    lines = [line[8:] for line in out.splitlines()]
    return next(
        line for line in lines if " SGLang 0." in line and ("DDTREE fits" in line or "DDTREE does" in line)
    )


def test_an_sglang_that_fits(command, package):
    code, out, err = command("doctor", "--sglang-wheel", str(package))
    assert (code, err) == (0, "")
    assert "        sglang.srt.small  3 ok\n" in out
    assert contract_line(out) == f"DDTREE fits SGLang 0.5.23 ({package / 'sglang'}): 4 ok"
    assert out.splitlines()[-1] == "nothing here stops DDTREE"


def test_an_sglang_that_does_not_fit_is_told_with_every_difference(command, package):
    (package / "sglang/srt/small.py").write_text("def call(a, c): ...\nclass C:\n    x = 1", encoding="utf-8")
    code, out, err = command("doctor", "--sglang-wheel", str(package))
    assert (code, err) == (1, "")
    assert "changed: sglang.srt.small:call (called): expected (a), found (a, c): it also requires c\n" in out
    assert "missing: sglang.srt.small:C.f (overridden): C has no f\n" in out
    assert contract_line(out).startswith("DDTREE does not fit SGLang 0.5.23")
    assert out.splitlines()[-1].startswith("DDTREE will not work here as it is: ")


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
    assert "all symbols fit, but the version is unknown (tested: 0.5.17 to 0.5.23)" in out


def test_json(command, package):
    code, out, _ = command("doctor", "--sglang-wheel", str(package), "--json")
    found = json.loads(out)["sglang"]
    assert (code, found["fits"], found["version"]) == (0, True, "0.5.23")
    assert [row["status"] for row in found["symbols"]] == ["ok"] * 4
    (package / "sglang/srt/small.py").write_text("", encoding="utf-8")
    code, out, _ = command("doctor", "--sglang-wheel", str(package), "--json")
    assert (code, json.loads(out)["sglang"]["fits"]) == (1, False)


def test_without_the_flag_the_sglang_that_would_be_imported_is_read(command, installed):
    before = set(sys.modules)
    code, out, err = command("doctor")
    assert (code, err) == (0, "")
    assert contract_line(out) == f"DDTREE fits SGLang 0.5.23 ({installed / 'sglang'}): 4 ok"
    assert not {name for name in set(sys.modules) - before if name.partition(".")[0] in ("sglang", "torch")}


def test_no_sglang_is_told(command, package):
    code, out, err = command("doctor")
    assert (code, err) == (1, "")
    assert "SGLang is not installed" in out
    code, out, _ = command("doctor", "--json")
    assert (code, json.loads(out)["sglang"]["fits"]) == (1, False)


def test_a_plan_for_another_machine_ends_with_0_without_sglang(command, package, monkeypatch):
    install_plugin(package / "site")
    see(monkeypatch, package / "site", gpus=())
    flags = ("--compute-capability", "12.0", "--gpu-memory-gb", "95")
    code, out, err = command("doctor", *flags)
    assert (code, err) == (0, "")
    assert "  warn  SGLang is not installed in this Python\n" in out
    assert "  ok    the plugin's entry point ddtree is there for SGLang to find\n" in out
    assert "SGLang was not looked at here: " in out.splitlines()[-1]
    code, out, _ = command("doctor", *flags, "--json")
    assert (code, json.loads(out)["fits"], json.loads(out)["sglang"]["fits"]) == (0, True, None)


def test_no_gpu_is_told_and_another_machines_can_be_named(command, installed, monkeypatch):
    see(monkeypatch, installed, gpus=())
    code, out, _ = command("doctor")
    assert code == 1
    assert "  error no CUDA GPU was found\n" in out
    assert command("doctor", "--compute-capability", "12.0")[0] == 0


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


def test_the_settings_of_the_installed_sglang_are_checked(command, installed, monkeypatch):
    see(monkeypatch, installed, environ={"DDTREE_CONFIG": '{"node_budget": 17}'})
    code, out, err = command("doctor")
    assert (code, err) == (0, "")
    assert "  ok    settings: node_budget=17, " in out
    code, out, _ = command("doctor", "--json")
    assert (code, json.loads(out)["settings"]["values"]["node_budget"]) == (0, 17)

    see(monkeypatch, installed, environ={"DDTREE_CONFIG": '{"node_budgets": 17}'})
    code, out, err = command("doctor")
    assert (code, err) == (1, "")
    assert "  error settings are wrong: DDTREE_CONFIG: unknown setting" in out
    code, out, _ = command("doctor", "--json")
    document = json.loads(out)
    assert (code, document["sglang"]["fits"], document["settings"]["fits"]) == (1, True, False)
    code, out, _ = command("doctor", "--sglang-wheel", str(installed), "--json")
    assert code == 0
    assert "settings" not in json.loads(out), "another SGLang has its own settings"


def test_json_has_what_people_are_shown(command, installed):
    code, out, _ = command("doctor", "--json")
    document = json.loads(out)
    assert (code, document["fits"], document["verdict"]) == (0, True, "nothing here stops DDTREE: 1 warning")
    shown = command("doctor")[1]
    for row in document["findings"]:
        assert {"section", "id", "level", "what", "why", "do"} <= set(row)
        assert f"  {row['level']:<6}{row['what']}\n" in shown


def test_flags_make_the_plan(command, installed):
    flags = "--node-budget 63 --max-requests 4 --context 512 --tp 1 --kv-dtype bf16 --mem-fraction 0.5"
    code, out, _ = command("doctor", "--json", *flags.split())
    launch = json.loads(out)["launch"]
    assert code == 0
    assert launch["environ"] == {"DDTREE_CONFIG": '{"node_budget": 63}'}
    assert launch["arguments"][8:] == [
        "--context-length", "512", "--max-running-requests", "4", "--kv-cache-dtype", "bf16",
        "--mem-fraction-static", "0.500",
    ]  # fmt: skip


def test_plans_that_are_not_allowed_are_refused_in_one_line(refused, package):
    assert "--node-budget=0 is not allowed" in refused("doctor", "--node-budget", "0")
    assert "--kv-dtype" in refused("doctor", "--kv-dtype", "nvfp4")
    for flag in (["--model", "x"], ["--tp", "2"], ["--compute-capability", "9.0"]):
        assert "leave out the flags" in refused("doctor", "--sglang-wheel", str(package), *flag)


def test_on_a_terminal_lines_are_folded_and_coloured(command, installed, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    out = command("doctor")[1]
    assert "\x1b[32m  ok    \x1b[0m" in out
    assert "\x1b[1mSettings\x1b[0m" in out
    plain = out.replace("\x1b[32m", "").replace("\x1b[0m", "")
    assert "  ok    settings: node_budget=31, candidate_topk=0, mode=tree,\n        max_accept" in plain


def test_in_a_process_of_its_own_the_path_is_that_of_a_server(tmp_path):
    """From the working directory, as python -m has it; with a torch that cannot be imported."""
    write(tmp_path, package_files("0.5.9"))
    write(tmp_path, {"torch.py": "raise ImportError('broken')"})
    program = (
        "import sys; from ddtree.cli.main import run; code = run(['doctor', '--json']); "
        "loaded = {name.partition('.')[0] for name in sys.modules} & {'sglang', 'torch', 'transformers'}; "
        "sys.exit(90 if loaded else code)"
    )
    source = os.pathsep.join(path for path in sys.path if os.path.isdir(os.path.join(path, "ddtree")))
    environ = {**os.environ, "PYTHONPATH": source}
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert ran.returncode == 1, ran.stderr
    document = json.loads(ran.stdout)
    (first, *_) = document["installation"]["copies"]
    assert (first["folder"], first["version"]) == (str(tmp_path / "sglang"), "0.5.9")
    assert document["environment"]["torch_problem"] == "ImportError: broken"


def test_a_working_directory_that_is_gone(monkeypatch):
    def gone():
        raise FileNotFoundError

    monkeypatch.setattr(os, "getcwd", gone)
    found = examine.Surroundings()
    assert (found.search.cwd, str(found.cwd)) == (None, ".")
