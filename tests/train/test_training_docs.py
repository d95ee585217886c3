"""The training section of docs/benchmarks.md says what results/training.json holds."""

import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_benchmark_docs.py"
STEP = {
    "rows": 16, "row_tokens": 1024, "anchors_a_row": 96, "block_size": 16, "dtype": "bfloat16",
    "layers": "compiled", "device": "a GPU", "steps_per_s": 21.5, "steps_per_s_windows": [21.5, 20.9, 22.0],
    "steps_a_window": 50, "phase_ms": {"target features": 10.0, "backward": 30.0},
}  # fmt: skip
ABLATION = {
    "name": "base", "change": "", "steps": 6000, "held_out": {"chain": 3.0, "64": 4.5},
    "sets": {"gsm8k": {"chain": 3.25, "64": 4.75}},
}  # fmt: skip
RESULTS = {
    "prompts": 64, "max_tokens": 256, "dtype": "bfloat16", "prototype": "measured on the same texts",
    "sets": {"gsm8k": {"chain": {"prototype": 2.5, "trained": 3.2, "trained_interval_95": [3.1, 3.3]}}},
    "ablations": [ABLATION], "generation": {"device": "a GPU", "new_tokens": 30_000_000, "seconds": 400},
    "step": STEP, "device": "a GPU", "command": "python x.py",
}  # fmt: skip


@pytest.fixture
def page(tmp_path):
    """Makes the page of a results folder with that training.json, or without one."""

    def make(results: dict | None) -> str:
        if results is not None:
            (tmp_path / "training.json").write_text(json.dumps(results))
        module = runpy.run_path(str(SCRIPT))
        write = module["page"]
        write.__globals__["RESULTS"] = tmp_path
        return write()

    return make


def test_the_section_is_left_out_without_its_file(page):
    assert "## " not in page(None)


def test_every_part_is_shown(page):
    text = page(RESULTS)
    assert "| gsm8k | chain | 2.50 | 3.20 | 3.10 to 3.30 | 1.28 |" in text
    assert "| base |  | 6,000 | 3.00 / 4.50 | 3.25 / 4.75 |" in text
    assert "**75,000 tokens/s**" in text
    assert "**21.5 steps/s** (windows of 50 steps: 20.9 to 22.0)" in text
    assert "| backward | 30.00 | 75% |" in text


def test_parts_may_be_missing(page):
    parts = {"ablations", "generation", "step"}
    text = page({key: value for key, value in RESULTS.items() if key not in parts})
    assert "2.50" in text
    assert "held-out" not in text
    assert "Corpus" not in text
    assert "steps/s" not in text
