"""The training loop: batches in, checkpoints, log and held-out acceptance out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ddtree.train.acceptance import AcceptanceTable
from ddtree.train.checkpoint import Checkpoint, save_checkpoint
from ddtree.train.corpus import Corpus
from ddtree.train.packing import batches, conversation_ids
from ddtree.train.recipe import Recipe
from ddtree.train.reporting import Reporter
from ddtree.train.trainer import Prefetcher, StepFigures, StepReader, Trainer, learning_rate
from ddtree.train.training_log import LogRow, TrainingLog

MAX_NAMED_IDS = 8


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """What a run trains on and where it writes.

    Attributes:
        indices: conversations of the corpus that are trained on, [n] int64.
        first_step: steps that were done before.
        measure: held-out acceptance of the drafter as it stands; called in the first process alone.
        deadline: `time.monotonic` at which to stop at a checkpoint, None for never.
    """

    recipe: Recipe
    fingerprint: str
    corpus: Corpus
    indices: NDArray[np.int64]
    checkpoints: Path
    log: TrainingLog | None
    measure: Callable[[], AcceptanceTable]
    reporter: Reporter
    first_step: int = 0
    deadline: float | None = None


def train(run: TrainingRun, trainer: Trainer) -> int:
    """Train to the recipe's last step, or to the deadline; returns the number of steps done.

    Raises:
        TrainingError: the loss or the gradient is no longer finite, or the loss is too large.
    """
    settings = run.recipe.train
    depth = trainer.drafter.config.draft_depth
    if run.first_step >= settings.steps:
        return run.first_step
    source = batches(run.corpus, run.indices, settings, depth, run.first_step, trainer.world)
    prefetcher = Prefetcher(source, trainer.device)
    reader = StepReader(settings.max_loss)
    done = run.first_step
    try:
        for step, batch in prefetcher:
            reader.add(step, trainer.train_step(step, batch))
            done = step + 1
            if _after_step(run, trainer, reader, done):
                break
    finally:
        prefetcher.close()
    return done


def _after_step(run: TrainingRun, trainer: Trainer, reader: StepReader, done: int) -> bool:
    """Log, measure and write a checkpoint where it is time; returns whether training ends here."""
    settings, every = run.recipe.train, run.recipe.evaluation.every
    is_last = done == settings.steps
    is_logged = is_last or done % settings.log_every == 0
    is_late = is_logged and not is_last and _is_late(run, trainer)
    is_measured = is_last or (every > 0 and done % every == 0)
    is_saved = is_last or is_late or done % settings.checkpoint_every == 0
    if not (is_logged or is_measured or is_saved):
        return False
    figures = reader.read(lambda step: _batch_names(run, step))
    if trainer.world.rank == 0:
        accept = run.measure() if is_measured else None
        _log(run, trainer, figures, done, accept)
        if is_saved:
            state = Checkpoint(done, trainer.drafter.state_dict(), trainer.optimizer.state_dict())
            path = save_checkpoint(run.checkpoints, state, run.fingerprint)
            run.reporter.message(f"step {done}: checkpoint {path.name}")
        reader.restart_clock()
    return is_last or is_late


def _is_late(run: TrainingRun, trainer: Trainer) -> bool:
    """Whether the deadline has passed; all processes learn what the first one's clock says."""
    if run.deadline is None:
        return False
    is_late = torch.tensor(int(time.monotonic() > run.deadline), device=trainer.device)
    if trainer.world.size > 1:
        dist.broadcast(is_late, src=0)
    return bool(is_late.item())


def _log(
    run: TrainingRun, trainer: Trainer, figures: StepFigures, done: int, accept: AcceptanceTable | None
) -> None:
    settings = run.recipe.train
    tokens_per_s = figures.steps_per_s * settings.rows * settings.row_tokens
    lengths = (
        {} if accept is None else {str(c): accept.pooled(c).accept_length for c in accept.accept_lengths}
    )
    row = LogRow(
        step=done,
        loss=figures.loss,
        learning_rate=learning_rate(settings, figures.step),
        grad_norm=figures.grad_norm,
        tokens_per_s=tokens_per_s,
        position_correct=figures.position_correct,
        accept_lengths=lengths,
    )
    assert run.log is not None
    run.log.append(row)
    text = (
        f"loss {row.loss:.3f}, first draft right {row.position_correct[0]:.1%}, {tokens_per_s:,.0f} tokens/s"
    )
    run.reporter.progress(done, settings.steps, text)
    if lengths:
        names = {column: column if column == "chain" else f"B={column}" for column in lengths}
        shown = ", ".join(f"{names[column]} {length:.3f}" for column, length in lengths.items())
        run.reporter.message(f"step {done}: held-out accept length {shown}")


def _batch_names(run: TrainingRun, step: int) -> str:
    """The conversations of a step's batch, for an error message."""
    ids = conversation_ids(run.corpus, run.indices, run.recipe.train, step)
    more = f" and {len(ids) - MAX_NAMED_IDS} more" if len(ids) > MAX_NAMED_IDS else ""
    return f"conversations {', '.join(map(str, ids[:MAX_NAMED_IDS]))}{more}"
