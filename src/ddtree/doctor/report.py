"""What the doctor says: findings, in sections, with one verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How bad a finding is: an error means that DDTREE does not run, or not as planned."""

    OK = "ok"
    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        id: a name for scripts that stays, `section.matter`.
        what: what is so, in one sentence without a full stop.
        why: why it matters; empty where nothing follows from it.
        todo: what to do; empty where nothing is to be done.
        names: files or symbols that it is about, all of them; shown cut short.
    """

    id: str
    level: Level
    what: str
    why: str = ""
    todo: str = ""
    names: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The finding as plain values; `names` only where there are some."""
        found: dict[str, Any] = {
            "id": self.id, "level": str(self.level), "what": self.what, "why": self.why, "do": self.todo,
        }  # fmt: skip
        return {**found, "names": list(self.names)} if self.names else found


@dataclass(frozen=True, slots=True)
class Section:
    """Findings on one matter.

    Attributes:
        name: its key in the JSON document.
        title: its heading.
        data: the same matter as values, for scripts.
        lines: what stands below the findings as it is: a table, or a command to paste.
    """

    name: str
    title: str
    findings: tuple[Finding, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """All sections, in the order in which they are read.

    Attributes:
        praise: the verdict's words where nothing stops DDTREE.
        blame: its words where something does.
    """

    sections: tuple[Section, ...]
    praise: str = "nothing here stops DDTREE"
    blame: str = "DDTREE will not work here as it is"

    def findings(self) -> Iterator[Finding]:
        """All findings in order."""
        return (finding for section in self.sections for finding in section.findings)

    def count(self, level: Level) -> int:
        """How many findings have a level."""
        return Counter(finding.level for finding in self.findings())[level]

    @property
    def fits(self) -> bool:
        """Whether nothing that was looked at stops DDTREE."""
        return not self.count(Level.ERROR)

    @property
    def verdict(self) -> str:
        """One line on the whole."""
        counts = [(self.count(Level.ERROR), "error"), (self.count(Level.WARN), "warning")]
        told = ", ".join(f"{n} {word}{'s' * (n != 1)}" for n, word in counts if n)
        return f"{self.praise if self.fits else self.blame}{f': {told}' if told else ''}"

    def to_json(self) -> dict[str, Any]:
        """The verdict, each finding with its section, and the values of each section under its name."""
        rows = [{"section": s.name, **f.to_json()} for s in self.sections for f in s.findings]
        return {
            "fits": self.fits,
            "verdict": self.verdict,
            "findings": rows,
            **{section.name: section.data for section in self.sections},
        }
