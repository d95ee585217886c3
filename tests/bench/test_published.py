"""Published figures: as their sources have them, in agreement with each other, and marked as theirs."""

from collections import Counter

import pytest

from ddtree.bench.document import Document, Section, Table, to_markdown
from ddtree.bench.published import paper_budget_curve, paper_rounds, published_blocks, published_sources


@pytest.fixture(scope="module")
def sources():
    return published_sources()


@pytest.fixture(scope="module")
def table_1(sources):
    return next(source.figures for source in sources if source.where.endswith("table 1"))


def test_the_papers_table_is_whole(table_1):
    """Three targets, ten sets, two temperatures, and in all 60 cells the tree wins."""
    cells = {}
    for figure in table_1:
        cell = cells.setdefault((figure.model, figure.prompt_set, figure.temperature), {})
        cell[figure.method.split()[0].strip(",")] = figure
    assert len(cells) == 60
    assert Counter(model for model, _, _ in cells) == {
        "Qwen3-4B": 20, "Qwen3-8B": 20, "Qwen3-Coder-30B-A3B": 20
    }  # fmt: skip
    for cell in cells.values():
        assert cell["DDTree"].speed_up > cell["DFlash"].speed_up > 1
        assert cell["DDTree"].accept_length > cell["DFlash"].accept_length > 1
    math = cells["Qwen3-8B", "MATH-500", 0]
    assert (math["DFlash"].speed_up, math["DDTree"].accept_length) == (5.56, 10.73)


def test_the_papers_curve_agrees_with_its_table_and_its_histogram(table_1):
    curve = paper_budget_curve()
    assert [budget for budget, _, _ in curve] == [None, 16, 32, 64, 128, 256, 512, 1024]
    best = max(curve, key=lambda point: point[1])
    listed = [f for f in table_1 if (f.model, f.prompt_set, f.temperature) == ("Qwen3-8B", "MATH-500", 0)]
    assert [(f.speed_up, f.accept_length) for f in listed] == [curve[0][1:], best[1:]]
    for name, (_, _, accept_length) in zip(paper_rounds(), (curve[0], best), strict=True):
        shares = paper_rounds()[name]
        assert sum(shares) == pytest.approx(100, abs=0.5)
        # The paper's means are over prompts, the histogram over rounds.
        mean = sum(length * share for length, share in enumerate(shares, 1)) / sum(shares)
        assert mean == pytest.approx(accept_length, rel=0.15)


def test_every_figure_says_who_where_and_something(sources):
    assert len(sources) >= 15
    for source in sources:
        assert all((source.who, source.where, source.read_in, source.hardware, source.engine)), source
        for figure in source.figures:
            told = (figure.speed_up, figure.to_chain, figure.tokens_per_s, figure.accept_length)
            assert any(value is not None and value > 0 for value in told), figure


def test_losses_of_others_are_among_them(sources):
    every = [figure for source in sources for figure in source.figures]
    assert any(figure.to_chain is not None and figure.to_chain < 0.7 for figure in every)
    assert any(figure.speed_up is not None and figure.speed_up < 1 for figure in every)


def test_no_two_figures_share_a_cell(sources):
    """A table has one place for a workload and a method."""
    for source in sources:
        places = Counter(
            (f.model, f.prompt_set, f.concurrency, f.temperature, f.method_and_budget) for f in source.figures
        )
        assert max(places.values()) == 1, source.who


def test_tables_are_marked_as_theirs():
    blocks = published_blocks()
    text = to_markdown(Document("t", "", [Section("Published", blocks)]))
    assert "**Published, theirs.**" in text
    assert "| Qwen3-8B | MATH-500, T=0 | 5.56x, τ 7.79 | 7.52x, τ 10.73 |" in text
    for block in blocks:
        if isinstance(block, Table):
            assert {len(row) for row in block.rows} == {len(block.head)}
