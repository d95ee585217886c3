"""The tables of a report: arms side by side at each setting, and how the runs were made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from ddtree.bench.document import MISSING, Table, escaped
from ddtree.bench.run_format import Run
from ddtree.bench.summary import GAPS, ArmFigures, Ratio, Setting, Share
from ddtree.config import Mode

LOSS = "▼"
NOTES = f"""Tokens/s counts new tokens of all requests over wall time, prefill included: the median over
repeats, with the least and the greatest where there are several. *Times plain* and *times chain* are tokens/s
over those of the same engine's `ar` and `chain` arm, the median over repeats; in brackets a 95 % interval,
by a bootstrap over prompts. **{LOSS} marks a loss: slower than what it stands against.**
{MISSING} was not measured. Accept length counts tokens a round, bonus token included. *Decode tokens/s a
request* leaves prefill and waiting out. Gaps are the times between streamed chunks, divided by the tokens of
the chunk.

*Outputs as plain* counts requests with exactly the tokens (of servers that give no ids: the text) that `ar`
gave. In 16 bits texts part at near ties although each token is the target's own choice, so a low share there
shows no fault and a high one proves nothing; `ddtree replay` is the proof."""


def settings_in_order(rows: Iterable[ArmFigures]) -> list[tuple[Setting, list[ArmFigures]]]:
    """Rows by setting: prompt sets as first met, then temperature, then concurrency."""
    listed = list(rows)
    sets = {name: number for number, name in enumerate(dict.fromkeys(r.setting.prompt_set for r in listed))}

    def rank(row: ArmFigures) -> tuple[int, float, int]:
        return sets[row.setting.prompt_set], row.setting.temperature, row.setting.concurrency

    return [
        (found[0].setting, found)
        for _, group in groupby(sorted(listed, key=rank), key=rank)
        if (found := list(group))
    ]


def comparison_tables(rows: Sequence[ArmFigures], *, only_measured: bool = False) -> list[Table]:
    """One table a setting; with `only_measured` without the columns in which all tables miss everything."""
    columns = {
        title: cell
        for title, cell in COLUMNS.items()
        if not only_measured or any(cell(row) != MISSING for row in rows)
    }
    return [
        Table(
            ("arm", *columns),
            [[escaped(row.label), *(cell(row) for cell in columns.values())] for row in found],
            caption=setting_title(setting, found),
        )
        for setting, found in settings_in_order(rows)
    ]


def fastest_table(rows: Sequence[ArmFigures]) -> Table:
    """At each setting the engine's fastest arm, and its fastest tree."""
    found = []
    for setting, arms in settings_in_order(rows):
        for engine in dict.fromkeys(row.engine for row in arms):
            known = [row for row in arms if row.engine == engine and row.tokens_per_s]
            trees = [row for row in known if row.arm.mode is Mode.TREE]
            if known:
                found.append((setting, _fastest(known), _fastest(trees) if trees else None))
    head = ("prompts", "sampling", "fastest arm", "fastest tree", "requests at once", "tokens/s",
            "times plain", "times chain", "tree, times plain", "tree, times chain")  # fmt: skip
    cells = [
        [
            escaped(setting.prompt_set), temperature(setting.temperature), escaped(best.label),
            escaped(tree.label) if tree else MISSING, f"{setting.concurrency:,}", _tokens_per_s(best),
            ratio(best.to_plain), _to_chain(best),
            ratio(tree.to_plain if tree else None), ratio(tree.to_chain if tree else None),
        ]
        for setting, best, tree in found
    ]  # fmt: skip
    return Table(
        head,
        cells,
        caption="The fastest arm of each engine, by tokens/s, and its fastest tree",
        num_text_columns=4,
    )


def _fastest(rows: Sequence[ArmFigures]) -> ArmFigures:
    """By the median over repeats; among equals the first."""
    return max(rows, key=lambda row: row.tokens_per_s.median if row.tokens_per_s else 0.0)


def setting_title(setting: Setting, rows: Sequence[ArmFigures]) -> str:
    """What a table is of, in Markdown."""
    numbers = sorted({row.num_repeats for row in rows})
    shown = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    repeats = "1 repeat" if numbers == [1] else f"{shown} repeats"
    sampling, at_once = temperature(setting.temperature), requests(setting.concurrency)
    return f"{escaped(setting.prompt_set)}, {sampling}, {at_once}, {repeats}"


def temperature(value: float) -> str:
    return "greedy" if value == 0 else f"temperature {value:g}"


def requests(concurrency: int) -> str:
    return "one request at a time" if concurrency == 1 else f"{concurrency:,} requests at once"


# -- cells -----------------------------------------------------------------------------------------


def number(value: float | None, decimals: int = 3) -> str:
    """With three digits, whole from a hundred on, and at most so many decimals."""
    if value is None:
        return MISSING
    size = abs(value)
    return f"{value:,.{min(decimals, 3 - (size >= 1) - (size >= 10) - (size >= 100))}f}"


def ratio(value: Ratio | None) -> str:
    """With its interval; bold and marked where it is a loss."""
    if value is None:
        return MISSING
    shown = f"{value.value:.2f}"
    # A loss too small for two decimals is told as what it is.
    text = f"**{shown} {LOSS}**" if value.value < 1 else shown
    has_interval = value.low is not None and value.high is not None and value.low < value.high
    return f"{text} ({value.low:.2f} to {value.high:.2f})" if has_interval else text


def share(value: Share | None) -> str:
    return MISSING if value is None else f"{value.found / value.total:.0%} of {value.total:,}"


def gibibytes(value: int | None) -> str:
    return MISSING if value is None else number(value / 2**30, 2)


def _tokens_per_s(row: ArmFigures) -> str:
    if row.tokens_per_s is None:
        return MISSING
    middle, low, high = (number(value, 1) for value in row.tokens_per_s)
    return f"{middle} ({low} to {high})" if row.num_repeats > 1 else middle


def _gaps(row: ArmFigures) -> str:
    if not row.between_tokens_ms:
        return MISSING
    return " / ".join(number(row.between_tokens_ms.get(percentile), 2) for percentile in GAPS)


def _to_chain(row: ArmFigures) -> str:
    return MISSING if row.arm.mode is Mode.AR else ratio(row.to_chain)


COLUMNS: Mapping[str, Callable[[ArmFigures], str]] = {
    "tokens/s": _tokens_per_s,
    "times plain": lambda row: ratio(row.to_plain),
    "times chain": _to_chain,
    "accept length": lambda row: number(row.accept_length, 2),
    "rounds": lambda row: number(row.num_rounds, 0),
    "decode tokens/s a request": lambda row: number(row.decode_tokens_per_s, 1),
    "first token, p50, ms": lambda row: number(row.first_token_ms, 1),
    "gaps p50 / p90 / p99, ms": _gaps,
    "correct answers": lambda row: share(row.accuracy),
    "peak memory, GiB": lambda row: gibibytes(row.peak_memory_bytes),
    "J/token": lambda row: number(row.joules_a_token),
    "outputs as plain": lambda row: share(row.equal_to_plain),
}


# -- how the runs were made ------------------------------------------------------------------------


def runs_table(runs: Mapping[str, Run]) -> Table:
    """A column a run: models, device, settings, prompts, versions, machine."""
    columns = {name: dict(_facts(run)) for name, run in runs.items()}
    names = dict.fromkeys(name for facts in columns.values() for name in facts)
    rows = [
        [escaped(name), *(escaped(facts.get(name) or MISSING) for facts in columns.values())]
        for name in names
        if any(facts.get(name) for facts in columns.values())
    ]
    head = ["", *(escaped(name or "value") for name in columns)]
    return Table(head, rows, num_text_columns=len(head))


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    yield "file", run.source
    for role, model in run.header.models.items():
        yield f"{role} model", plain_text(model)
    yield "measured on", run.header.device
    for name, rows in run.header.sets.items():
        yield f"prompts of {name}", plain_text(rows)
    for name, value in run.header.settings.items():
        yield name, plain_text(value)
    yield "arms that failed", ", ".join(f"{arm}: {told}" for arm, told in failures(run))
    sessions = [flat(session) for session in run.sessions]
    for name in dict.fromkeys(name for session in sessions for name in session if name != "command"):
        yield name, ", ".join(dict.fromkeys(session.get(name, MISSING) for session in sessions))
    if run.num_torn:
        yield "lines that broke off", str(run.num_torn)


def failures(run: Run) -> list[tuple[str, str]]:
    """Arms whose engine did not start or died, and what it said, without the arm's name before it."""
    return [
        (arm, str(info["error"]).removeprefix(f"{arm}, "))
        for arm, info in run.engines.items()
        if "error" in info
    ]


def commands(run: Run) -> list[str]:
    """The command lines that measured."""
    told = [session.get("command") for session in run.sessions]
    return list(dict.fromkeys(f"{command}" for command in told if command))


def engines_table(runs: Mapping[str, Run]) -> Table:
    """What each arm's engine said of itself."""
    rows = [
        [escaped(f"{name} {arm}".strip()), escaped(field), escaped(value)]
        for name, run in runs.items()
        for arm, info in run.engines.items()
        for field, value in flat(info).items()
    ]
    return Table(("arm", "field", "value"), rows, num_text_columns=3)


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Nested fields by dotted name, as texts."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = plain_text(value)
    return found


def plain_text(value: Any) -> str:
    """A value of a file in short; empty for nothing."""
    if value is None or value in ("", [], {}):
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text}" for name, part in value.items() if (text := plain_text(part)))
    if isinstance(value, list | tuple):
        return ", ".join(map(plain_text, value))
    return json.dumps(value, default=str)
