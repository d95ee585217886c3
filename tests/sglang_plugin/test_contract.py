"""The hook contract holds for every tested release, and every kind of drift is reported by name."""

import importlib.util
import json
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree.errors import ConfigError
from ddtree.sglang_plugin import contract
from ddtree.sglang_plugin.contract import ALLOW_UNTESTED, Status, check_hook, make_report, version_remarks
from ddtree.sglang_plugin.contract_ast import ALL_METHODS, LIST_CALL, Symbol, SymbolMissing
from ddtree.sglang_plugin.contract_hooks import TABLE
from ddtree.sglang_plugin.contract_rules import (
    Hook,
    Kind,
    call_difference,
    callback,
    called,
    covered,
    difference,
    fields,
    hooked,
    imported,
    optional,
    or_inherited,
    overridden,
    overridden_properties,
    parse_version,
    since,
    until,
)
from ddtree.sglang_plugin.contract_source import open_source

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "data" / "sglang_signatures"
VERSIONS = [f"0.5.{patch}" for patch in range(17, 24)]
WORKER = "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2"


class Snapshot:
    """Symbols of one release as scripts/make_sglang_signatures.py wrote them down."""

    def __init__(self, version):
        page = json.loads((FOLDER / f"{version}.json").read_text(encoding="utf-8"))
        self.version, self.symbols, self.inherited = page["sglang"], page["symbols"], page["inherited"]

    def find(self, path):
        value = self.symbols[path]
        if value is None:
            raise SymbolMissing(f"{path} is not there")
        return Symbol(None if value is True else tuple(value), self.inherited.get(path, ""))


def report_of(snapshot, table=TABLE):
    return make_report(snapshot, snapshot.version, "snapshot", {}, table)


def planted(path, change):
    """The report on the newest release with one symbol changed."""
    snapshot = Snapshot(VERSIONS[-1])
    snapshot.symbols[path] = change(snapshot.symbols[path])
    return report_of(snapshot)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_contract_holds_for_every_tested_release(version):
    snapshot = Snapshot(version)
    report = report_of(snapshot)
    assert snapshot.version == version
    assert (report.problems, report.warnings, report.exit_code) == ([], [], 0)
    assert f"DDTREE fits SGLang {version}" in report.verdict


@pytest.mark.parametrize("version", VERSIONS)
def test_a_snapshot_has_the_symbols_of_the_table(version):
    wanted = {hook.path for hook in TABLE} | {hook.besides for hook in TABLE} - {""}
    assert set(Snapshot(version).symbols) == wanted, "run: make contract"


def test_a_snapshot_has_names_only():
    for version in VERSIONS:
        for value in Snapshot(version).symbols.values():
            assert (
                value is None
                or value is True
                or all(name.strip("*=/").isidentifier() or name in "*/" for name in value)
            )


def test_limits_of_rows_are_no_wider_than_they_must_be():
    """A row that starts or ends between two releases does so because the next one differs."""
    for hook in TABLE:
        for limit, step in ((hook.since, -1), (hook.until, 1)):
            place = VERSIONS.index(limit) + step if limit else -1
            if 0 <= place < len(VERSIONS):
                unlimited = replace(hook, since="", until="", loses="")
                status = check_hook(unlimited, Snapshot(VERSIONS[place])).status
                assert status is not Status.OK, f"{hook.path}: {VERSIONS[place]} has it too"


def test_drift_is_reported_by_name():
    path = f"{WORKER}.forward_batch_generation"
    report = planted(path, lambda found: [name.replace("on_publish", "publish") for name in found])
    assert report.exit_code == 1
    assert report.problems == [
        f"changed: {path} (overridden): expected (batch, on_publish, grammar_barrier, pp_proxy_tensors), "
        "found (batch, publish=, grammar_barrier=, pp_proxy_tensors=): the parameters differ"
    ]
    assert report.problems[0] in report.text
    assert "does not fit" in report.verdict


def test_a_missing_symbol_is_reported_by_name():
    path = f"{WORKER}._ensure_draft_block_buffers"
    assert planted(path, lambda found: None).problems == [f"missing: {path} (called): {path} is not there"]


OVERRIDDEN = sorted({hook.path for hook in TABLE if hook.kind is Kind.OVERRIDDEN and not hook.may_inherit})


@pytest.mark.parametrize("path", OVERRIDDEN)
def test_an_override_whose_method_only_a_base_has_is_reported_by_name(path):
    """As after `DFlashWorkerV2.init_cuda_graphs` was renamed: `super()` would reach the base's."""
    snapshot = Snapshot(VERSIONS[-1])
    snapshot.inherited[path] = "Base"
    assert report_of(snapshot).problems == [
        f"changed: {path} (overridden): expected it in the class itself, found it only in its base Base"
    ]


def test_only_a_member_that_sglang_itself_inherits_may_come_from_a_base():
    may_inherit = {hook.path for hook in TABLE if hook.may_inherit}
    for version in VERSIONS:
        assert set(Snapshot(version).inherited) == may_inherit, "run: make contract"
    assert f"{WORKER}.init_cuda_graphs" not in may_inherit


def test_a_required_parameter_more_is_reported_by_name():
    path = "sglang.srt.speculative.eagle_utils:eagle_prepare_for_verify"
    (problem,) = planted(path, lambda found: [*found, "plan"]).problems
    assert problem.startswith(f"changed: {path} (called)")
    assert problem.endswith("it also requires plan")
    assert planted(path, lambda found: [*found, "plan="]).is_ok


def test_a_method_that_sglang_asks_of_algorithms_and_we_lack_is_reported_by_name():
    path = f"sglang.srt.speculative.spec_info:SpeculativeAlgorithm{ALL_METHODS}"
    (problem,) = planted(path, lambda found: [*found, "is_new"]).problems
    assert problem.endswith("it has methods that the plugin lacks: is_new")


def test_a_callback_that_is_called_otherwise_is_reported_by_name():
    path = "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner"
    path = f"{path}.capture_tail_hooks{LIST_CALL}"
    (problem,) = planted(path, lambda found: [*found, "stream"]).problems
    assert problem.startswith(f"changed: {path} (callback)")
    assert problem.endswith("found (self, out, forward_batch, num_tokens, stream): the parameters differ")
    assert planted(path, lambda found: None).problems == [f"missing: {path} (callback): {path} is not there"]


def test_what_is_optional_costs_a_warning_that_says_what_is_lost():
    path = "sglang.srt.arg_groups.fields.disagg:Disagg.enable_pdmux"
    report = planted(path, lambda found: None)
    assert report.is_ok
    (warning,) = report.warnings
    assert warning.startswith(f"optional missing: {path} (field)")
    assert "without it: DDTREE does not refuse" in warning
    assert warning in report.text


def test_every_difference_is_in_one_text():
    snapshot = Snapshot(VERSIONS[-1])
    paths = [path for path, value in snapshot.symbols.items() if isinstance(value, list) and value][:20]
    for path in paths:
        snapshot.symbols[path] = None
    report = report_of(snapshot)
    assert {line.split()[1] for line in report.problems} == set(paths)
    assert all(path in report.text for path in paths)


@pytest.mark.parametrize(
    ("arguments", "parameters", "reason"),
    [
        ("", "", None),
        ("a, b=", "a b", None),
        ("a, b=", "a b c=", None),
        ("a=, b=", "* a b", None),
        ("a", "a / b=", None),
        ("a, b, c", "a *rest", None),
        ("a, z=", "a **others", None),
        ("a, b", "a * b", "b is one positional argument too many"),
        ("a, b", "a c b=", "b would be taken for c"),
        ("a, b=", "a c=", "it takes no b"),
        ("a=", "a /", "it takes no a"),
        ("a", "a b", "it also requires b"),
        ("a", "a * b", "it also requires b"),
        ("a", "a *rest b c=", "it also requires b"),
    ],
)
def test_a_call_binds_as_python_binds_it(arguments, parameters, reason):
    given = tuple(part.strip() for part in arguments.split(",") if part.strip())
    assert call_difference(given, tuple(parameters.split())) == reason
    assert python_agrees(given, parameters.split()) == (reason is None)


def python_agrees(arguments, parameters):
    """Whether Python itself binds the call, each argument to the parameter of its name."""
    signature = ", ".join(p + "None" if p.endswith("=") else p for p in parameters)
    call = ", ".join(name + f"'{name[:-1]}'" if name.endswith("=") else f"'{name}'" for name in arguments)
    scope = {}
    exec(f"def f({signature}):\n    return dict(locals())", scope)
    try:
        bound = eval(f"f({call})", scope)
    except TypeError:
        return False
    return all(name == value for name, value in bound.items() if isinstance(value, str))


@pytest.mark.parametrize(
    ("rows", "symbol", "told"),
    [
        (imported("m", "f"), Symbol(("a",)), None),
        (fields("m:C", "x"), Symbol(), None),
        (fields("m:C", "x"), Symbol(("a",)), "expected an attribute, found a function"),
        (overridden_properties("m:C", "x"), Symbol(), None),
        (overridden_properties("m:C", "x"), Symbol(()), "expected an attribute, found a function"),
        (called("m:f", "a"), Symbol(), "found nothing that takes any"),
        (overridden("m:C", "f", "a, b"), Symbol(("a", "*", "b=")), None),
        (overridden("m:C", "f", "a, b"), Symbol(("b", "a")), "the parameters differ"),
        (overridden("m:C", "f", "a"), Symbol(("a", "b=")), "the parameters differ"),
        (overridden("m:C", "f", "a"), Symbol(("a",), "Base"), "found it only in its base Base"),
        (or_inherited(overridden("m:C", "f", "a")), Symbol(("a",), "Base"), None),
        (overridden_properties("m:C", "x"), Symbol(None, "Base"), "found it only in its base Base"),
        (called("m:C.f", "a"), Symbol(("a",), "Base"), None),
        (overridden("m:C", "f"), Symbol(()), None),
        (hooked("m:f", "a"), Symbol(("a=",)), None),
        (hooked("m:f", "a"), Symbol(("b",)), "the parameters differ"),
        (callback("m:C", "hooks", "self, a"), Symbol(("self", "a")), None),
        (callback("m:C", "hooks", "self, a"), Symbol(("a",)), "the parameters differ"),
        (covered("m:C", "f", "m:D"), Symbol(("f", "g")), "lacks: g"),
    ],
)  # fmt: skip
def test_each_kind_asks_for_its_own(rows, symbol, told):
    found = difference(rows[0], symbol)
    assert (found is None) if told is None else (told in found)


def test_inherited_methods_count_as_our_own():
    (row,) = covered("m:C", "f", "m:D")
    assert difference(row, Symbol(("f", "g")), ("g",)) is None


def test_limits_and_losses_go_around_rows():
    rows = optional("speed", since("0.5.18", until("0.5.20", fields("m:C", "x y"))))
    assert [(row.name, row.loses) for row in rows] == [("x", "speed"), ("y", "speed")]
    about = [version for version in VERSIONS if rows[0].is_about(parse_version(version))]
    assert about == ["0.5.18", "0.5.19", "0.5.20"]


@pytest.mark.parametrize(
    ("text", "release"),
    [("0.5.17", (0, 5, 17)), ("0.5.9", (0, 5, 9)), ("0.5.23.post1", (0, 5, 23)), ("0.5.24rc1", (0, 5, 24)),
     ("0.5.24.dev7+gabc", (0, 5, 24)), ("0.6", ()), ("unknown", ()), ("", ())],
)  # fmt: skip
def test_versions(text, release):
    assert parse_version(text) == release


@pytest.mark.parametrize("version", [*VERSIONS, "0.5.23.post2"])
def test_tested_versions_pass(version):
    assert version_remarks(version, {}) == ("", "")


@pytest.mark.parametrize("version", ["0.5.16", "0.5.24", "0.6.0", "0.5.9", "main", None])
def test_other_versions_are_refused_until_the_variable_is_set(version):
    refusal, warning = version_remarks(version, {})
    assert "0.5.17 to 0.5.23" in refusal
    assert f"{ALLOW_UNTESTED}=1" in refusal
    assert warning == ""
    assert version_remarks(version, {ALLOW_UNTESTED: "0"})[0] == refusal
    refusal, warning = version_remarks(version, {ALLOW_UNTESTED: "1"})
    assert refusal == ""
    assert "outside of the tested versions" in warning


def test_an_untested_version_is_a_problem_and_its_symbols_are_checked_all_the_same():
    snapshot = Snapshot(VERSIONS[-1])
    snapshot.symbols[f"{WORKER}.block_size"] = None
    refused = make_report(snapshot, "0.5.24", "snapshot", {})
    assert len(refused.problems) == 2
    assert "0.5.24" in refused.problems[0]
    allowed = make_report(snapshot, "0.5.24", "snapshot", {ALLOW_UNTESTED: "1"})
    assert len(allowed.problems) == 1
    assert "0.5.24" in allowed.warnings[0]


@pytest.mark.parametrize(("version", "told"), [("0.5.24", "untested"), (None, "unknown")])
def test_the_verdict_says_where_only_the_version_is_in_the_way(version, told):
    snapshot = Snapshot(VERSIONS[-1])
    report = make_report(snapshot, version, "snapshot", {})
    assert report.exit_code == 1
    assert report.verdict == (
        f"SGLang {version or 'of unknown version'} (snapshot): all symbols fit, but the version is {told} "
        f"(tested: 0.5.17 to 0.5.23): DDTREE refuses it unless {ALLOW_UNTESTED}=1"
    )
    assert "DDTREE fits" in make_report(snapshot, version, "snapshot", {ALLOW_UNTESTED: "1"}).verdict
    snapshot.symbols["sglang.srt.arg_groups.fields.disagg:Disagg.enable_pdmux"] = None
    assert "all needed symbols fit" in make_report(snapshot, version, "snapshot", {}).verdict
    snapshot.symbols[f"{WORKER}.block_size"] = None
    assert "does not fit" in make_report(snapshot, version, "snapshot", {}).verdict


@pytest.fixture
def package(tmp_path):
    """A tiny SGLang on disk, of a tested version."""
    for name, text in {
        "__init__": "",
        "_version": "__version__ = '0.5.23'",
        "srt/__init__": "",
        "srt/small": "class C:\n    def f(self, a, b=1): ...\nclass D(C): ...",
    }.items():
        path = tmp_path / "sglang" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return tmp_path


def test_source_on_disk_is_held_against_the_table(package, monkeypatch):
    monkeypatch.setattr(contract, "TABLE", overridden("sglang.srt.small:C", "f", "a, b"))
    assert make_report(open_source(package), "0.5.23", "", {}, contract.TABLE).is_ok
    report = contract.check_source(package, {})
    assert (report.version, report.where) == ("0.5.23", str(package / "sglang"))
    assert not report.is_ok, "the whole table is asked for"


def test_a_file_that_is_no_python_is_named(package):
    (package / "sglang" / "srt" / "environ.py").write_text("def broken(:", encoding="utf-8")
    with pytest.raises(ConfigError, match="no Python source"):
        contract.check_source(package, {})


def test_a_version_from_elsewhere_counts_where_the_files_name_none(package):
    (package / "sglang" / "_version.py").unlink()
    assert contract.check_source(package, {}).version == ""
    assert contract.check_source(package, {}, "0.5.20").version == "0.5.20"


def test_the_report_as_json():
    snapshot = Snapshot("0.5.17")
    snapshot.symbols[f"{WORKER}.block_size"] = None
    document = json.loads(json.dumps(report_of(snapshot).to_json()))
    assert (document["fits"], document["version"]) == (False, "0.5.17")
    row = next(row for row in document["symbols"] if row["path"] == f"{WORKER}.block_size")
    assert (row["kind"], row["status"]) == ("field", "missing")
    assert {row["status"] for row in document["symbols"]} == {"ok", "missing"}


def test_the_script_writes_what_is_committed(package, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location(
        "make_sglang_signatures", ROOT / "scripts" / "make_sglang_signatures.py"
    )
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    table = (
        *imported("sglang.srt.small", "C"),
        *called("sglang.srt.small:C.f", "a"),
        *overridden("sglang.srt.small:D", "f", "a, b"),
        Hook("sglang.srt.small:gone", Kind.FIELD),
    )
    monkeypatch.setattr(script, "TABLE", table)
    monkeypatch.setattr(script, "FOLDER", package / "out")
    script.main([str(package)])
    assert capsys.readouterr().out == f"{package / 'out' / '0.5.23.json'}\n"
    assert (package / "out" / "0.5.23.json").read_text(encoding="utf-8") == textwrap.dedent("""\
        {
          "sglang": "0.5.23",
          "inherited": {"sglang.srt.small:D.f": "C"},
          "symbols": {
            "sglang.srt.small:C": true,
            "sglang.srt.small:C.f": ["a", "b="],
            "sglang.srt.small:D.f": ["a", "b="],
            "sglang.srt.small:gone": null
          }
        }
        """)
