"""Writes the tables in docs/traces.md, of the format from its dataclasses and of the cost from its results
file, and the table of findings in docs/compare.md.

Run: python scripts/make_trace_docs.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path

from ddtree.trace.findings import MEANINGS
from ddtree.trace_format import FIELDS, FORMAT, TYPE_NAMES, VERSION, TraceHeader

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "traces.md"
COMPARE_PAGE = ROOT / "docs" / "compare.md"
RESULTS = [ROOT / "results" / name for name in ("trace_overhead_gpu.json", "trace_overhead.json")]
HEAD = "| field | kind | always there | meaning |\n| --- | --- | --- | --- |\n"


def render(page: str) -> str:
    """The page with its tables made anew."""
    for record_type in FIELDS:
        page = replace_part(page, TYPE_NAMES.get(record_type, "header"), table(record_type))
    return replace_part(page, "overhead", overhead())


def render_compare(page: str) -> str:
    """docs/compare.md with its table of findings made anew."""
    rows = [
        f"| `{kind}` | {meaning.told_by} | {meaning.seen} | {meaning.usually} |\n"
        for kind, meaning in MEANINGS.items()
    ]
    head = "| finding | told by | what was seen | what it usually means |\n| --- | --- | --- | --- |\n"
    return replace_part(page, "findings", head + "".join(rows))


def replace_part(page: str, name: str, text: str) -> str:
    begin, end = f"<!-- {name}: made by scripts/make_trace_docs.py -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return before + begin + text + end + after


def table(record_type: type) -> str:
    """The fields of one type of line."""
    if record_type is TraceHeader:
        rows = [
            f'| `format` | text | yes | `"{FORMAT}"` |',
            f"| `version` | int | yes | `{VERSION}` |",
        ]
    else:
        rows = [f'| `type` | text | yes | `"{TYPE_NAMES[record_type]}"` |']
    for spec in FIELDS[record_type]:
        is_always = "yes" if spec.default is MISSING else ""
        rows.append(f"| `{spec.name}` | {spec.metadata['kind']} | {is_always} | {spec.metadata['help']} |")
    return HEAD + "".join(f"{row}\n" for row in rows)


def overhead() -> str:
    """What traced requests took beyond untraced ones, on each machine."""
    return (
        "Whole runs were timed, each against an untraced run of the same prompt, interleaved: median and\n"
        "quartiles of the pairs. What has quartiles on both sides of 0 is below the noise of that\n"
        "measurement. Beside them stands what a round at `summary` takes alone, in the engine's thread and\n"
        "for its line in the writer's:\n\n"
        "| device, run | detail | processor time | time on the clock | a round alone |\n"
        "| --- | --- | --- | --- | --- |\n" + "".join(row for path in RESULTS for row in overhead_rows(path))
        + "\n`python benchmarks/bench_trace.py`.\n"
    )  # fmt: skip


def overhead_rows(path: Path) -> Iterator[str]:
    """A row a detail of one machine's results."""
    results = json.loads(path.read_text(encoding="utf-8"))
    alone, machine = results["summary_round_alone_us"], results["provenance"]["machine"]
    on_cpu = f"{machine['cpu']}, {machine['threads']} thread(s)"
    where = on_cpu if results["device"] == "cpu" else machine["gpus"][0]
    what = "{model} in {dtype}, greedy, budget {budget}, {max_tokens} tokens".format_map(results)
    num_pairs = results["num_prompts"] * results["repeats"]
    note = f"; {results['note']}" if "note" in results else ""
    for detail, extra in results["extra_time"].items():
        round_us = f"{alone['take']} µs, {alone['line']} µs" if detail == "summary" else ""
        yield (
            f"| {where}: {what}, {num_pairs} pairs{note} | `{detail}` | {cost(extra['cpu'])} "
            f"| {cost(extra['wall'])} | {round_us} |\n"
        )


def cost(quartiles: dict[str, float]) -> str:
    """The median and quartiles, or that they do not tell a cost from none."""
    low, median, high = (f"{100 * quartiles[name]:+.1f} %" for name in ("low", "median", "high"))
    if quartiles["low"] <= 0 <= quartiles["high"]:
        return f"below the noise ({low} to {high})"
    return f"{median} ({low} to {high})"


if __name__ == "__main__":
    for path, render_page in ((PAGE, render), (COMPARE_PAGE, render_compare)):
        path.write_text(render_page(path.read_text(encoding="utf-8")), encoding="utf-8")
