"""Draws through the scheduler are distributed as the target says, and a planted bias is found.

A small run of benchmarks/check_sglang_draws.py: requests of every kind of sampling in one batch.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from sglang_kit.runs import run_process

pytestmark = pytest.mark.sglang

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ARM, DRAWS, FAULT_DRAWS = "ddtree:31", 18_000, 6_000


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The program's results; it ends with 0 only where all fair tests pass and the fault is found."""
    folder = tmp_path_factory.mktemp("draws")
    options = ("--draws", str(DRAWS), "--fault-draws", str(FAULT_DRAWS), "--plain-draws", "0")
    what = ("--cases", "mixed", "--faults", "prefer", "--output", str(folder / "draws.json"))
    program = str(BENCHMARKS / "check_sglang_draws.py")
    command = [sys.executable, program, "--device", "cpu", "--arm", ARM, *options, *what]
    run_process(command, dict(os.environ), folder / "draws.log")
    return json.loads((folder / "draws.json").read_text(encoding="utf-8"))


def test_draws_of_every_kind_in_one_batch_pass(report):
    cell = report["cells"][f"{ARM} mixed"]
    assert cell["draws"] >= DRAWS
    assert cell["impossible"] == 0
    assert set(cell["p_values"]) >= {"likely", "recent", "pairs", "repeats", "places"}
    assert cell["smallest_p"] > report["verdict"]["limit"]


def test_walks_of_all_depths_were_committed_from_the_known_logits(report):
    cell = report["cells"][f"{ARM} mixed"]
    assert cell["accept_length"] > 1.5
    assert min(cell["rounds_by_correct_drafts"]) >= 20
    assert cell["max_logit_error"] < 1e-5
    assert cell["rows_of_logits"] > cell["draws"]


def test_a_preference_for_drafts_is_found(report):
    assert report["cells"][f"{ARM} temperature 0.7, prefer"]["smallest_p"] < 1e-9
    assert report["verdict"]["faults_missed"] == []
