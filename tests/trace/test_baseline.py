"""Baselines: a trace for each mode and number format, of prompts from a file."""

import json

import pytest
import torch

from ddtree.config import Dtype, EngineConfig, Mode, SamplingParams
from ddtree.errors import ConfigError
from ddtree.trace.baseline import BaselinePlan, make_baselines, read_prompts
from ddtree.trace.files import ReplayOptions, compare_files
from ddtree.trace.run_file import read_run
from engine_kit import scripted_engine, tiny_target


def prompts_file(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_prompts_are_read_from_every_kind_of_line(tmp_path):
    rows = [{"prompt_tokens": [4, 5]}, {"prompt": "a b"}, {"turns": ["first", "second"]}]
    path = prompts_file(tmp_path / "p.jsonl", rows)
    assert read_prompts(path) == [(4, 5), "a b", "first"]
    assert read_prompts(path, 2) == [(4, 5), "a b"]


@pytest.mark.parametrize(
    "row",
    [
        {}, {"prompt": " "}, {"prompt": "a\ud800"}, {"turns": []}, {"turns": 5}, {"turns": "text"},
        {"turns": {"0": "a"}}, {"prompt_tokens": [1.5]}, {"prompt_tokens": []},
    ],
)  # fmt: skip
def test_lines_without_a_prompt_are_told(tmp_path, row):
    with pytest.raises(ConfigError, match="line 2 is no prompt"):
        read_prompts(prompts_file(tmp_path / "p.jsonl", [{"prompt": "a"}, row]))


def test_a_file_without_prompts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no prompt"):
        read_prompts(prompts_file(tmp_path / "p.jsonl", []))
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(tmp_path / "none")


@pytest.fixture
def made(tmp_path):
    """Baselines of two prompts by a tiny engine, whatever the number format is called."""
    sampling = SamplingParams(max_tokens=16)
    target = tiny_target(tmp_path / "target")
    asked = []

    def load(config):
        asked.append(config)
        return scripted_engine(target, sampling)

    def make(**changes):
        plan = BaselinePlan(EngineConfig(drafter="auto"), sampling, node_budget=6, chat=False)
        plan = plan.only(changes.get("modes", ()), changes.get("dtypes", ()))
        answers = []
        prompts = [tuple(range(40, 60)), "hello there"]
        found = make_baselines(plan, prompts, tmp_path / "out", load, lambda *place: answers.append(place))
        return found, asked, answers

    return make


def test_every_mode_and_number_format_gets_a_trace(made, tmp_path):
    found, asked, answers = made()
    names = [f"{mode}-{dtype}.jsonl" for dtype in ("float32", "bfloat16") for mode in Mode]
    assert [path.rpartition("/")[2] for path in found] == names
    assert [config.dtype for config in asked] == [Dtype.FLOAT32, Dtype.BFLOAT16]
    assert answers == [(dtype, mode, number) for dtype in ("float32", "bfloat16") for mode in Mode
                       for number in (1, 2)]  # fmt: skip
    run = read_run(tmp_path / "out" / "tree-float32.jsonl")
    assert [answer.mode for answer in run.answers] == ["tree", "tree"]
    assert [answer.node_budget for answer in run.answers] == [6, 6]
    assert all(len(answer.margins) == 16 for answer in run.answers)
    assert all(entry.tokens for answer in run.answers for entry in answer.rounds)
    facts = found[str(tmp_path / "out" / "tree-float32.jsonl")]
    assert (facts["requests"], facts["tokens"]) == (2, 32)
    lengths = [length for answer in run.answers for length in answer.accept_lengths]
    assert facts["accept_length"] == pytest.approx(sum(lengths) / len(lengths), abs=1e-4)


def test_baselines_of_the_modes_compare_equal(made, tmp_path):
    made(dtypes=(Dtype.FLOAT32,))
    paths = [tmp_path / "out" / f"{mode}-float32.jsonl" for mode in Mode]
    for path in paths[1:]:
        found = compare_files(paths[0], path, ReplayOptions())
        assert (found.num_equal, found.findings) == (2, [])


def test_plain_baselines_alone_load_no_drafter(made):
    _, asked, _ = made(modes=(Mode.AR, Mode.AR), dtypes=(Dtype.FLOAT32,))
    assert [config.drafter for config in asked] == ["none"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    plan = BaselinePlan(EngineConfig())
    with pytest.raises(ConfigError, match="cannot be made"):
        make_baselines(plan, ["a"], tmp_path / "file" / "out", lambda config: torch.nn.Identity())
