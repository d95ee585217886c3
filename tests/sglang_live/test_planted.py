"""Planted drafts in stock SGLang on the CPU: the known text, in exactly as many rounds as simulated."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from sglang_kit.plugin import STOCK_DFLASH_VARIABLE
from sglang_kit.runs import DOUBLES, TESTS, request, run_engine, step

BENCHMARKS = TESTS.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

pytestmark = pytest.mark.sglang

SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320,
}  # fmt: skip
NODE_BUDGET, NEW_TOKENS, BLOCK = 15, 40, 16


class Paths(NamedTuple):
    """What `run_engine` asks of a pair."""

    target_path: Path
    drafter_path: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    from make_random_pair import write_pair

    return Paths(*write_pair(tmp_path_factory.mktemp("random"), SHAPE, dtype="float32", reserved_tokens=16))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["DDTREE", "DFLASH"])
def test_texts_are_the_walk_and_rounds_those_of_the_simulation(pair, tmp_path, algorithm):
    import sglang_planted
    from planted_acceptance import PlantedDrafts, Simulation, Walk
    from sglang_common import write_metadata

    write_metadata(tmp_path / "plugin", sglang_planted.PLUGIN)
    paths = (DOUBLES, TESTS, BENCHMARKS, tmp_path / "plugin")
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        sglang_planted.PLANTED_FOLDER: str(pair.target_path),
    }
    if algorithm == "DFLASH":
        environment[STOCK_DFLASH_VARIABLE] = "1"
    greedy = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS}
    prompts = {f"r{i}": [11 * i + j for j in range(3 + i)] for i in range(6)}
    run = run_engine(
        tmp_path, pair, [step([request(name, prompt, greedy) for name, prompt in prompts.items()])],
        config={"node_budget": NODE_BUDGET}, env=environment, speculative_algorithm=algorithm,
        skip_tokenizer_init=True,
    )  # fmt: skip
    walk = Walk.read(pair.target_path)
    budget = NODE_BUDGET if algorithm == "DDTREE" else None
    simulation = Simulation(walk, PlantedDrafts(walk, BLOCK - 1), budget, NODE_BUDGET)
    for name, prompt in prompts.items():
        assert run.tokens(name) == simulation.text(prompt[-1], NEW_TOKENS)
        rounds = run.outputs[name]["meta_info"]["spec_verify_ct"]
        assert rounds == simulation.rounds(prompt, NEW_TOKENS)
        assert rounds < NEW_TOKENS / 2
