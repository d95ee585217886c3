"""docs/traces.md says what the code writes, and its programs run."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import get_args

import ddtree
from ddtree.trace.findings import Kind
from ddtree.trace.record import TraceRecorder
from ddtree.trace_format import TraceHeader, TraceRequest, TraceRound, to_line

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "traces.md").read_text(encoding="utf-8")


def test_the_tables_are_current():
    spec = spec_from_file_location("make_trace_docs", ROOT / "scripts" / "make_trace_docs.py")
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.render(PAGE) == PAGE, "run: python scripts/make_trace_docs.py"
    assert "| `accept_indices` | ints | yes |" in PAGE


def test_the_table_of_findings_is_current():
    spec = spec_from_file_location("make_trace_docs", ROOT / "scripts" / "make_trace_docs.py")
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.COMPARE_PAGE.read_text(encoding="utf-8")
    assert script.render_compare(page) == page, "run: python scripts/make_trace_docs.py"
    assert all(f"| `{kind}` |" in page for kind in get_args(Kind))


def test_the_program_that_reads_one_runs(tmp_path, monkeypatch, capsys):
    header = TraceHeader("sglang", {"name": "m"}, None, {}, "cpu", "float32", {}, "2026-01-01T00:00:00+00:00")
    records = [
        header,
        TraceRequest("r0", (1, 2), {}, "tree", 4),
        TraceRound("r0", 1, 2, 7, "tree", 4, (8, 9, 10), (0, 1, 3), 1.5),
    ]
    (tmp_path / "rounds.jsonl").write_bytes(b"".join(map(to_line, records)))
    monkeypatch.chdir(tmp_path)
    exec(program("read_trace"), {})
    assert capsys.readouterr().out == "r0 (7, 8, 9, 10) 3.0\n"


def test_the_program_that_writes_one_names_what_there_is():
    source = program("TraceRecorder(")
    names = re.search(r"from ddtree import (.*)", source).group(1).split(", ")
    assert set(names) <= set(ddtree.__all__)
    assert "recorder.generate(engine, request)" in source
    assert callable(TraceRecorder.generate)
    assert callable(TraceRecorder.stream)


def program(word):
    (found,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if word in block)
    return found
