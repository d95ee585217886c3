"""`ddtree report`: one page, its plots and its tables from the files of benchmark runs; see docs/bench.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

from ddtree.bench.document import Block, Document, Section, Text, code, escaped, to_html, to_markdown
from ddtree.bench.published import published_blocks, published_sources
from ddtree.bench.recommendation import Recommendation, markdown, recommend, to_json
from ddtree.bench.run_format import Run, read_run, unlike_workloads
from ddtree.bench.summary import ArmFigures, summarise
from ddtree.bench.tables import (
    NOTES,
    commands,
    comparison_tables,
    engines_table,
    failures,
    fastest_table,
    plain_text,
    runs_table,
)
from ddtree.bench.whole_files import write_whole
from ddtree.errors import ConfigError, short_repr

TITLE = "DDTree benchmark report"
PAGE, MARKDOWN, FIGURES, TRACE_PAGE = "index.html", "report.md", "report.json", "trace.html"


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What goes into a report beside its runs.

    Attributes:
        plain: arm that engines without an `ar` arm are compared with.
        with_paper: draw the DDTree paper's figures into the plots over node budget.
        has_trace_page: `trace.html` stands beside the page, which points to it.
    """

    plain: str | None = None
    with_paper: bool = False
    has_trace_page: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """A report before it is written: the document, and every figure of it ready for JSON."""

    document: Document
    figures: Mapping[str, Any]


def write_report(paths: Sequence[Path], folder: Path, options: ReportOptions | None = None) -> list[Path]:
    """Read runs, and write `index.html`, `report.md`, `report.json` and the plots; returns the files.

    Raises:
        ConfigError: a run cannot be read or has no cells, runs are unlike, or the folder cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    report = make_report([read_run(path) for path in paths], options)
    return write_files(folder, report_files(report))


def make_report(runs: Sequence[Run], options: ReportOptions | None = None) -> Report:
    """The report of one run, or of several of one workload.

    Raises:
        ConfigError: a run has no cells, or runs are unlike in target, prompts or max_tokens.
        MissingExtraError: matplotlib is not installed.
    """
    from ddtree.bench.plots import report_pictures

    options = options or ReportOptions()
    named = named_runs(runs)
    check_alike(named)
    rows = [row for name, run in named.items() for row in summarise(run, name, _plain_of(run, runs, options))]
    advice = {name: recommend(run) for name, run in named.items()}
    sections = [
        Section("At a glance", [fastest_table(rows), *failed_arms(named)]),
        *_recommendations(advice),
        Section("Plots", report_pictures(rows, with_paper=options.with_paper)),
        Section("Every arm", [Text(NOTES), *comparison_tables(rows)]),
        Section("How they were run", [runs_table(named), *_commands(named)]),
        Section("What the engines said of themselves", [engines_table(named)], is_folded=True),
        Section("Published figures", published_blocks(), is_folded=True),
    ]
    pages = {"A trace, round by round": TRACE_PAGE} if options.has_trace_page else {}
    return Report(Document(TITLE, _introduction(named), sections, pages), _figures(named, rows, advice))


def _plain_of(run: Run, runs: Sequence[Run], options: ReportOptions) -> str | None:
    """The arm to compare with, where this run has it; where none has, each is to refuse it."""
    holders = [id(each) for each in runs if any(key.arm == options.plain for key in each.cells)]
    return options.plain if not holders or id(run) in holders else None


def named_runs(runs: Sequence[Run]) -> dict[str, Run]:
    """Runs by the names of their files, made unique; one alone has no name."""
    if len(runs) == 1:
        return {"": runs[0]}
    named: dict[str, Run] = {}
    for run in runs:
        stem, number = Path(run.source).stem, 1
        name = stem
        while name in named:
            number += 1
            name = f"{stem}-{number}"
        named[name] = run
    return named


def check_measured(run: Run) -> None:
    """Raise `ConfigError` for a run without cells, with what its arms failed of."""
    if run.cells:
        return
    told = "".join(f"; {arm} failed: {why}" for arm, why in failures(run)[:3])
    raise ConfigError(f"{short_repr(run.source)} has no measured cell yet{told}; give its command again")


def check_alike(named: Mapping[str, Run]) -> None:
    """Raise `ConfigError` for runs without cells, or whose figures may not stand side by side."""
    for run in named.values():
        check_measured(run)
    for one, other in combinations(named.values(), 2):
        differences = unlike_workloads(one.header, other.header)
        if differences:
            raise ConfigError(
                f"{short_repr(one.source)} and {short_repr(other.source)} cannot stand side by side "
                f"({'; '.join(differences)}): report them one by one"
            )


def report_files(report: Report) -> dict[str, bytes]:
    """The files of a report by name."""
    style = files("ddtree.bench").joinpath("static/report.css").read_text(encoding="utf-8")
    figures = json.dumps(_strict(report.figures), indent=1, allow_nan=False)
    return {
        PAGE: to_html(report.document, style).encode(),
        MARKDOWN: to_markdown(report.document).encode(),
        FIGURES: (figures + "\n").encode(),
        **{f"{picture.name}.png": picture.png for picture in report.document.pictures()},
    }


def write_files(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write files into a folder, which is made; returns their paths.

    Raises:
        ConfigError: that is not possible; the files of a report that was there are as they were.
    """
    make_folder(folder)
    placed = {folder / name: content for name, content in contents.items()}
    try:
        write_whole(placed)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    return list(placed)


def make_folder(folder: Path) -> None:
    """Make the folder of a report, or raise `ConfigError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise _cannot_write(folder, error) from error


def _cannot_write(folder: Path, error: OSError | ValueError) -> ConfigError:
    why = error.strerror if isinstance(error, OSError) else error
    return ConfigError(
        f"the report cannot be written to {short_repr(str(folder))}: {why}; give another --output"
    )


# -- parts -----------------------------------------------------------------------------------------


def _introduction(named: Mapping[str, Run]) -> str:
    told = "; ".join(dict.fromkeys(run_in_short(run) for run in named.values()))
    made_of = ", ".join(code(run.source) for run in named.values())
    several = " Ratios are made within a run: the runs were not measured side by side."
    return f"{told}. Made by `ddtree report` from {made_of}.{several if len(named) > 1 else ''}"


def run_in_short(run: Run) -> str:
    """Models, device and days, in Markdown."""
    models = ", ".join(f"{role} {_name(model)}" for role, model in run.header.models.items())
    days = sorted({str(session.get("time_utc", ""))[:10] for session in run.sessions} - {""})
    when = f"{days[0]} to {days[-1]}" if len(days) > 1 else "".join(days)
    return "; ".join(escaped(part) for part in (models, run.header.device, when) if part)


def _name(model: Any) -> str:
    return plain_text(model.get("name")) if isinstance(model, Mapping) else plain_text(model) or "none"


def failed_arms(named: Mapping[str, Run]) -> Iterator[Block]:
    """A list of the arms that were not measured, and why; nothing where there are none."""
    told = [
        f"- {escaped(f'{name} {arm}'.strip())} was not measured, or not to its end: {escaped(why)}"
        for name, run in named.items()
        for arm, why in failures(run)
    ]
    if told:
        yield Text("\n".join(told))


def _commands(named: Mapping[str, Run]) -> Iterator[Text]:
    for name, run in named.items():
        for command in commands(run):
            yield Text(f"{escaped(name)}: {code(command)}" if name else code(command))


def _recommendations(advice: Mapping[str, Recommendation]) -> Iterator[Section]:
    for name, recommendation in advice.items():
        title = f"Recommendation: {escaped(name)}" if name else "Recommendation"
        yield Section(title, [Text(markdown(recommendation))])


def _figures(
    named: Mapping[str, Run], rows: Sequence[ArmFigures], advice: Mapping[str, Recommendation]
) -> dict[str, Any]:
    return {
        "runs": [
            {
                "name": name,
                "source": run.source,
                **asdict(run.header),
                "sessions": run.sessions,
                "engines": run.engines,
                "recommendation": to_json(advice[name]),
                "arms": [row.to_json() for row in rows if row.run == name],
            }
            for name, run in named.items()
        ],
        "published_theirs": [asdict(source) for source in published_sources()],
    }


def _strict(figures: Mapping[str, Any]) -> Any:
    """The same in JSON's own types, null for numbers that JSON has not."""
    return json.loads(json.dumps(figures, default=str), parse_constant=lambda _: None)
