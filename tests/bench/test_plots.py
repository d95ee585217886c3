"""The plots: the lines and bars that they hold, from any rows, the same bytes at every run."""

import math
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from matplotlib.figure import Figure

from ddtree.bench import plot_style, plots
from ddtree.bench.plot_style import arm_looks, drawing, label, slug
from ddtree.bench.plots import PAPER, _budget_figure, over_concurrency, report_pictures, speed_over_length
from ddtree.bench.plots_rounds import PLOTS, _draw_panels, _few_trees, draw_rounds, share_above, shares
from ddtree.bench.run_format import Arm
from ddtree.bench.summary import summarise
from ddtree.errors import MissingExtraError
from report_kit import NASTY_NAMES, any_runs, made_up_run


@pytest.fixture(scope="module")
def rows():
    return summarise(made_up_run(temperatures=(0.0,), repeats=1, sets=("gsm8k", "mt_bench")))


@pytest.fixture
def undrawn(monkeypatch):
    """Figures by their pictures' names, none of them written: writing takes most of the time."""
    figures = {}

    def keep(figure, name, title, alt):
        figures[name] = figure
        return plot_style.Picture(name, title, alt, "", b"")

    for module in ("plots", "plots_rounds"):
        monkeypatch.setattr(sys.modules[f"ddtree.bench.{module}"], "picture", keep)
    return figures


def lines(axes):
    """Points of each named line."""
    return {
        line.get_label(): list(zip(*line.get_data(), strict=True))
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
    }


def test_speed_up_and_length_over_budget(rows):
    with drawing():
        figure = _budget_figure([row for row in rows if row.arm.mode != "ar"], with_paper=False)
    speed, length = figure.axes
    trees = [
        row for row in rows if row.setting.prompt_set == "gsm8k" and isinstance(row.arm.node_budget, int)
    ]
    expected = [
        (math.log2(row.arm.node_budget), row.to_plain.value, row.accept_length)
        for row in trees
        if row.arm.node_budget
    ]
    assert lines(speed)["gsm8k"] == [(x, y) for x, y, _ in expected]
    assert lines(length)["gsm8k"] == [(x, y) for x, _, y in expected]
    assert [tick.get_text() for tick in speed.get_xticklabels()] == [
        "chain", "4", "8", "16", "32", "64", "128", "auto"
    ]  # fmt: skip
    chain = next(row for row in rows if row.arm.mode == "chain" and row.setting.prompt_set == "gsm8k")
    alone = [line for line in length.get_lines() if line.get_linestyle() == "None"]
    assert (1.0, chain.accept_length) in list(zip(*alone[0].get_data(), strict=True))


def test_the_papers_curve_is_drawn_where_it_is_asked_for(rows):
    with drawing():
        with_it, without = (_budget_figure(rows, with_paper=asked).axes[0] for asked in (True, False))
    assert lines(with_it)[PAPER][0] == (1.0, 5.56)  # the chain's place, left of 4 nodes
    assert lines(with_it)[PAPER][-1] == (10.0, 6.82)
    assert PAPER not in lines(without)


def test_without_plain_decoding_the_plot_says_so(rows):
    with drawing():
        drafted = [replace(row, to_plain=None) for row in rows]
        speed, length = _budget_figure(drafted, with_paper=False).axes
    assert [text.get_text() for text in speed.texts] == ["no plain decoding to compare with"]
    assert speed.get_xlim() == length.get_xlim()
    assert list(length.texts) == []


def test_no_point_is_cut_off(rows):
    with drawing():
        for axes in _budget_figure(rows, with_paper=True).axes:
            low, high = axes.get_ylim()
            assert low == 0
            assert all(y < high for points in lines(axes).values() for _, y in points)


def test_tokens_over_concurrency(undrawn):
    several = summarise(made_up_run(temperatures=(0.0,), repeats=1, concurrencies=(1, 8, 4), sets=("gsm8k",)))
    with drawing():
        list(over_concurrency(several))
    (axes,) = undrawn["concurrency-t0"].axes
    chain = {r.setting.concurrency: r.tokens_per_s.median for r in several if r.arm.mode == "chain"}
    assert lines(axes)["embedded chain"] == sorted(chain.items())


def test_one_concurrency_makes_no_plot_over_it(rows, undrawn):
    with drawing():
        assert list(over_concurrency(rows)) == []


def test_speed_over_length_has_a_point_an_arm(rows, undrawn):
    with drawing():
        list(speed_over_length(rows))
    panel = undrawn["speed-length-t0-c1"].axes[0]
    points = [tuple(container[0].get_xydata()[0]) for container in panel.containers]
    gsm8k = [row for row in rows if row.setting.prompt_set == "gsm8k"]
    assert points == [(row.accept_length, row.tokens_per_s.median) for row in gsm8k]


def test_shares_by_hand():
    counts = {1: 5, 2: 3, 4: 2}
    assert shares(counts) == {1: 50.0, 2: 30.0, 4: 20.0}
    assert share_above(counts) == {1: 0.5, 2: 0.2, 3: 0.2, 4: 0.0}


def test_a_few_trees_stand_for_all(rows):
    plans = [row.arm.plan for row in _few_trees([r for r in rows if r.setting.prompt_set == "gsm8k"])]
    assert plans == ["ar", "chain", "tree:4", "tree:32", "tree:128", "tree:auto"]


def test_stages_are_stacked_in_the_order_of_a_round(rows):
    stages = next(plot for plot in PLOTS if plot.name == "stages")
    of_set = [row for row in rows if row.setting.prompt_set == "gsm8k" and row.stages_ms]
    with drawing():
        (axes,) = _draw_panels(of_set, stages).axes
    assert [bars.get_label() for bars in axes.containers] == ["draft", "build", "verify", "commit"]
    first = [bars[0] for bars in axes.containers]
    for before, after in pairwise(first):
        assert after.get_x() == pytest.approx(before.get_x() + before.get_width())
    assert sum(bar.get_width() for bar in first) == pytest.approx(sum(of_set[0].stages_ms.values()))


def test_each_engine_and_temperature_has_its_rounds(undrawn):
    run = made_up_run(arms=("embedded chain", "sglang chain", "sglang ar"), repeats=1, sets=("gsm8k",))
    with drawing():
        made = list(draw_rounds(summarise(run)))
    assert [picture.name for picture in made if picture.name.startswith("lengths")] == [
        "lengths-1-embedded", "lengths-2-sglang", "lengths-3-embedded", "lengths-4-sglang"
    ]  # fmt: skip


def test_the_same_rows_make_the_same_bytes(rows):
    few = [
        row for row in rows if row.setting.prompt_set == "gsm8k" and row.arm.plan in ("ar", "chain", "tree:4")
    ]
    with drawing():
        first, again = (list(speed_over_length(few)) for _ in range(2))
    assert first == again
    assert first[0].svg.startswith("<?xml")
    assert first[0].png.startswith(b"\x89PNG")
    assert first[0].title == "Tokens/s over accept length: greedy, one request at a time"


def test_every_picture_has_its_own_name_and_says_what_it_shows(rows, undrawn):
    made = report_pictures(rows)
    assert len({picture.name for picture in made}) == len(made) == 6
    assert all(picture.alt.endswith(".") and picture.title for picture in made)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(any_runs())
def test_any_run_is_plotted(undrawn, run):
    undrawn.clear()
    made = report_pictures(summarise(run), with_paper=True)
    assert len(made) == len(undrawn)
    for figure in undrawn.values():
        assert isinstance(figure, Figure)
        for axes in (axes for axes in figure.axes if axes.get_visible()):
            assert axes.get_xlabel()


def test_names_that_matplotlib_reads_are_only_shown():
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with drawing():
        figure = Figure()
        axes = figure.subplots()
        for name in NASTY_NAMES:
            axes.plot([1, 2], label=label(name))
        named = axes.get_legend_handles_labels()[1]
        axes.legend()
        FigureCanvasAgg(figure).draw()
    assert len(named) == len([name for name in NASTY_NAMES if name])
    assert all(len(name) <= plot_style.MAX_LABEL + 1 for name in named)


def test_arms_look_different():
    plans = ("ar", "chain", "tree:4", "tree:8", "tree:16", "tree:auto")
    arms = [Arm.parse(f"embedded {plan}") for plan in plans]
    looks = arm_looks(arms)
    assert len({look.colour for look in looks.values()}) == len(arms)
    assert len({look.marker for look in looks.values()}) == len(arms)


def test_file_names_are_plain():
    assert slug("http://127.0.0.1:8080/v1") == "http-127-0-0-1-8080-v1"
    assert slug("../..") == "x"


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"sglang-ddtree\[bench\]"):
        plots.report_pictures([])
