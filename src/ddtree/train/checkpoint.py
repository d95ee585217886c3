"""The state of a training run on disk: drafter, optimiser and step, to go on from exactly there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddtree.errors import CheckpointError, ConfigError, first_line
from ddtree.train.whole_file import write_whole

PATTERN = "step-*.pt"
KEPT = 2


class Checkpoint(NamedTuple):
    """What is needed to go on: `step` is the number of steps done."""

    step: int
    drafter: dict[str, Tensor]
    optimizer: dict[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint, fingerprint: str) -> Path:
    """Write a checkpoint as a whole file and drop all but the newest ones."""
    path = folder / f"step-{checkpoint.step:08d}.pt"
    state = {**checkpoint._asdict(), "fingerprint": fingerprint}
    write_whole(path, lambda file: torch.save(state, file))
    for old in checkpoint_files(folder)[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def checkpoint_files(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    return sorted(folder.glob(PATTERN))


def newest_step(folder: Path) -> int:
    """Steps done at the newest checkpoint, 0 where there is none."""
    files = checkpoint_files(folder)
    return int(files[-1].stem.partition("-")[2]) if files else 0


def load_checkpoint(folder: Path, fingerprint: str, device: torch.device) -> Checkpoint | None:
    """The newest checkpoint of a folder, None where there is none.

    Raises:
        ConfigError: it was written by another recipe.
        CheckpointError: the file is broken.
    """
    files = checkpoint_files(folder)
    if not files:
        return None
    try:
        state = torch.load(files[-1], map_location=device, weights_only=True)
        found = str(state.pop("fingerprint"))
        checkpoint = Checkpoint(**state)
    except Exception as error:  # torch raises what its unpickler and zip reader raise
        raise CheckpointError(
            f"{files[-1]} cannot be read ({first_line(error)}); delete it to go on from the one before"
        ) from error
    if found != fingerprint:
        raise ConfigError(
            f"{files[-1]} was written by another recipe (fingerprint {found[:12]}, not {fingerprint[:12]}); "
            "choose another output folder, start anew with --no-resume, or restore the recipe"
        )
    return checkpoint
