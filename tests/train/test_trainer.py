"""The training loop: it learns, goes on from a checkpoint as if never stopped, and stops at a bad loss."""

import math
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ddtree.errors import CheckpointError, ConfigError, ModelError
from ddtree.train.acceptance import AcceptanceTable
from ddtree.train.checkpoint import Checkpoint, checkpoint_files, load_checkpoint, save_checkpoint
from ddtree.train.loop import TrainingRun, train
from ddtree.train.packed_batch import NO_LABEL
from ddtree.train.packing import World, batches
from ddtree.train.recipe import DataSettings, DrafterSettings, EvaluationSettings, Recipe, TargetSettings
from ddtree.train.reporting import SilentReporter
from ddtree.train.trainer import Prefetcher, StepReader, TrainingError, learning_rate
from ddtree.train.training_log import TrainingLog, read_log
from train_kit import SETTINGS, random_corpus, tiny_trainer

CPU = torch.device("cpu")


def run_of(folder, settings=SETTINGS, first_step=0, deadline=None, evaluate_every=0):
    recipe = Recipe(
        TargetSettings(),
        DataSettings(),
        DrafterSettings(mask_token_id=3),
        settings,
        EvaluationSettings(every=evaluate_every, budgets=(4,)),
    )
    corpus = random_corpus()
    folder.mkdir(exist_ok=True)
    return TrainingRun(
        recipe, "f", corpus, np.arange(len(corpus)), folder / "checkpoints",
        TrainingLog(folder / "log.csv", 7, ["chain", "4"], first_step),
        lambda: AcceptanceTable(7, {"chain": (np.array([2, 3]),), 4: (np.array([4, 3]),)}),
        SilentReporter(), first_step, deadline,
    )  # fmt: skip


def resume(trainer, folder):
    state = load_checkpoint(folder / "checkpoints", "f", CPU)
    trainer.drafter.load_state_dict(state.drafter)
    trainer.optimizer.load_state_dict(state.optimizer)
    return state.step


def test_the_loss_falls_on_a_batch_that_comes_again():
    trainer = tiny_trainer(replace(SETTINGS, steps=60, warmup_steps=5))
    corpus = random_corpus()
    _, batch = next(batches(corpus, np.arange(len(corpus)), SETTINGS, 7))
    losses = [float(trainer.train_step(step, batch).loss) for step in range(60)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("labels", ["hard", "soft"])
def test_a_resumed_run_repeats_the_losses_of_one_that_was_not_stopped(tmp_path, labels):
    settings = replace(SETTINGS, labels=labels, checkpoint_every=4)
    assert train(run_of(tmp_path / "whole", settings), tiny_trainer(settings)) == 8
    stopped = tmp_path / "stopped"
    train(run_of(stopped, settings, deadline=-math.inf), tiny_trainer(settings))
    assert [file.name for file in checkpoint_files(stopped / "checkpoints")] == ["step-00000001.pt"]
    trainer = tiny_trainer(settings)
    first_step = resume(trainer, stopped)
    train(run_of(stopped, settings, first_step), trainer)
    whole, resumed = (read_log(tmp_path / name / "log.csv") for name in ("whole", "stopped"))
    assert [row.step for row in resumed] == list(range(1, 9))
    assert [row.loss for row in resumed] == [row.loss for row in whole]
    assert len({row.loss for row in whole}) == 8


def test_without_the_optimiser_state_the_losses_would_differ(tmp_path):
    whole = tmp_path / "whole"
    train(run_of(whole, replace(SETTINGS, checkpoint_every=4)), tiny_trainer())
    state = load_checkpoint(whole / "checkpoints", "f", CPU)
    assert state.step == 8
    trainer = tiny_trainer(replace(SETTINGS, steps=10))
    trainer.drafter.load_state_dict(state.drafter)
    fresh = tiny_trainer(replace(SETTINGS, steps=10))
    fresh.drafter.load_state_dict(state.drafter)
    trainer.optimizer.load_state_dict(state.optimizer)
    corpus = random_corpus()
    following = list(islice(batches(corpus, np.arange(40), SETTINGS, 7, first_step=8), 2))
    losses = [[float(t.train_step(step, batch).loss) for step, batch in following] for t in (trainer, fresh)]
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] != losses[1][1]


def test_held_out_acceptance_is_logged_when_asked_for(tmp_path):
    train(run_of(tmp_path, evaluate_every=3), tiny_trainer())
    measured = {row.step: row.accept_lengths for row in read_log(tmp_path / "log.csv") if row.accept_lengths}
    assert measured == {step: {"chain": 2.5, "4": 3.5} for step in (3, 6, 8)}


def test_a_loss_that_is_no_number_stops_with_step_and_batch(tmp_path):
    trainer = tiny_trainer()
    step_of = trainer.train_step

    def poisoned(step, batch):
        if step == 5:
            with torch.no_grad():
                trainer.drafter.fc.weight[0, 0] = float("nan")
        return step_of(step, batch)

    trainer.train_step = poisoned
    with pytest.raises(
        TrainingError, match=r"step 5: the loss is nan; its batch held conversations \d+, \d+"
    ):
        train(run_of(tmp_path, replace(SETTINGS, checkpoint_every=1)), trainer)
    # Only states from before it were kept.
    assert load_checkpoint(tmp_path / "checkpoints", "f", CPU).step == 5
    assert all(math.isfinite(row.loss) for row in read_log(tmp_path / "log.csv"))


def test_an_exploding_loss_stops(tmp_path):
    settings = replace(SETTINGS, max_loss=2.0, log_every=4)
    with pytest.raises(TrainingError, match=r"step 0: the loss is \d\.\d+, above train\.max_loss=2"):
        train(run_of(tmp_path, settings), tiny_trainer(settings))


def test_norms_have_no_weight_decay_and_the_gradient_is_clipped():
    trainer = tiny_trainer(replace(SETTINGS, weight_decay=0.5, clip_norm=1e-3))
    decayed, kept = trainer.optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.5, 0.0)
    assert all(weight.ndim == 2 for weight in decayed["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(list(trainer.drafter.parameters()))
    _, batch = next(batches(random_corpus(), np.arange(40), SETTINGS, 7))
    assert trainer.train_step(0, batch).grad_norm > 1e-3
    squares = [weight.grad.square().sum() for weight in trainer.drafter.parameters()]
    assert torch.stack(squares).sum().sqrt() == pytest.approx(1e-3, rel=1e-3)


def test_the_learning_rate_warms_up_and_ends_at_its_share():
    settings = replace(SETTINGS, steps=100, warmup_steps=10, min_learning_rate_share=0.1)
    rates = [learning_rate(settings, step) for step in range(100)]
    assert rates[0] == pytest.approx(3e-4)
    assert max(rates) == rates[9] == pytest.approx(3e-3)
    assert rates[-1] == pytest.approx(3e-4, rel=0.02)
    assert all(later <= earlier for earlier, later in pairwise(rates[9:]))


def test_a_checkpoint_of_another_recipe_or_a_broken_one_is_refused(tmp_path):
    save_checkpoint(tmp_path, Checkpoint(3, {"w": torch.ones(2)}, {}), "mine")
    with pytest.raises(ConfigError, match="another recipe"):
        load_checkpoint(tmp_path, "other", CPU)
    assert load_checkpoint(tmp_path / "none", "mine", CPU) is None
    (tmp_path / "step-00000009.pt").write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError, match=r"step-00000009\.pt cannot be read"):
        load_checkpoint(tmp_path, "mine", CPU)


def test_a_full_disk_is_told_and_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, Checkpoint(1, {}, {}), "f")

    def full(state, file):
        Path(file).write_bytes(b"some")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        ModelError, match=r"step-00000002\.pt cannot be written: .*; what was there before is kept"
    ):
        save_checkpoint(tmp_path, Checkpoint(2, {}, {}), "f")
    assert [file.name for file in tmp_path.iterdir()] == ["step-00000001.pt"]


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for step in (1, 20, 300):
        save_checkpoint(tmp_path, Checkpoint(step, {}, {}), "f")
    assert [file.name for file in checkpoint_files(tmp_path)] == ["step-00000020.pt", "step-00000300.pt"]


def test_an_error_while_packing_reaches_the_loop():
    def broken():
        yield from islice(batches(random_corpus(), np.arange(40), SETTINGS, 7), 1)
        raise ConfigError("no more")

    prefetcher = Prefetcher(broken(), CPU)
    with pytest.raises(ConfigError, match="no more"):
        list(prefetcher)
    prefetcher.close()


def test_the_speed_leaves_out_what_the_clock_was_stopped_for():
    now = iter([0.0, 50.0, 60.0])
    reader = StepReader(10.0, clock=lambda: next(now))
    reader.restart_clock()
    trainer = tiny_trainer()
    _, batch = next(batches(random_corpus(), np.arange(40), SETTINGS, 7))
    for step in range(5):
        reader.add(step, trainer.train_step(step, batch))
    assert reader.read(str).steps_per_s == pytest.approx(0.5)


def first_step(world):
    """Loss and gradients of the first step on this process's rows."""
    torch.set_num_threads(1)
    trainer = tiny_trainer(replace(SETTINGS, clip_norm=1e6), world)
    _, batch = next(batches(random_corpus(), np.arange(40), SETTINGS, 7, world=world))
    loss = float(trainer.train_step(0, batch).loss)
    return loss, {name: weight.grad.numpy() for name, weight in trainer.drafter.named_parameters()}


def run_process(rank, size, store, results):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    results[rank] = first_step(World(rank, size))
    dist.destroy_process_group()


def test_two_processes_give_the_gradients_of_one(tmp_path):
    """Labels are unequally many in the two halves, so a mean of the halves' means would differ."""
    halves = [num_labels(World(rank, 2)) for rank in range(2)]
    assert halves[0] != halves[1]
    loss, gradients = first_step(World())
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(run_process, args=(2, str(tmp_path / "store"), results), nprocs=2)
        parts = dict(results)
    for rank in range(2):
        assert parts[rank][0] == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(parts[rank][1][name], gradient, rtol=1e-4, atol=1e-7, err_msg=name)


def num_labels(world):
    _, batch = next(batches(random_corpus(), np.arange(40), SETTINGS, 7, world=world))
    return int((batch.labels != NO_LABEL).sum())
