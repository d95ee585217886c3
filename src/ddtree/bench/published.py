"""Figures that others published, from `published.json`: who, where, on what, and what they call it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any

from ddtree.bench.document import MISSING, Block, Table, Text, escaped

INTRODUCTION = """**Published, theirs.** None of these figures was measured here. Most are of other models,
drafters, hardware and engines, so they stand beside ours and are not compared with them: accept lengths
depend on the pair and the prompts, not on the engine; speeds depend on everything. A cell reads: times plain
decoding, or times the same engine's chain where it says so; tokens/s; accept length (τ)."""


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """One published figure; None where it was not told.

    Attributes:
        method: of decoding, as its source calls it.
        node_budget: of a tree.
        speed_up: over plain decoding; `to_chain`: over the same engine's chain.
    """

    model: str
    prompt_set: str
    method: str
    concurrency: int | None = None
    temperature: float | None = None
    node_budget: int | None = None
    speed_up: float | None = None
    to_chain: float | None = None
    tokens_per_s: float | None = None
    accept_length: float | None = None

    @property
    def method_and_budget(self) -> str:
        return self.method if self.node_budget is None else f"{self.method}, {self.node_budget} nodes"


@dataclass(frozen=True, slots=True)
class PublishedSource:
    """Where figures come from.

    Attributes:
        who, where: its authors, and the page.
        read_in: kind of text that the figures were read in: paper, docs, code, card or thread.
        hardware, engine, note: what they measured on, and how.
    """

    who: str
    where: str
    read_in: str
    hardware: str
    engine: str
    note: str
    figures: tuple[PublishedFigure, ...] = field(default_factory=tuple)


@lru_cache(maxsize=1)
def _document() -> dict[str, Any]:
    text = files("ddtree.bench").joinpath("published.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def published_sources() -> tuple[PublishedSource, ...]:
    """All sources, the DDTree paper first."""
    return tuple(
        PublishedSource(**source | {"figures": tuple(PublishedFigure(**f) for f in source["figures"])})
        for source in _document()["sources"]
    )


def paper_budget_curve() -> list[tuple[int | None, float, float]]:
    """Figure 3 of the paper: node budget (None: the chain), speed-up over plain, accept length."""
    figures = next(source.figures for source in published_sources() if source.where.endswith("figure 3"))
    return [(f.node_budget, f.speed_up or 0.0, f.accept_length or 0.0) for f in figures]


def paper_rounds() -> dict[str, list[float]]:
    """Figure 4 of the paper: percent of rounds by accept length from 1, of the chain and of a tree."""
    return {name: v for name, v in _document()["rounds_by_accept_length"].items() if isinstance(v, list)}


def published_blocks() -> list[Block]:
    """The published figures, a table a source."""
    blocks: list[Block] = [Text(INTRODUCTION)]
    for source in published_sources():
        blocks.append(Table(*_pivot(source.figures), caption=_caption(source), num_text_columns=2))
    lengths = paper_rounds()
    rows = [[escaped(name), *(f"{share:g}" for share in shares)] for name, shares in lengths.items()]
    head = ("percent of rounds by accept length", *map(str, range(1, len(rows[0]))))
    blocks.append(Table(head, rows, caption=escaped(_document()["rounds_by_accept_length"]["where"])))
    return blocks


def _caption(source: PublishedSource) -> str:
    told = f"{source.who}; {source.where}; {source.hardware}; {source.engine}; read in: {source.read_in}"
    return escaped(f"{told}. {source.note}" if source.note else told)


def _pivot(figures: Sequence[PublishedFigure]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: a row for what was decoded, a column for how."""
    methods = list(dict.fromkeys(f.method_and_budget for f in figures))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for figure in figures:
        rows.setdefault(_workload(figure), {})[figure.method_and_budget] = _cell(figure)
    head = ["model", "prompts", *map(escaped, methods)]
    cells = [[*map(escaped, at), *(row.get(m, MISSING) for m in methods)] for at, row in rows.items()]
    return head, cells


def _workload(figure: PublishedFigure) -> tuple[str, str]:
    parts = [figure.prompt_set]
    if figure.temperature is not None:
        parts.append(f"T={figure.temperature:g}")
    if figure.concurrency not in (None, 1):
        parts.append(f"{figure.concurrency} at once")
    return figure.model, ", ".join(parts)


def _cell(figure: PublishedFigure) -> str:
    parts = []
    if figure.speed_up is not None:
        parts.append(f"{figure.speed_up:.2f}x")
    if figure.to_chain is not None:
        parts.append(f"{figure.to_chain:.2f}x chain")
    if figure.tokens_per_s is not None:
        parts.append(f"{figure.tokens_per_s:,g} tokens/s")
    if figure.accept_length is not None:
        parts.append(f"τ {figure.accept_length:.2f}")
    return ", ".join(parts)
