"""The whole run in small, as `ddtree train --dry-run` makes it, and what its stages refuse."""

import csv
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ddtree import Engine, EngineConfig, Mode, Request, SamplingParams
from ddtree.cli.main import run
from ddtree.config import Dtype
from ddtree.draft.dflash_config import DFlashConfig
from ddtree.draft.load import read_weights
from ddtree.errors import ConfigError
from ddtree.train.acceptance import Text, drafter_texts_logits, measure_acceptance
from ddtree.train.corpus import Corpus
from ddtree.train.drafter import TrainableDrafter
from ddtree.train.pipeline import run_pipeline
from ddtree.train.recipe import dry_run_recipe, load_recipe
from ddtree.train.reporting import PipelineOptions, SilentReporter, Stage
from ddtree.train.target import open_target
from ddtree.train.target_features import FrozenTarget

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "smollm2-135m.toml"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "dry"
    assert run(["train", str(RECIPE), "--dry-run", "--quiet", "--output", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def recipe(dry_run):
    return dry_run_recipe(load_recipe(RECIPE), dry_run / "target")


def stage(recipe, folder, *stages, **options):
    return run_pipeline(recipe, folder, PipelineOptions(stages, "cpu", **options), SilentReporter())


def losses(folder):
    return [row["loss"] for row in csv.DictReader((folder / "log.csv").open())]


def test_a_dry_run_leaves_everything(dry_run):
    assert {path.name for path in dry_run.iterdir()} >= {
        "data", "checkpoints", "log.csv", "log.png", "acceptance.json", "generation.json", "drafter"
    }  # fmt: skip
    assert len(losses(dry_run)) == 12
    measured = json.loads((dry_run / "acceptance.json").read_text())
    assert set(measured) == {"held_out", "gsm8k", "humaneval", "mt_bench"}
    assert all(1 <= cell["accept_length"] <= 8 for row in measured.values() for cell in row.values())
    assert (dry_run / "drafter" / "README.md").read_text().count("| held_out |") == 1


def test_the_export_is_the_newest_checkpoint(dry_run):
    state = torch.load(dry_run / "checkpoints" / "step-00000012.pt", weights_only=True)["drafter"]
    exported = load_file(dry_run / "drafter" / "model.safetensors")
    assert set(exported) == set(state)
    assert all(torch.equal(exported[name], state[name].bfloat16()) for name in exported)


def test_held_out_conversations_are_not_trained_on(dry_run, recipe):
    corpus = Corpus.open(dry_run / "data")
    training, held_out = corpus.split(recipe.data.held_out, recipe.data.seed)
    assert len(held_out) == 4
    assert not set(training.tolist()) & set(held_out.tolist())


def test_offline_acceptance_is_what_the_engine_measures_live(dry_run):
    """Float32: every round of every prompt, with the exported weights (design: acceptance does not depend
    on the engine)."""
    folder, target_folder = dry_run / "drafter", dry_run / "target"
    engine = Engine.load(
        EngineConfig(str(target_folder), str(folder), "cpu", Dtype.FLOAT32, threads=1, max_context_tokens=512)
    )
    opened = open_target(dry_run_recipe(load_recipe(RECIPE), target_folder).target, CPU)
    config = DFlashConfig.from_path(folder)
    drafter = TrainableDrafter(config, 1024)
    drafter.load_state_dict(read_weights(folder, config))
    target = FrozenTarget(opened.load_model(), config.target_layer_ids, "dense")
    logits = drafter_texts_logits(drafter, target)
    for text in ("How many apples?", "Write a function."):
        prompt = engine.encode(text)
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        plain = engine.generate(Request(prompt, sampling, Mode.AR))
        texts = [Text(np.array([*prompt, *plain.tokens]), len(prompt))]
        table = measure_acceptance(logits, texts, (4, 16), config.draft_depth, CPU)
        for column, mode in (("chain", Mode.CHAIN), (4, Mode.TREE), (16, Mode.TREE)):
            budget = "auto" if column == "chain" else column
            live = engine.generate(Request(prompt, sampling, mode, budget))
            assert live.tokens == plain.tokens
            whole = Counter(table.accept_lengths[column][0].tolist())
            seen = Counter(live.stats.accept_histogram)
            # The last round, which max_tokens may have cut, is not among the whole ones.
            assert whole <= seen
            assert (seen - whole).total() <= 1


def test_a_run_that_is_out_of_time_goes_on_to_the_same_result(dry_run, recipe, tmp_path):
    folder = tmp_path / "late"
    assert not stage(recipe, folder, Stage.DATA, Stage.TRAIN, max_seconds=0.001).is_finished
    assert not (folder / "checkpoints").exists()
    assert stage(recipe, folder, Stage.DATA).is_finished
    corpora = [Corpus.open(path / "data") for path in (dry_run, folder)]
    assert [c.id for c in corpora[0]] == [c.id for c in corpora[1]]
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(*corpora, strict=True))
    assert not stage(recipe, folder, Stage.TRAIN, max_seconds=0.001).is_finished
    assert len(losses(folder)) < 12
    assert stage(recipe, folder, Stage.TRAIN).is_finished
    assert losses(folder) == losses(dry_run)


def test_stages_that_lack_what_comes_before_say_so(recipe, tmp_path):
    with pytest.raises(ConfigError, match="run the stage train first"):
        stage(recipe, tmp_path / "empty", Stage.EXPORT)


def test_a_corpus_of_other_settings_is_refused(dry_run, recipe, tmp_path):
    (tmp_path / "data").symlink_to(dry_run / "data")
    other = replace(recipe, data=replace(recipe.data, prompt_temperature=0.9))
    with pytest.raises(ConfigError, match="generated by other"):
        stage(other, tmp_path, Stage.TRAIN)
