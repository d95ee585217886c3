"""The training sections of docs/benchmarks.md say what the results files hold."""

import csv
import json
import runpy
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PROVENANCE = {
    "time_utc": "2026-01-02T03:04:05+00:00", "command": "ddtree train r.toml",
    "machine": {"cpu": "a CPU", "cores": 2, "gpus": ["a GPU"]},
    "packages": {"torch": "2.11.0", "triton": None, "transformers": "5.17.0"},
}  # fmt: skip
LENGTHS = {"gsm8k": {"chain": 3.25, "64": 4.75}}
CELL = {"accept_length": 3.146, "interval_95": [3.0, 3.3], "rounds": 5, "tokens": 16}


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Makes the page of a results folder with these files."""

    monkeypatch.syspath_prepend(str(SCRIPTS))

    def make(files: dict[str, dict]) -> str:
        for name, results in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps({"provenance": PROVENANCE, **results}))
        module = runpy.run_path(str(SCRIPTS / "make_benchmark_docs.py"))
        write = module["page"]
        write.__globals__["RESULTS"] = tmp_path
        return write()

    return make


@pytest.fixture
def run_folder(tmp_path):
    """What is read of a finished run."""
    folder = tmp_path / "run"
    (folder / "drafter").mkdir(parents=True)
    recipe = {
        "target": {"dtype": "bfloat16"},
        "train": {"rows": 2, "row_tokens": 100, "weighting": "path", "labels": "hard", "steps": 7000},
        "evaluation": {"set_prompts": 64, "max_tokens": 256},
    }
    card = "files by name:\n\n```json\n{}\n```\n\nWhere it ran:\n\n```json\n{}\n```\n"
    parts = card.split("{}")
    text = parts[0] + json.dumps(recipe) + parts[1] + json.dumps(PROVENANCE) + parts[2]
    (folder / "drafter" / "README.md").write_text(text)
    sets = {"gsm8k": {"chain": CELL, "64": CELL | {"accept_length": 4.75}}}
    (folder / "acceptance.json").write_text(json.dumps({"step": 7000, "sets": sets}))
    made = {"conversations": 1000, "new_tokens": 30_000_000, "seconds": 400.0}
    (folder / "generation.json").write_text(json.dumps(made))
    with (folder / "log.csv").open("w") as file:
        csv.writer(file).writerows([["step", "tokens_per_s"], [1, 200], [2, 4000], [3, 5000]])
    return folder


def test_a_section_is_left_out_without_its_file(page):
    assert "## " not in page({})


def test_a_run_is_shown(page, run_folder):
    module = runpy.run_path(str(SCRIPTS / "make_training_results.py"))
    text = page({"training": module["training_results"](run_folder)})
    assert "| gsm8k | chain | 2.42 | 3.15 | 3.00 to 3.30 | 1.30 |" in text
    assert "**75,000 tokens/s**" in text
    assert "7,000 steps, **20.0 steps/s** in the median (1.0 to 25.0" in text
    assert "a GPU; torch 2.11.0, transformers 5.17.0; 2026-01-02; `python ddtree train r.toml`" in text


def test_ablations_are_shown_with_the_whole_run(page, run_folder):
    module = runpy.run_path(str(SCRIPTS / "make_training_results.py"))
    row = {"name": "base", "steps": 700, "accept_length": LENGTHS}
    files = {"training": module["training_results"](run_folder), "train_ablations": {"ablations": [row]}}
    text = page(files)
    assert "| base | 700 | 3.25 / 4.75 |" in text
    assert "| path weights, hard labels | 7,000 | 3.15 / 4.75 |" in text


def test_a_step_is_shown(page):
    step = {
        "rows": 16, "row_tokens": 1024, "anchors_a_row": 96, "block_size": 16, "dtype": "bfloat16",
        "layers": "compiled", "steps_per_s": 21.5, "steps_per_s_windows": [21.5, 20.9, 22.0],
        "steps_a_window": 50, "phase_ms": {"target features": 10.0, "backward": 30.0},
    }  # fmt: skip
    text = page({"train_step_gpu": step | {"note": "some note"}})
    assert "**21.5 steps/s** (windows of 50 steps: 20.9 to 22.0)" in text
    assert "| backward | 30.00 | 75% |" in text
    assert "Note: some note" in text
