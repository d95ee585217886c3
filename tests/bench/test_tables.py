"""The tables of a report: cells by hand, losses marked, what is missing shown."""

import pytest

from ddtree.bench.document import MISSING
from ddtree.bench.run_format import Arm
from ddtree.bench.summary import ArmFigures, Ratio, Setting, Share, Spread, summarise
from ddtree.bench.tables import (
    LOSS,
    commands,
    comparison_tables,
    engines_table,
    fastest_table,
    gibibytes,
    number,
    ratio,
    runs_table,
    settings_in_order,
    share,
)
from report_kit import made_up_run


def arm_figures(arm="embedded tree:4", setting=None, **changes):
    fields = {
        "run": "", "arm": Arm.parse(arm), "setting": setting or Setting("mt_bench", 0.0, 1), "num_repeats": 2,
        "num_requests": 4, "tokens_per_s": Spread(1234.5, 1200.0, 1300.0), "decode_tokens_per_s": 99.5,
        "to_plain": Ratio(2.5, 2.4, 2.6), "to_chain": Ratio(0.9, 0.85, 0.95), "accept_length": 3.456,
        "num_rounds": 1234, "first_token_ms": 12.34,
        "between_tokens_ms": {"50": 1.0, "90": 22.22, "99": 333.3},
        "accuracy": Share(3, 4), "peak_memory_bytes": 3 * 2**29, "joules_a_token": 0.123,
        "equal_to_plain": Share(1, 4), "accept_histogram": {}, "rank_histogram": {}, "stages_ms": {},
    }  # fmt: skip
    return ArmFigures(**fields | changes)


def test_a_row_by_hand():
    (table,) = comparison_tables([arm_figures()])
    assert table.caption == "mt_bench, greedy, one request at a time, 2 repeats"
    assert dict(zip(table.head, table.rows[0], strict=True)) == {
        "arm": "embedded tree:4",
        "tokens/s": "1,234 (1,200 to 1,300)",
        "times plain": "2.50 (2.40 to 2.60)",
        "times chain": f"**0.90 {LOSS}** (0.85 to 0.95)",
        "accept length": "3.46",
        "rounds": "1,234",
        "decode tokens/s a request": "99.5",
        "first token, p50, ms": "12.3",
        "gaps p50 / p90 / p99, ms": "1.00 / 22.2 / 333",
        "correct answers": "75% of 4",
        "peak memory, GiB": "1.50",
        "J/token": "0.123",
        "outputs as plain": "25% of 4",
    }


NOTHING = dict.fromkeys(
    (
        "tokens_per_s", "decode_tokens_per_s", "to_plain", "to_chain", "accept_length", "num_rounds",
        "first_token_ms", "accuracy", "peak_memory_bytes", "joules_a_token", "equal_to_plain",
    )
) | {"between_tokens_ms": {}}  # fmt: skip


def test_what_is_missing_is_shown_as_missing():
    (table,) = comparison_tables([arm_figures(**NOTHING)])
    assert set(table.rows[0][1:]) == {MISSING}


def test_columns_without_a_figure_can_be_left_out():
    rows = [arm_figures(**NOTHING), arm_figures(**NOTHING | {"accept_length": 2.0})]
    (table,) = comparison_tables(rows, only_measured=True)
    assert table.head == ("arm", "accept length")
    assert [row[1] for row in table.rows] == [MISSING, "2.00"]


@pytest.mark.parametrize(("value", "told"), [
    (Ratio(1.0, None, None), "1.00"), (Ratio(1.0, 1.0, 1.0), "1.00"), (None, MISSING),
    (Ratio(0.999, 0.99, 1.01), f"**1.00 {LOSS}** (0.99 to 1.01)"),
    (Ratio(1.5, 0.9, 2.0), "1.50 (0.90 to 2.00)"),
])  # fmt: skip
def test_losses_are_marked_however_small(value, told):
    assert ratio(value) == told


@pytest.mark.parametrize(("value", "decimals", "told"), [
    (None, 3, MISSING), (0.0, 2, "0.00"), (0.1234, 3, "0.123"), (9.994, 3, "9.99"), (12.34, 3, "12.3"),
    (123.4, 3, "123"), (98765.4, 3, "98,765"), (12.0, 0, "12"), (-3.14159, 1, "-3.1"),
])  # fmt: skip
def test_numbers_have_as_many_digits_as_they_are_worth(value, decimals, told):
    assert number(value, decimals) == told


def test_shares_and_sizes():
    assert share(Share(0, 3)) == "0% of 3"
    assert share(None) == gibibytes(None) == MISSING


def test_tables_are_by_setting():
    settings = [Setting("b", 1.0, 8), Setting("a", 0.0, 1), Setting("b", 0.0, 1), Setting("b", 1.0, 1)]
    ordered = settings_in_order([arm_figures(setting=setting) for setting in settings])
    assert [setting for setting, _ in ordered] == [
        Setting("b", 0.0, 1), Setting("b", 1.0, 1), Setting("b", 1.0, 8), Setting("a", 0.0, 1)
    ]  # fmt: skip
    captions = [table.caption for table in comparison_tables([arm_figures(setting=settings[0])])]
    assert captions == ["b, temperature 1, 8 requests at once, 2 repeats"]


def test_the_fastest_arm_may_be_no_tree():
    rows = [
        arm_figures("embedded ar", tokens_per_s=Spread(10, 9, 11), to_chain=Ratio(0.5, None, None)),
        arm_figures("embedded chain", tokens_per_s=Spread(30, 9, 31), to_chain=Ratio(1, 1, 1)),
        arm_figures("embedded tree:4", tokens_per_s=Spread(20, 9, 41)),
    ]
    (row,) = fastest_table(rows).rows
    assert row[2:4] == ["embedded chain", "embedded tree:4"]
    assert row[-1].startswith(f"**0.90 {LOSS}**")
    (row,) = fastest_table(rows[:1]).rows
    assert row[2:4] == ["embedded ar", MISSING]
    assert row[7] == MISSING  # plain decoding is not measured against the chain


def test_how_runs_were_made_stands_side_by_side():
    one, other = made_up_run(repeats=1), made_up_run(repeats=1, changes={"device": "cpu"})
    other.engines["sglang chain"] = {"error": "no such | model"}
    other.num_torn = 1
    table = runs_table({"a": one, "b": other})
    cells = {row[0]: list(row[1:]) for row in table.rows}
    assert table.head == ["", "a", "b"]
    assert cells["measured on"] == ["NVIDIA H200", "cpu"]
    assert cells["drafter model"] == ["name smollm2-135m-dflash-b16"] * 2
    assert cells["drafter"] == ["auto", "auto"]  # the setting stands beside what it came to
    assert cells["arms that failed"] == [MISSING, r"sglang chain: no such \| model"]
    assert cells["lines that broke off"] == [MISSING, "1"]
    assert cells["packages.torch"] == ["2.11.0", "2.11.0"]
    assert "packages.sglang" not in cells  # neither had it
    assert commands(one) == ["ddtree bench --engine embedded --output run.jsonl"]
    assert ["embedded ar", "versions.torch", "2.11.0"] in engines_table({"": one}).rows


def test_rows_of_a_run_fill_their_tables():
    rows = summarise(made_up_run(repeats=1, concurrencies=(1, 8)))
    tables = comparison_tables(rows)
    assert len(tables) == 3 * 2 * 2
    assert all(len(row) == len(table.head) for table in tables for row in table.rows)
