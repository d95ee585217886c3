"""The CSV of a training run: what is written is read, a resumed run goes on, and it can be drawn."""

import math
import struct
import sys

import pytest

from ddtree.errors import ConfigError, MissingExtraError
from ddtree.train.plot import plot_log
from ddtree.train.training_log import LogRow, TrainingLog, read_log

DEPTH = 3
COLUMNS = ("chain", "16")


def row(step, **accept):
    return LogRow(step, 10 - step / 8, 1e-3, 0.5, 1234.5, (0.5, 0.25, 0.125), accept)


def write_log(path, steps):
    log = TrainingLog(path, DEPTH, COLUMNS, resume_step=0)
    for step in steps:
        log.append(row(step))
    return log


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "log.csv"
    log = write_log(path, [])
    rows = [row(1), row(2, **{"chain": 1.5, "16": 2.25}), row(3, chain=2.0)]
    for item in rows:
        log.append(item)
        assert read_log(path)[-1] == item  # at once, not when the run ends
    assert read_log(path) == rows
    header = path.read_text().splitlines()[0]
    assert header == (
        "step,loss,learning_rate,grad_norm,tokens_per_s,correct_1,correct_2,correct_3,accept_chain,accept_16"
    )


def test_a_resumed_log_drops_the_rows_that_are_made_again(tmp_path):
    path = tmp_path / "log.csv"
    write_log(path, [10, 20, 30, 40])
    log = TrainingLog(path, DEPTH, COLUMNS, resume_step=20)
    assert [item.step for item in read_log(path)] == [10, 20]
    log.append(row(30))
    assert [item.step for item in read_log(path)] == [10, 20, 30]


def test_a_log_that_does_not_resume_begins_anew(tmp_path):
    path = tmp_path / "log.csv"
    write_log(path, [10, 20])
    write_log(path, [])
    assert read_log(path) == []


def test_a_row_that_was_cut_off_is_left_out_and_goes_when_resuming(tmp_path):
    path = tmp_path / "log.csv"
    write_log(path, [10, 20])
    text = path.read_text()
    path.write_text(text + "30,0.5,0.0")
    assert [item.step for item in read_log(path)] == [10, 20]
    TrainingLog(path, DEPTH, COLUMNS, resume_step=40)
    assert path.read_text() == text


def test_a_row_cut_off_inside_its_last_cell_is_left_out(tmp_path):
    path = tmp_path / "log.csv"
    log = write_log(path, [10])
    log.append(row(20, **{"chain": 1.5, "16": 2.25}))
    path.write_text(path.read_text()[:-3])
    assert [item.step for item in read_log(path)] == [10]


def test_a_log_of_another_shape_is_not_gone_on_with(tmp_path):
    path = tmp_path / "log.csv"
    write_log(path, [10])
    before = path.read_text()
    with pytest.raises(ConfigError, match="other columns"):
        TrainingLog(path, DEPTH + 1, COLUMNS, resume_step=10)
    assert path.read_text() == before


@pytest.mark.parametrize("content", [None, "", "a,b\n1,2\n"])
def test_what_is_no_log_is_told(tmp_path, content):
    path = tmp_path / "log.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"log\.csv"):
        read_log(path)


def test_not_a_number_is_an_empty_cell(tmp_path):
    log = write_log(tmp_path / "log.csv", [])
    log.append(LogRow(1, math.nan, 1e-3, 0.5, 1.0, (math.nan, 0.5, 0.5)))
    (read,) = read_log(log.path)
    assert math.isnan(read.loss)
    assert math.isnan(read.position_correct[0])
    assert read.position_correct[1:] == (0.5, 0.5)


def test_a_log_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row(step) for step in range(1, 9)] + [row(9, **{"chain": 2.0, "16": 3.0})]
    content = plot_log(rows, tmp_path / "log.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert (width, height) == (1320, 440)
    assert plot_log(rows[:1], tmp_path / "one.png").stat().st_size > 0
    with pytest.raises(ConfigError, match="no rows"):
        plot_log([], tmp_path / "none.png")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"sglang-ddtree\[train\]"):
        plot_log([row(1)], tmp_path / "log.png")
