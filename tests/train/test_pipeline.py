"""The whole run in small, as `ddtree train --dry-run` makes it, and what its stages refuse."""

import csv
import json
import os
import re
import shutil
import socket
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
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
from ddtree.train.evaluation import answered
from ddtree.train.pipeline import process_world, run_pipeline
from ddtree.train.recipe import dry_run_recipe, load_recipe
from ddtree.train.reporting import PipelineOptions, SilentReporter, Stage
from ddtree.train.run_folder import RunFolder
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
    return [row["loss"] for row in csv.DictReader((folder / "log.csv").read_text().splitlines())]


def test_a_dry_run_leaves_everything(dry_run):
    assert {path.name for path in dry_run.iterdir()} >= {
        "data", "checkpoints", "log.csv", "log.png", "acceptance.json", "generation.json", "drafter"
    }  # fmt: skip
    assert len(losses(dry_run)) == 12
    written = json.loads((dry_run / "acceptance.json").read_text())
    assert written["step"] == 12
    measured = written["sets"]
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


def test_figures_are_of_the_whole_corpus_and_of_the_checkpoint_at_hand(dry_run, recipe, tmp_path):
    """A corpus of two runs, and an acceptance that was measured before training went on."""
    folder = tmp_path / "parts"
    half = replace(recipe, data=replace(recipe.data, new_tokens=600))
    stage(half, folder, Stage.DATA)
    stage(recipe, folder, Stage.DATA)
    figures, whole = (json.loads((path / "generation.json").read_text()) for path in (folder, dry_run))
    assert figures["conversations"] == len(Corpus.open(folder / "data")) == whole["conversations"]
    assert figures["new_tokens"] == figures["run_tokens"] == whole["new_tokens"]
    late = replace(recipe, train=replace(recipe.train, checkpoint_every=5))
    stage(late, folder, Stage.TRAIN, max_seconds=0.001)
    measured = stage(late, folder, Stage.EVALUATE).acceptance
    assert set(measured) == {"held_out", "gsm8k", "humaneval", "mt_bench"}
    assert stage(late, folder, Stage.TRAIN, Stage.EXPORT).acceptance == {}
    assert "Not measured" in (folder / "drafter" / "README.md").read_text()


def test_stages_that_lack_what_comes_before_say_so(recipe, tmp_path):
    with pytest.raises(ConfigError, match="run the stage train first"):
        stage(recipe, tmp_path / "empty", Stage.EXPORT)


def test_a_corpus_of_other_settings_is_refused(dry_run, recipe, tmp_path):
    (tmp_path / "data").symlink_to(dry_run / "data")
    other = replace(recipe, data=replace(recipe.data, prompt_temperature=0.9))
    with pytest.raises(ConfigError, match="generated by other"):
        stage(other, tmp_path, Stage.TRAIN)


def test_a_dry_run_does_not_clear_a_folder_that_is_not_its_own(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.txt").write_text("mine")
    assert run(["train", str(RECIPE), "--dry-run", "--quiet", "--output", str(tmp_path)]) == 2
    assert "is not empty and no dry run's" in capsys.readouterr().err
    assert (tmp_path / "data" / "thesis.txt").read_text() == "mine"


def test_beginning_anew_deletes_nothing_but_the_runs_own_files(tmp_path):
    folder = RunFolder(tmp_path)
    kept = [folder.data / "thesis.txt", folder.checkpoints / "mine.pt", tmp_path / "notes.md"]
    gone = [
        folder.data / "shard-00000.safetensors",
        folder.checkpoints / "step-00000001.pt",
        folder.acceptance,
    ]
    for file in (*kept, *gone):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    folder.clear_corpus()
    folder.clear_training()
    assert all(file.exists() for file in kept)
    assert not any(file.exists() for file in gone)


def test_two_runs_in_one_folder_at_once_are_refused(tmp_path):
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    first.begin()
    with pytest.raises(ConfigError, match="another run is at work"):
        second.begin()
    first.end()
    second.begin()
    second.end()


@pytest.mark.parametrize(
    ("table", "changes", "message"),
    [
        ("drafter", {"mask_token_id": 2}, "never occurs in text"),
        ("evaluation", {"sets": {"a": "/no/such.jsonl"}}, "cannot read the prompts"),
        ("evaluation", {"sets": {"a": "EMPTY"}}, "one prompt or more"),
    ],
)
def test_what_would_stop_a_later_stage_is_refused_before_the_first(recipe, tmp_path, table, changes, message):
    (tmp_path / "empty.jsonl").write_text("")
    if changes.get("sets") == {"a": "EMPTY"}:
        changes = {"sets": {"a": str(tmp_path / "empty.jsonl")}}
    other = replace(recipe, **{table: replace(getattr(recipe, table), **changes)})
    with pytest.raises(ConfigError, match=message):
        stage(other, tmp_path / "run", *Stage)
    assert not (tmp_path / "run").exists()


def test_prompts_that_are_used_up_are_told(recipe, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"How many {name}?"}) + "\n" for name in "abc"))
    data = replace(recipe.data, prompts=str(prompts), prompt_share=1.0, openings=(), opening_share=0.0)
    told = []
    reporter = SilentReporter()
    reporter.message = told.append
    run_pipeline(
        replace(recipe, data=data), tmp_path / "run", PipelineOptions((Stage.DATA,), "cpu"), reporter
    )
    assert re.search(r"prompts are used up: \d+ of 1,200 tokens", told[0])


@pytest.mark.parametrize(("rank", "size"), [("abc", "2"), ("2", "2"), ("1", "1"), ("0", "-2")])
def test_an_odd_environment_of_processes_is_refused(monkeypatch, rank, size):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ConfigError, match="RANK, WORLD_SIZE"):
        process_world()


def test_texts_belong_to_a_target_and_broken_ones_are_made_anew(dry_run, recipe, tmp_path):
    target = open_target(recipe.target, CPU)
    prompts = {"set": [[1, 50, 60, 2], [1, 70, 2]]}
    first = answered(target, prompts, 6, tmp_path, "one")
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(b"broken")
    again = answered(target, prompts, 6, tmp_path, "one")
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(first["set"], again["set"], strict=True))
    answered(target, prompts, 6, tmp_path, "other")
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def train_in_process(rank, size, recipe, folder, port):
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    torch.set_num_threads(1)
    stage(recipe, folder, Stage.TRAIN, Stage.EVALUATE, Stage.EXPORT)


def test_two_processes_train_what_one_trains(dry_run, recipe, tmp_path):
    """The whole run under the environment that torchrun makes; the losses are those of one process."""
    shutil.copytree(dry_run / "data", tmp_path / "data")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    mp.spawn(train_in_process, args=(2, recipe, tmp_path, port), nprocs=2)
    assert [float(x) for x in losses(tmp_path)] == pytest.approx(
        [float(x) for x in losses(dry_run)], rel=1e-4
    )
    assert (tmp_path / "drafter" / "model.safetensors").exists()
    assert (tmp_path / "acceptance.json").exists()


def test_several_processes_do_not_generate(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="run --stage data first, without torchrun"):
        stage(recipe, tmp_path / "run", *Stage)
