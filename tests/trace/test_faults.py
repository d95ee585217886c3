"""Faults planted in the running engine are named by what reports show; clean runs show nothing."""

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree.config import Mode
from ddtree.engine.request import Request
from ddtree.trace.files import ReplayOptions, compare_files, replay_file
from ddtree.trace.findings import MEANINGS, kinds_of
from ddtree.trace.read import read_trace
from ddtree.trace.replay import Replayer
from ddtree.trace.text import replay_lines
from ddtree.trace_format import Detail
from ddtree.tree.noise import keyed_gumbel
from engine_kit import VOCAB_SIZE, load_real_pair, plain, tiny_target
from fault_kit import (
    FaultTarget,
    SpillingCache,
    StaleRootDrafter,
    UnmovedCache,
    accept_without,
    engine_of,
    give_first_columns,
    positions_by_column,
    prompts,
    record,
    round_of,
    sampling,
    see_siblings,
    take_by_ratio,
    walk_first_children,
)
from tiny_models import tiny_llama

BUDGET, REQUESTS = 12, 8
SAMPLINGS = {
    "greedy": {},
    "min_p": {"temperature": 1.0, "min_p": 0.2, "seed": 3},
    "penalties": {"temperature": 0.7, "frequency_penalty": 1.5, "presence_penalty": 0.5, "seed": 4},
    "greedy penalties": {"repetition_penalty": 1.6},
}


class Lab:
    """A tiny pair with a scripted drafter, and clean runs of the same requests by mode and sampling."""

    def __init__(self, folder):
        self.folder, self.model = folder, tiny_llama(vocab_size=VOCAB_SIZE, num_layers=3)
        self.target = tiny_target(folder / "target", self.model)
        self._scripts, self._clean, self._numbers = {}, {}, count()

    def requests(self, name, mode=Mode.TREE):
        params = sampling(**SAMPLINGS[name])
        return [Request(prompt, params, mode, BUDGET) for prompt in prompts(REQUESTS, VOCAB_SIZE)]

    def scripts(self, name):
        """What plain decoding says to each request."""
        if name not in self._scripts:
            plain = read_trace(self.clean(name, Mode.AR)).requests
            self._scripts[name] = [traced.tokens for traced in plain]
        return self._scripts[name]

    def run(self, name="greedy", target=None, round_fn=None, mode=Mode.TREE, detail=Detail.FULL):
        engine = engine_of(target or self.target, round_fn=round_fn)
        path = self.folder / f"{next(self._numbers)}.jsonl"
        scripts = () if mode is Mode.AR else self.scripts(name)
        return record(path, engine, self.requests(name, mode), scripts, detail)

    def clean(self, name, mode=Mode.TREE):
        """A clean run, made once."""
        if (name, mode) not in self._clean:
            self._clean[name, mode] = self.run(name, mode=mode)
        return self._clean[name, mode]

    def replay(self, path):
        return replay_file(path, ReplayOptions(), lambda name, dtype: replayer(self.model))


def replayer(model):
    return Replayer(model.eval(), (), noise=keyed_gumbel)


def compare(first, second):
    return compare_files(first, second, ReplayOptions())


def compare_by(model, first, second):
    """With the target as the judge, which sampled texts need."""
    return compare_files(first, second, ReplayOptions(model="tiny"), lambda name, dtype: replayer(model))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


# -- no fault --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_clean_run_shows_nothing(lab, name):
    report = lab.replay(lab.clean(name))
    assert report.findings == ()
    assert report.is_clean
    assert report.judged.max_gap < 1e-3
    assert compare(lab.clean(name, Mode.AR), lab.clean(name)).findings == []


def test_two_clean_runs_do_not_differ(lab):
    again = compare(lab.clean("greedy"), lab.run("greedy"))
    assert (again.findings, again.num_equal, again.trees.max_score_difference) == ([], REQUESTS, 0)
    assert again.acceptance[0].sibling_share > 0.1  # siblings are walked to, else this would show little


@given(
    seed=st.integers(0, 2**40),
    fields=st.fixed_dictionaries({}, optional={
        "temperature": st.floats(0.3, 1.5), "top_k": st.integers(2, 40), "top_p": st.floats(0.5, 1.0),
        "min_p": st.floats(0.0, 0.3), "frequency_penalty": st.floats(-1.0, 2.0),
        "repetition_penalty": st.floats(0.7, 1.6), "presence_penalty": st.floats(-1.0, 2.0),
    }),
    budget=st.integers(1, 40),
)  # fmt: skip
@settings(max_examples=5, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
def test_no_clean_run_shows_anything(lab, tmp_path, seed, fields, budget):
    params = sampling(max_tokens=12, seed=seed, **fields)
    requests = [Request(prompt, params, Mode.TREE, budget) for prompt in prompts(2, VOCAB_SIZE, seed % 1000)]
    scripts = [plain(lab.target, params, request.prompt_tokens).tokens for request in requests]
    path = record(tmp_path / "t", engine_of(lab.target), requests, scripts)
    assert lab.replay(path).findings == ()
    assert lab.replay(path).is_clean


# -- faults of the verify pass and the cache -------------------------------------------------------

VERIFY_FAULTS = {
    "verify_mask": {"window": see_siblings},
    "verify_positions": {"window": positions_by_column},
    "commit_kv": {"cache": UnmovedCache},
    "foreign_kv": {"cache": SpillingCache},
}


@pytest.mark.parametrize("kind", VERIFY_FAULTS)
def test_a_fault_of_the_verify_pass_is_named_by_where_it_begins(lab, kind):
    path = lab.run(target=FaultTarget(lab.target, **VERIFY_FAULTS[kind]))
    report = lab.replay(path)
    assert kinds_of(report.findings) == ["figures", kind]
    assert report.judged.max_gap > 10 * report.judged.eps  # design: a planted fault exceeds eps tenfold
    assert not report.is_clean
    lines = list(replay_lines(report))
    assert any(line.startswith(f"WRONG, {kind}: ") for line in lines)
    assert f"{kind} usually means: {MEANINGS[kind].usually}" in lines
    made = compare(lab.clean("greedy", Mode.AR), path)
    assert kinds_of(made.findings) == ["text"]
    assert made.num_equal < REQUESTS


def test_without_figures_the_gap_still_tells(lab):
    path = lab.run(target=FaultTarget(lab.target, cache=UnmovedCache), detail=Detail.SUMMARY)
    report = lab.replay(path)
    assert report.judged.max_gap > 10 * report.judged.eps
    assert not report.is_clean


# -- faults of the accept step ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "neutral", "told"),
    [
        ("min_p", {"min_p": 0.0}, "min_p"),
        ("penalties", {"frequency_penalty": 0.0, "presence_penalty": 0.0}, "penalties"),
        ("greedy penalties", {"repetition_penalty": 1.0}, "repetition_penalty"),
    ],
)
def test_a_parameter_that_verify_ignores_is_named(lab, name, neutral, told):
    path = lab.run(name, round_fn=round_of(accept=accept_without(**neutral)))
    report = lab.replay(path)
    assert kinds_of(report.findings) == ["ignored_parameter"]
    assert [found.text.split(":")[0] for found in report.findings] == [told]
    made = compare_by(lab.model, lab.clean(name, Mode.AR), path)
    assert kinds_of(made.findings) == ["text"]


def test_a_chain_only_walk_is_named_by_children_that_it_passes(lab):
    path = lab.run(round_fn=round_of(accept=walk_first_children))
    report = lab.replay(path)
    assert report.judged.is_lossless  # the text is right, only slower
    assert kinds_of(report.findings) == ["round_walk"]
    made = compare(lab.clean("greedy"), path)
    assert kinds_of(made.findings) == ["round_walk", "accept_length"]
    assert "B never follows any but the likeliest child" in made.findings[-1].text
    assert made.accept_interval[1] < 0


SEEDS = 64


@pytest.fixture(scope="module")
def draws(lab):
    """Short sampled answers to one prompt by many seeds, of plain decoding and of a given round."""
    prompt = prompts(1, VOCAB_SIZE)[0]

    def run(name, mode, round_fn=None, first_seed=0):
        # Two tokens are possible, of which the drafter often drafts the first.
        params = sampling(max_tokens=4, temperature=1.0, logit_bias={5: 60.0, 9: 60.0})
        requests = [
            Request(prompt, replace(params, seed=first_seed + seed), mode, 3) for seed in range(SEEDS)
        ]
        path = lab.folder / f"draws-{name}.jsonl"
        return record(path, engine_of(lab.target, round_fn=round_fn), requests, [[5] * 5] * SEEDS)

    return run


def test_acceptance_by_the_ratio_is_named_by_its_draws(lab, draws):
    plain, other = draws("plain", Mode.AR), draws("tree", Mode.TREE, first_seed=10_000)
    assert compare(plain, other).draws.p_value > 1e-4
    assert compare(plain, other).findings == []
    biased = draws("biased", Mode.TREE, round_of(accept=take_by_ratio), first_seed=10_000)
    made = compare(plain, biased)
    assert kinds_of(made.findings) == ["draws"]
    report = lab.replay(biased)
    assert kinds_of(report.findings) == ["draw_rule"]
    assert "possible ones, but not the draws of their seeds" in report.findings[0].text


# -- faults of the drafter's input -----------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A tiny pair with a DFlash drafter, its requests, and a clean run of them."""
    folder = tmp_path_factory.mktemp("real")
    target, drafter, model = load_real_pair(folder, max_context=128)
    requests = [Request(prompt, sampling(), Mode.TREE, BUDGET) for prompt in prompts(8, 32)]
    clean = record(folder / "clean.jsonl", engine_of(target, drafter), requests)
    return folder, target, drafter, model, requests, clean


@pytest.mark.parametrize("kind", [None, "draft_input", "draft_context"])
def test_a_fault_of_the_drafter_s_input_is_named_by_its_trees(real, kind):
    folder, target, drafter, model, requests, clean = real
    if kind == "draft_input":
        drafter = StaleRootDrafter(drafter)
    round_fn = round_of(commit=give_first_columns) if kind == "draft_context" else None
    path = record(folder / "run.jsonl", engine_of(target, drafter, round_fn), requests)
    made = compare(clean, path)
    assert set(kinds_of(made.findings)) - {"accept_length"} == {kind} - {None}
    assert made.trees.compared > 40
    report = replay_file(path, ReplayOptions(), lambda name, dtype: replayer(model))
    assert report.is_clean  # the drafter only decides how fast
