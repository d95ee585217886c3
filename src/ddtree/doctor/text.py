"""A report as lines of text, for a terminal of any width or for a pipe."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from ddtree.doctor.report import Finding, Level, Report, Section

MAX_NAMES = 8
INDENT = 8  # of a finding's text: room for its level
LEAST_WIDTH = 40
Line = tuple[Level | None, str]
"""A level, where the line begins a finding, and the text without it."""


def report_lines(report: Report, width: int | None) -> Iterator[Line]:
    """All lines; with a width they are folded to it, without one each sentence is a line, for grep."""
    return ((level, printable(line)) for level, line in all_lines(report, width))


def printable(line: str) -> str:
    """A line with the control characters that names of files can have shown, not obeyed."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def all_lines(report: Report, width: int | None) -> Iterator[Line]:
    for section in report.sections:
        if section.findings or section.lines:
            yield from section_lines(section, width)
            yield None, ""
    yield None, report.verdict


def section_lines(section: Section, width: int | None) -> Iterator[Line]:
    yield None, section.title
    for index, finding in enumerate(section.findings):
        # Of findings in a row with one remedy, the last tells it.
        after = section.findings[index + 1 : index + 2]
        is_told_later = not finding.names and remedies(after) == remedies([finding])
        yield from finding_lines(finding, width, with_remedy=not is_told_later)
    # Tables and commands stay as they are: a command that is folded cannot be pasted.
    yield from ((None, f"{'':{INDENT}}{line}") for line in section.lines)


def remedies(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    return [(finding.why, finding.todo) for finding in findings]


def finding_lines(finding: Finding, width: int | None, *, with_remedy: bool) -> Iterator[Line]:
    first, *rest = fold(finding.what, width, INDENT)
    yield finding.level, first
    yield from ((None, line) for line in rest)
    for label, text in (("why: ", finding.why), ("do:  ", finding.todo)):
        if text and with_remedy:
            yield from ((None, line) for line in fold(text, width, INDENT, label))
    shown = finding.names[:MAX_NAMES]
    yield from ((None, f"{'':{INDENT + 2}}{name}") for name in shown)
    if (more := len(finding.names) - len(shown)) > 0:
        yield None, f"{'':{INDENT + 2}}and {more} more (--json has all)"


def fold(text: str, width: int | None, indent: int, label: str = "") -> list[str]:
    """A text below an indent; long words, such as paths, stay whole."""
    if width is None:
        return [f"{'':{indent}}{label}{text}"]
    return textwrap.wrap(
        text, max(width, LEAST_WIDTH),
        initial_indent=f"{'':{indent}}{label}", subsequent_indent=" " * (indent + len(label)),
        break_long_words=False, break_on_hyphens=False,
    ) or [""]  # fmt: skip
