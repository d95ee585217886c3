"""The whole examination on fake installations: contract, DFLASH, settings, memory, flags and the verdict."""

import json
import subprocess
import sys

import pytest

from ddtree.doctor.contract_check import dflash_section
from ddtree.doctor.examine import examine, examine_source
from ddtree.doctor.plan import Plan
from ddtree.doctor.report import Level, Report
from ddtree.doctor.text import report_lines
from ddtree.errors import ConfigError
from doctor_kit import (
    QWEN3_8B,
    QWEN3_8B_DFLASH,
    RTX_PRO_6000,
    around,
    by_id,
    install_plugin,
    install_wheel,
    package_files,
    users_layout,
    write,
    write_model,
)

WORKER = "sglang/srt/speculative/dflash_worker_v2.py"


@pytest.fixture
def site(tmp_path, small_contract):
    """A site-packages folder in which everything fits, but for files changed to fit the small contract."""
    install_wheel(tmp_path / "site", more=["sglang/srt/small.py", "sglang/srt/other.py"])
    install_plugin(tmp_path / "site")
    write(tmp_path / "site", small_contract)
    return tmp_path / "site"


@pytest.fixture
def pair(tmp_path):
    """Flags that name a pair which fits."""
    target = write_model(tmp_path / "a target", QWEN3_8B, weights=16_381_470_720)
    return {
        "model": str(target),
        "drafter": str(write_model(tmp_path / "drafter", QWEN3_8B_DFLASH, weights=1 << 30)),
    }


def look(*entries, cwd, plan=None, **options):
    report = examine(plan or Plan(), around(*entries, cwd=cwd, **options))
    document = json.loads(json.dumps(report.to_json()))
    assert document["fits"] == report.fits
    assert all(row["why"] and row["do"] for row in document["findings"] if row["level"] != "ok")
    return report


def section(report, name):
    return next(section for section in report.sections if section.name == name)


def errors(report):
    return [finding.id for finding in report.findings() if finding.level is Level.ERROR]


def test_everything_fits(site, tmp_path):
    report = look(site, cwd=tmp_path)
    assert errors(report) == []
    assert report.verdict == "nothing here stops DDTREE: 1 warning", "the fake's files were changed"
    assert section(report, "sglang").data["fits"]
    assert section(report, "dflash").data["workers"][0] == WORKER
    assert [s.name for s in report.sections] == [
        "environment", "installation", "sglang", "dflash", "settings", "backends", "pair", "memory", "launch",
    ]  # fmt: skip


def test_nothing_is_imported(site, tmp_path):
    before = set(sys.modules)
    look(site, cwd=tmp_path)
    assert not {name for name in set(sys.modules) - before if name.startswith(("sglang", "flashinfer"))}


def test_a_missing_and_a_changed_hook_are_told_one_by_one(site, tmp_path):
    write(site, {"sglang/srt/small.py": "def call(c): ...\n", WORKER: "class Worker: ...\n"})
    report = look(site, cwd=tmp_path)
    symbols = [f.what for f in by_id(report.findings(), "contract.symbol")]
    assert any(line.startswith("changed: sglang.srt.small:call (called)") for line in symbols)
    assert any(
        line.startswith("missing: sglang.srt.speculative.dflash_worker_v2:Worker.run") for line in symbols
    )
    assert set(errors(report)) == {"contract.verdict", "contract.symbol"}


def test_missing_modules_are_one_finding(site, tmp_path):
    (site / "sglang/srt/small.py").unlink()
    report = look(site, cwd=tmp_path)
    (found,) = by_id(report.findings(), "contract.module")
    assert (found.what, found.names) == (
        "missing: 1 module with 1 symbol of the contract", ("sglang.srt.small",),
    )  # fmt: skip


def test_what_is_lost_with_a_module_is_one_warning(site, tmp_path):
    (site / "sglang/srt/other.py").unlink()
    report = look(site, cwd=tmp_path)
    (lost,) = by_id(report.findings(), "contract.optional")
    assert (lost.what, lost.names) == (
        "optional missing: 1 symbol in modules that are not there", ("sglang.srt.other:D.y",),
    )  # fmt: skip
    assert errors(report) == ["installation.absent"], "of the wheel's RECORD, not of the contract"


def test_what_is_only_lost_is_a_warning(site, tmp_path):
    write(site, {"sglang/srt/other.py": ""})
    report = look(site, cwd=tmp_path)
    (lost,) = by_id(report.findings(), "contract.optional")
    assert "without it: colours" in lost.what
    assert errors(report) == []


def test_the_version_of_an_old_source_tree_is_told(tmp_path, small_contract):
    write(tmp_path, package_files(None) | small_contract | {"sglang/version.py": "__version__ = '0.5.2'"})
    (found,) = by_id(look(tmp_path, cwd=tmp_path).findings(), "contract.version")
    assert found.what.startswith("sglang 0.5.2 is outside of the tested versions")


def test_an_untested_version(site, tmp_path):
    write(site, {"sglang/_version.py": "__version__ = '0.7.0'"})
    assert set(errors(look(site, cwd=tmp_path))) == {"contract.verdict", "contract.version"}
    report = look(site, cwd=tmp_path, environ={"DDTREE_ALLOW_UNTESTED_SGLANG": "1"})
    assert errors(report) == []
    assert by_id(report.findings(), "contract.version")[0].level is Level.WARN


@pytest.mark.parametrize("junk", [b"\0\xff" * 1000, b"def broken(:", b"(" * 100_000])
def test_source_files_of_junk_are_a_finding(site, tmp_path, junk):
    write(site, {"sglang/srt/small.py": junk})
    report = look(site, cwd=tmp_path)
    assert errors(report) == ["contract.verdict"]
    assert "cannot be checked" in by_id(report.findings(), "contract.verdict")[0].what


def test_a_package_of_that_name_without_sglangs_code(tmp_path, small_contract):
    write(tmp_path, {"sglang/__init__.py": ""})
    assert "contract.verdict" in errors(look(tmp_path, cwd=tmp_path))


@pytest.mark.parametrize(("worker", "present"), [(None, False), ("v1", True), ("v2", True)])
def test_dflash_by_its_workers(tmp_path, worker, present):
    write(tmp_path, package_files("0.5.13", worker=worker))
    found = dflash_section(tmp_path)
    assert found.data["present"] == present
    assert found.findings[0].level is (Level.OK if worker == "v2" else Level.ERROR)


def test_no_sglang_and_no_gpu(tmp_path):
    report = look(tmp_path, cwd=tmp_path, gpus=())
    assert errors(report) == [
        "environment.gpu", "installation.missing", "installation.plugin", "contract.verdict",
    ]  # fmt: skip
    assert section(report, "sglang").data["fits"] is False
    assert report.verdict.startswith("DDTREE will not work here as it is: 4 errors")


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"max_requests": 4, "context_tokens": 8192}, "the plan fits; SGLang was not looked at here"),
        ({"max_requests": 48}, "nothing that was looked at stops the plan; SGLang was not looked at here"),
        ({"gpu_memory_gb": 12}, "the plan will not work as it is; SGLang was not looked at here: 1 error"),
    ],
)
def test_a_plan_for_another_machine_needs_no_sglang_here(tmp_path, pair, changes, verdict):
    install_plugin(tmp_path / "site")
    plan = Plan(**{**pair, "compute_capability": "12.0", "gpu_memory_gb": 95, "node_budget": 15, **changes})
    report = look(tmp_path / "site", cwd=tmp_path, plan=plan, gpus=(), cuda="12.1")
    levels = {f.id: f.level for f in report.findings()}
    assert {levels["installation.missing"], levels["contract.verdict"]} == {Level.WARN}
    assert report.verdict.startswith(verdict)
    assert report.fits == ("will not work" not in verdict)
    assert section(report, "sglang").data["fits"] is None


def test_a_plan_for_another_machine_takes_nothing_from_this_ones_software(tmp_path):
    install_plugin(tmp_path / "site")
    report = look(tmp_path / "site", cwd=tmp_path, plan=Plan(compute_capability="9.0"), gpus=(), cuda="12.1")
    assert section(report, "backends").data["default"] == "fa3", "of a CUDA that is new enough"
    assert not any("is not installed" in u["note"] for u in section(report, "backends").data["usable"])
    assert report.verdict.startswith("nothing that was looked at stops the plan;"), "no pair was named"


def test_a_plan_for_another_machine_still_tells_of_a_broken_sglang_here(tmp_path):
    write(tmp_path, {"sglang/__init__.py": ""})
    plan = Plan(compute_capability="12.0")
    assert "contract.verdict" in errors(look(tmp_path, cwd=tmp_path, plan=plan))


def test_flags_name_the_load_that_memory_was_reckoned_for(site, tmp_path, pair):
    report = look(site, cwd=tmp_path, plan=Plan(**pair))
    load, arguments = section(report, "memory").data["load"], section(report, "launch").data["arguments"]
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert given["--max-running-requests"] == str(load["num_requests"]) == "48"
    assert given["--context-length"] == str(load["context_tokens"]) == "40960"


def test_the_users_layout(tmp_path, small_contract):
    source, site = users_layout(tmp_path)
    report = look(source, site, cwd=tmp_path, gpus=[RTX_PRO_6000] * 8)
    assert {"contract.verdict", "contract.version", "contract.module", "dflash.worker"} <= set(errors(report))
    without_tree = look(site, cwd=tmp_path, gpus=[RTX_PRO_6000] * 8)
    (worker,) = by_id(without_tree.findings(), "dflash.worker")
    assert worker.what.endswith("the first worker only, which DDTREE cannot use")


def test_wrong_settings(site, tmp_path):
    report = look(site, cwd=tmp_path, environ={"DDTREE_CONFIG": '{"node_budgets": 3}'})
    assert errors(report) == ["settings.wrong"]
    assert section(report, "settings").data["fits"] is False


def test_memory_and_flags_of_a_plan(site, tmp_path, pair):
    plan = Plan(**pair, node_budget=63, max_requests=16, context_tokens=32768, tp_size=2, kv_dtype="fp8_e4m3")
    report = look(site, cwd=tmp_path, plan=plan, gpus=[RTX_PRO_6000] * 2)
    assert errors(report) == []
    account = section(report, "memory").data["account"]
    assert account["verify_width"] == 64
    assert account["kv_per_token"] == 36 * 4 * 256
    assert account["weights"] == (16_381_470_720 + (1 << 30)) // 2
    launch = section(report, "launch")
    arguments = dict(zip(launch.data["arguments"][::2], launch.data["arguments"][1::2], strict=True))
    assert arguments == {
        "--model-path": pair["model"], "--speculative-algorithm": "DDTREE",
        "--speculative-draft-model-path": pair["drafter"], "--attention-backend": "triton", "--tp-size": "2",
        "--context-length": "32768", "--max-running-requests": "16", "--kv-cache-dtype": "fp8_e4m3",
        "--mem-fraction-static": f"{account['fraction']:.3f}",
    }  # fmt: skip
    assert launch.data["environ"] == {"DDTREE_CONFIG": '{"node_budget": 63}'}


def test_the_lines_to_paste_are_a_command(site, tmp_path, pair):
    report = look(site, cwd=tmp_path, plan=Plan(**pair, node_budget=63))
    launch = section(report, "launch")
    script = 'python() { printf \'%s\\n\' "$@" "$DDTREE_CONFIG"; }\n'
    shown = subprocess.run(
        ["sh", "-c", script + "\n".join(launch.lines)], capture_output=True, text=True, check=True
    )
    words = shown.stdout.splitlines()
    assert words[:-1] == ["-m", "sglang.launch_server", *launch.data["arguments"]]
    assert words[-1] == launch.data["environ"]["DDTREE_CONFIG"]


def test_flags_keep_the_other_settings_that_are_not_default(site, tmp_path):
    environ = {"DDTREE_CONFIG": '{"mode": "chain", "metrics": false}'}
    launch = section(look(site, cwd=tmp_path, environ=environ, plan=Plan(node_budget=7)), "launch")
    assert json.loads(launch.data["environ"]["DDTREE_CONFIG"]) == {
        "node_budget": 7, "mode": "chain", "metrics": False,
    }  # fmt: skip
    assert launch.data["arguments"][1] == "TARGET"
    assert section(look(site, cwd=tmp_path, environ=environ), "launch").data["environ"] == {}


@pytest.mark.parametrize(
    ("changes", "level", "name"),
    [
        ({"gpu_memory_gb": 12}, Level.ERROR, "memory.pool"),
        ({"gpu_memory_gb": 30, "mem_fraction": 0.7}, Level.ERROR, "memory.pool"),
        ({"gpu_memory_gb": 80, "mem_fraction": 0.99}, Level.ERROR, "memory.headroom"),
        ({"gpu_memory_gb": 80, "mem_fraction": 0.9}, Level.WARN, "memory.headroom"),
        ({"gpu_memory_gb": 80, "max_requests": 48}, Level.WARN, "memory.pool"),
        ({"gpu_memory_gb": 12, "max_requests": 4000}, Level.ERROR, "memory.headroom"),
        ({"gpu_memory_gb": 80, "max_requests": 4, "context_tokens": 50_000}, Level.WARN, "memory.context"),
        ({"gpu_memory_gb": 140, "max_requests": 8, "context_tokens": 8192}, Level.OK, "memory.pool"),
        ({"gpu_memory_gb": 140, "max_requests": 8, "node_budget": 3}, Level.OK, "memory.width"),
    ],
)
def test_what_does_not_fit_into_memory(site, tmp_path, pair, changes, level, name):
    report = look(site, cwd=tmp_path, plan=Plan(**pair, **changes))
    assert [f.level for f in by_id(report.findings(), name)] == [level]


def test_a_gpu_that_is_too_small_is_told_without_absurd_figures(site, tmp_path, pair):
    memory = section(look(site, cwd=tmp_path, plan=Plan(**pair, gpu_memory_gb=1)), "memory")
    assert [f.id for f in memory.findings] == ["memory.headroom", "memory.largest"]
    assert "no number of nodes, or no number of requests" in memory.findings[-1].what


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "max_position_embeddings"])
def test_sizes_beyond_all_sums_are_a_finding(site, tmp_path, pair, field):
    write_model(tmp_path / "a target", QWEN3_8B | {field: 10**3000}, weights=1 << 30)
    report = look(site, cwd=tmp_path, plan=Plan(**pair))
    assert f"config.json has {field}=" in by_id(report.findings(), "pair.target")[0].what


def test_states_of_other_kinds_than_are_reckoned_are_told(site, tmp_path, pair):
    write_model(tmp_path / "a target", QWEN3_8B | {"mamba_d_state": 128}, weights=1 << 30)
    report = look(site, cwd=tmp_path, plan=Plan(**pair))
    assert [f.level for f in by_id(report.findings(), "memory.states")] == [Level.WARN]


def test_memory_that_cannot_be_reckoned(site, tmp_path, pair):
    write_model(tmp_path / "a target", QWEN3_8B)
    (tmp_path / "a target/model.safetensors.index.json").unlink()
    (found,) = section(look(site, cwd=tmp_path, plan=Plan(**pair), gpus=()), "memory").findings
    assert "--gpu-memory-gb" in found.what
    assert "--weights-gb" in found.what
    given = Plan(**pair, weights_gb=15.3, gpu_memory_gb=140)
    assert section(look(site, cwd=tmp_path, plan=given), "memory").data["account"]["pool_tokens"] > 0


def test_a_source_that_is_looked_at_alone(tmp_path, small_contract):
    write(tmp_path, package_files("0.5.23") | small_contract)
    report = examine_source(tmp_path, {})
    assert report.fits
    assert [s.name for s in report.sections] == ["sglang", "dflash"]
    with pytest.raises(ConfigError, match="does not exist"):
        examine_source(tmp_path / "nothing")


def test_lines_fold_to_a_terminal_and_not_in_a_pipe(site, tmp_path, pair):
    report = look(site, cwd=tmp_path, plan=Plan(**pair))
    folded = [line for _, line in report_lines(report, 80)]
    too_long = [line for line in folded if len(line) > 80]
    tables = {f"{'':8}{line}" for s in report.sections for line in s.lines}
    assert all(line in tables or "/" in line for line in too_long), "only paths and what is pasted are longer"
    piped = [line for _, line in report_lines(report, None)]
    for finding in report.findings():
        assert any(line.strip() == finding.what for line in piped)
        assert not finding.todo or f"        do:  {finding.todo}" in piped
    assert piped[-1] == report.verdict


def test_long_lists_of_names_are_cut_short_for_people_only(site, tmp_path):
    write(site, {f"sglang/old{n:02}.bak": "" for n in range(20)})
    report = look(site, cwd=tmp_path)
    lines = [line.strip() for _, line in report_lines(report, None)]
    assert "sglang/old07.bak" in lines
    assert "sglang/old08.bak" not in lines
    assert "and 12 more (--json has all)" in lines
    assert len(by_id(report.findings(), "installation.extra")[0].to_json()["names"]) == 20


def test_control_characters_of_names_are_shown_and_not_obeyed(site, tmp_path):
    write(site, {"sglang/a\x1b[31m\nb.bak": "", "sglang/\udcff.bak": ""})
    lines = [line for _, line in report_lines(look(site, cwd=tmp_path), None)]
    assert f"{'':10}sglang/a\\x1b[31m\\nb.bak" in lines
    assert all(line.isprintable() for line in lines)


def test_a_report_of_nothing():
    assert Report(()).fits
    assert [line for _, line in report_lines(Report(()), 80)] == ["nothing here stops DDTREE"]


@pytest.mark.parametrize(
    "fields",
    [
        {"model": ""}, {"drafter": ""}, {"drafter": "none"}, {"node_budget": 0}, {"node_budget": 1025},
        {"max_requests": 0}, {"context_tokens": 0}, {"tp_size": 0}, {"gpu_memory_gb": 0}, {"weights_gb": -1},
        {"gpu_memory_gb": float("nan")}, {"gpu_memory_gb": 1e-300}, {"weights_gb": 1e99}, {"mem_fraction": 1},
        {"mem_fraction": 0}, {"mem_fraction": 0.9999}, {"mem_fraction": float("nan")}, {"kv_dtype": "nvfp4"},
        {"compute_capability": "sm90"}, {"compute_capability": "9"}, {"compute_capability": "\uff19.\uff10"},
    ],
)  # fmt: skip
def test_plans_that_are_not_allowed(fields):
    with pytest.raises(ConfigError, match="--"):
        Plan(**fields)
