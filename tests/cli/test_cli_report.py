"""`ddtree report`: the files that it names, and how mistakes end it."""

import json
import sys

import pytest

from compare_kit import records, write_trace
from report_kit import made_up_run, write_run

ARMS = ("embedded ar", "embedded tree:4")


@pytest.fixture
def run(tmp_path):
    made = made_up_run(arms=ARMS, sets=("gsm8k",), temperatures=(0.0,), repeats=1, prompts=3)
    return str(write_run(tmp_path / "run.jsonl", made))


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    from ddtree.bench import plots

    monkeypatch.setattr(plots, "report_pictures", lambda rows, *, with_paper: [])


def test_it_names_what_it_wrote(command, run, tmp_path):
    code, out, err = command("report", run, "--output", str(tmp_path / "out"))
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        str(tmp_path / "out" / name) for name in ("index.html", "report.md", "report.json")
    ]
    figures = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [arm["arm"] for arm in figures["runs"][0]["arms"]] == list(ARMS)


def test_a_trace_gets_a_page_beside_it(command, run, tmp_path):
    trace = str(write_trace(tmp_path / "trace.jsonl", records()))
    code, out, _ = command("report", run, "--trace", trace, "--output", str(tmp_path / "out"))
    assert code == 0
    assert out.splitlines()[0] == str(tmp_path / "out" / "trace.html")
    assert '<a href="trace.html">' in (tmp_path / "out" / "index.html").read_text()


def test_a_trace_alone_will_do(command, tmp_path):
    trace = str(write_trace(tmp_path / "trace.jsonl", records()))
    code, out, _ = command("report", "--trace", trace, "--output", str(tmp_path / "out"))
    assert (code, out) == (0, f"{tmp_path / 'out' / 'trace.html'}\n")
    assert not (tmp_path / "out" / "index.html").exists()


def test_plain_names_what_others_are_compared_with(command, tmp_path):
    arms = ("http://a/v1", "http://b/v1")
    made = made_up_run(arms=arms, sets=("gsm8k",), temperatures=(0.0,), repeats=1)
    path = str(write_run(tmp_path / "run.jsonl", made))
    assert command("report", path, "--output", str(tmp_path / "out"), "--plain", "http://a/v1")[0] == 0
    by_arm = {
        arm["arm"]: arm
        for arm in json.loads((tmp_path / "out" / "report.json").read_text())["runs"][0]["arms"]
    }
    assert by_arm["http://a/v1"]["to_plain"]["value"] == 1
    assert by_arm["http://b/v1"]["to_plain"]["value"] > 0


@pytest.mark.parametrize(("arguments", "told"), [
    ((), "--trace FILE"),
    (("none.jsonl",), "none.jsonl"),
    (("--model", "x"), "--trace FILE"),
    (("--trace", "none.jsonl"), "none.jsonl"),
])  # fmt: skip
def test_mistakes_are_one_line(refused, monkeypatch, tmp_path, arguments, told):
    monkeypatch.chdir(tmp_path)
    assert told in refused("report", *arguments)


def test_mistakes_with_a_run_are_one_line(refused, run, tmp_path):
    assert "only with --trace" in refused("report", run, "--model", "x")
    assert "plain='nobody'" in refused("report", run, "--plain", "nobody", "--output", str(tmp_path / "out"))
    assert "give another --output" in refused("report", run, "--output", run)
    assert "--output='' is not allowed: a folder" in refused("report", run, "--output", "")


def test_a_file_that_is_no_run_is_refused(refused, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"format": "ddtree-trace"}\n')
    assert "is no benchmark run" in refused("report", str(tmp_path / "x.jsonl"))


def test_without_matplotlib_the_extra_is_named(refused, run, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "sglang-ddtree[bench]" in refused("report", run, "--output", str(tmp_path / "out"))


def test_it_needs_no_torch(run, tmp_path):
    import subprocess

    program = (
        "import sys; sys.modules['torch'] = None; from ddtree.bench import plots; "
        "plots.report_pictures = lambda rows, with_paper: []; from ddtree.cli.main import run; "
        f"sys.exit(run(['report', {run!r}, '--output', {str(tmp_path / 'out')!r}]))"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (made.returncode, made.stderr) == (0, "")
